"""`attach`: bitwise the bare loop while nothing is wrong, and nothing broken reaches the weights, whoever steps."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

import surefoot as sf
from loops import differences, everything
from surefoot.guard.attach import attach_with
from surefoot.guard.context import GuardSettings

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = float("nan")


class Decaying(torch.optim.Optimizer):
    """A third-party optimizer that does not care about gradients: it decays every weight and counts its steps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.mul_(1 - 0.1 * group["lr"])
                state = self.state[p]
                state["age"] = state.get("age", 0) + 1
                state.setdefault("trace", torch.zeros_like(p)).mul_(0.9)
                if p.grad is not None:
                    state["trace"].add_(p.grad)
                    p.sub_(group["lr"] * state["trace"])
        return loss


class NestedAdam(torch.optim.Adam):
    """A subclass that brings its own `step` and calls the one of its base."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5),
    "third-party": lambda p: Decaying(p),
    "nested": lambda p: NestedAdam(p, lr=0.01),
}
WITH_SCALER = ["adamw", "fused adamw", "sgd", "fused sgd"]
MODES: dict[str, dict[str, Any]] = {
    "guard": {},
    "guard, decided on the device": {"decide_on": "device"},
    "watch": {"mode": "watch"},
    "watch, read later": {"mode": "watch", "decide_on": "device"},
}


def built(optimizer: str | Callable[[Any], Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return model, make(model.parameters())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def loss_of(model: nn.Module, step: int, bad: frozenset[int] = frozenset()) -> torch.Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x * NAN if step in bad else x), y)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int = 30,
    *,
    closure: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
    bad: frozenset[int] = frozenset(),
    times: float = 1.0,
) -> None:
    for step in range(steps):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, bad) * times
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        if scheduler is not None:
            scheduler.step()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": dict(model.state_dict()),
            "state": optimizer.state_dict()["state"],
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        }
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            if one.ndim
            else torch.equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ---- do no harm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_healthy_attached_run_is_bitwise_the_bare_run(optimizer, closure, mode):
    bare = built(optimizer)
    train(*bare, closure=closure)
    random = torch.get_rng_state()
    model, opt = built(optimizer)
    attachment = sf.attach(model, opt, **MODES[mode])
    train(model, opt, closure=closure)
    assert differences(everything(*bare), everything(model, opt)) == []
    assert torch.equal(random, torch.get_rng_state())
    assert attachment.counts == {
        "steps": 30, "applied": 30, "skipped": 0, "clipped": 0, "overflows": 0, "alarms": 0,
    }  # fmt: skip
    if closure:
        assert attachment.history[-1].signals.loss is not None


@pytest.mark.parametrize("mode", ["guard", "watch"])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_bitwise_the_bare_run(line_search, mode):
    def make(p: Any) -> Any:
        return torch.optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn=line_search)

    bare = built(make)
    train(*bare, steps=8, closure=True)
    model, opt = built(make)
    attachment = sf.attach(model, opt, mode=mode)
    train(model, opt, steps=8, closure=True)
    assert same(state_of(*bare), state_of(model, opt))
    assert attachment.counts["applied"] == 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", WITH_SCALER)
def test_a_run_with_a_grad_scaler_is_bitwise_the_bare_run(optimizer, mode):
    bare, bare_scaler = built(optimizer), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    train(*bare, scaler=bare_scaler)
    model, opt = built(optimizer)
    attachment = sf.attach(model, opt, **MODES[mode])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    train(model, opt, scaler=scaler)
    assert same(state_of(*bare), state_of(model, opt))
    assert scaler.state_dict() == bare_scaler.state_dict()
    assert not hasattr(opt, "grad_scale")
    assert not hasattr(opt, "found_inf")
    assert attachment.counts["applied"] == 30


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", ["fused adamw", "fused adam"])
def test_a_grad_scalers_overflow_stays_its_own_decision_and_counts_as_one(optimizer, mode):
    bare, bare_scaler = built(optimizer), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    train(*bare, steps=12, scaler=bare_scaler, times=64.0)
    model, opt = built(optimizer)
    attachment = sf.attach(model, opt, **MODES[mode])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    train(model, opt, steps=12, scaler=scaler, times=64.0)
    assert same(state_of(*bare), state_of(model, opt))
    assert scaler.state_dict() == bare_scaler.state_dict()
    counts = attachment.counts
    assert counts["overflows"] == counts["skipped"] > 0
    assert counts["applied"] + counts["skipped"] == 12
    assert counts["alarms"] == 0
    first, last = attachment.history[0].signals, attachment.history[-1].signals
    assert first.loss_scale == 2.0**127
    assert last.loss_scale == scaler.get_scale()
    assert 0 < last.grad_norm < 1_000, "the norm is that of the unscaled gradients"


def test_an_overflow_that_never_reaches_the_optimizer_can_be_reported():
    model, opt = built("adamw")
    attachment = sf.attach(model, opt)
    attachment.skipped_by_scaler(loss_scale=65536.0)
    assert attachment.counts["overflows"] == attachment.counts["skipped"] == 1
    assert attachment.counts["alarms"] == 0
    assert attachment.history[0].signals.loss_scale == 65536.0


def test_a_step_with_a_nan_loss_that_a_scaler_has_skipped_is_no_overflow():
    model, optimizer = built("adamw")
    attachment = sf.attach(model, optimizer)
    attachment.observe(loss=NAN)
    attachment.skipped_by_scaler(1024.0)
    assert (attachment.counts["skipped"], attachment.counts["overflows"]) == (1, 0)
    assert attachment.history[0].reasons == ("nonfinite",)
    assert attachment.incidents[0].kind == "nonfinite"


@pytest.mark.parametrize("first", ["scheduler", "attach"])
def test_a_scheduler_may_come_first_or_second(first):
    def run(attached: bool) -> tuple[Any, int]:
        model, opt = built("sgd")
        attachment = None
        if attached and first == "attach":
            attachment = sf.attach(model, opt)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=40)
        if attached and first == "scheduler":
            attachment = sf.attach(model, opt)
        train(model, opt, scheduler=scheduler)
        return state_of(model, opt), attachment.steps if attachment else 0

    (bare, _), (attached, steps) = run(False), run(True)
    assert same(bare, attached)
    assert steps == 30


# ---- refused steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
@pytest.mark.parametrize("mode", ["guard", "guard, decided on the device"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_refused_step_leaves_weights_moments_and_counts_bitwise(optimizer, mode, closure):
    model, opt = built(optimizer)
    attachment = sf.attach(model, opt, **MODES[mode])
    train(model, opt, steps=3, closure=closure)
    before = state_of(model, opt)
    for step in (5, 6):
        opt.zero_grad()

        def evaluate(step: int = step) -> torch.Tensor:
            loss = loss_of(model, step, frozenset({5, 6}))
            loss.backward()
            return loss

        if closure:
            assert math.isnan(opt.step(evaluate).detach())
        else:
            evaluate()
            opt.step()
        assert all(p.grad is not None for p in model.parameters()), "the gradients are back"
        assert not hasattr(opt, "found_inf")
    after = state_of(model, opt)
    if mode == "guard":  # on the device, buffers are restored once the result is read
        assert same(before, after)
    assert same(before["state"], after["state"])
    assert same(before["groups"], after["groups"])
    assert same(
        {k: v for k, v in before["model"].items() if "running" not in k and "num_" not in k},
        {k: v for k, v in after["model"].items() if "running" not in k and "num_" not in k},
    )
    attachment.detach()
    assert attachment.counts["skipped"] == 2
    assert [each.kind for each in attachment.incidents] == ["nonfinite", "nonfinite"]


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_a_refused_step_of_lbfgs_leaves_everything_and_the_next_one_trains(line_search):
    model, opt = built(lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn=line_search))
    attachment = sf.attach(model, opt)
    train(model, opt, steps=2, closure=True)
    before = state_of(model, opt)
    train(model, opt, steps=1, closure=True, bad=frozenset({0}))
    assert same(before, state_of(model, opt))
    train(model, opt, steps=1, closure=True)
    assert not same(before, state_of(model, opt))
    assert attachment.counts["skipped"] == 1
    assert attachment.counts["applied"] == 3


def test_a_search_of_lbfgs_that_ends_at_nan_is_undone_and_described_as_that():
    model = nn.Linear(3, 1)
    opt = torch.optim.LBFGS(model.parameters(), max_iter=4)
    attachment, evaluations, before = sf.attach(model, opt), 0, [p.clone() for p in model.parameters()]

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        opt.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean() * (1.0 if evaluations == 1 else math.nan)
        loss.backward()
        return loss

    opt.step(closure)
    attachment.detach()
    assert evaluations > 1
    assert all(map(torch.equal, before, model.parameters()))
    assert "own evaluations of the loss led to non-finite parameters" in attachment.incidents[0].summary


def test_an_overflow_at_the_first_step_does_not_leave_fused_sgd_with_unfilled_momentum():
    """torch allocates the buffers and leaves them unfilled when it is told to leave the step out."""
    model, opt = built("fused sgd")
    sf.attach(model, opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    train(model, opt, steps=1, scaler=scaler, times=64.0)
    assert not opt.state_dict()["state"]


@pytest.mark.parametrize("optimizer", ["fused adamw", "adamw"])
def test_a_nan_under_a_grad_scaler_reaches_nothing(optimizer):
    model, opt = built(optimizer)
    sf.attach(model, opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    train(model, opt, steps=10, scaler=scaler, bad=frozenset({4}))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_watching_changes_nothing_even_when_a_step_breaks_the_weights():
    bare = built("sgd")
    train(*bare, steps=6, bad=frozenset({3}))
    model, opt = built("sgd")
    seen: list[sf.StepRecord] = []
    attachment = sf.attach(model, opt, mode="watch", on_step=seen.append)
    train(model, opt, steps=6, bad=frozenset({3}))
    assert all(p.isnan().any() for p in bare[0].parameters())
    for one, other in zip(bare[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
    assert [bool(each.reasons) for each in seen] == [False] * 3 + [True] * 3
    assert not any(each.skipped for each in seen)
    assert attachment.counts["skipped"] == 0
    assert [each.kind for each in attachment.incidents] == ["nonfinite"]


@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw", "third-party"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
def test_clipping_gives_the_weights_of_clip_grad_norm(optimizer, scaled):
    def run(attached: bool) -> dict[str, torch.Tensor]:
        model, opt = built(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000) if scaled else None
        if attached:
            sf.attach(model, opt, clip=sf.ClipByNorm(0.05))
        for step in range(20):
            opt.zero_grad()
            loss = loss_of(model, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if not attached:
                if scaler is not None:
                    scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if scaler is None:
                opt.step()
            else:
                scaler.step(opt)
                scaler.update()
        return {name: p.detach() for name, p in model.named_parameters()}

    bare, clipped = run(False), run(True)
    del bare["0.bias"]  # batch norm takes it out again: its gradient is rounding noise, which Adam enlarges
    for name, value in bare.items():
        torch.testing.assert_close(clipped[name], value)


@pytest.mark.parametrize("optimizer", ["fused adamw", "adamw"])
def test_shapers_see_unscaled_gradients_under_a_grad_scaler(optimizer):
    def run(attached: bool) -> dict[str, torch.Tensor]:
        model, opt = built(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        if attached:
            sf.attach(model, opt, clip=sf.ClipByValue(0.01))
        for step in range(10):
            opt.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if not attached:
                scaler.unscale_(opt)
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            scaler.step(opt)
            scaler.update()
        return {name: p.detach() for name, p in model.named_parameters() if name != "0.bias"}

    bare, clipped = run(False), run(True)
    for name, value in bare.items():
        torch.testing.assert_close(clipped[name], value)


def test_budgets_cut_the_rate_for_the_step_alone_and_halt_in_the_end():
    model, opt = built("sgd")
    attachment = sf.attach(model, opt, escalation=sf.Escalation(skips=1, cuts=1))
    train(model, opt, steps=2)
    with pytest.raises(sf.TrainingHalted, match="halted at step"):
        train(model, opt, steps=10, bad=frozenset(range(10)))
    assert opt.param_groups[0]["lr"] == 0.05
    assert attachment.counts["skipped"] == 4
    opt.zero_grad()
    loss_of(model, 1).backward()
    opt.step()  # whoever catches it may go on
    assert attachment.counts["applied"] == 3


# ---- the optimizer stays what it is ---------------------------------------------------------------------------------


def test_copies_pickles_and_state_dicts_are_those_of_a_bare_optimizer():
    bare_model, bare = built("adamw")
    train(bare_model, bare, steps=3)
    model, opt = built("adamw")
    attachment = sf.attach(model, opt)
    train(model, opt, steps=3)
    assert same(bare.state_dict(), opt.state_dict())
    assert len(pickle.dumps(bare)) == len(pickle.dumps(opt))
    twin_model, twin = copy.deepcopy((model, opt))
    restored = pickle.loads(pickle.dumps(opt))
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    assert not twin._optimizer_step_pre_hooks
    assert not restored._optimizer_step_pre_hooks
    train(twin_model, twin, steps=1)
    assert attachment.steps == 3, "a copy is not attached"
    opt.load_state_dict(bare.state_dict())
    train(model, opt, steps=1)
    assert attachment.steps == 4


def test_detach_removes_everything_and_may_be_called_twice():
    model, opt = built("adamw")
    untouched = dict(vars(opt))
    with sf.attach(model, opt) as attachment:
        assert attachment.attached
        train(model, opt, steps=2)
        assert attachment.optimizer is opt
    attachment.detach()
    assert not attachment.attached
    assert vars(opt).keys() == untouched.keys()
    assert not opt._optimizer_step_pre_hooks
    assert not opt._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    train(model, opt, steps=1, bad=frozenset({0}))
    assert attachment.steps == 2
    assert any(p.isnan().any() for p in model.parameters())
    sf.attach(model, opt)


def test_the_last_detach_leaves_torch_as_it_was(tmp_path):
    def ours() -> list[Any]:
        return [hook for hook in global_hooks.values() if hook.__module__.startswith("surefoot.guard")]

    (model, opt), (other, another) = built("adamw"), built("adamw")
    sf.attach(model, opt, incidents=tmp_path).detach()  # other tests may have left an optimizer attached
    code = torch.autograd.backward.__code__
    first, second = sf.attach(model, opt, incidents=tmp_path), sf.attach(other, another)
    assert torch.autograd.backward.__code__ is not code
    second.detach()
    assert ours()
    seen = []

    def detach(*_: Any) -> None:
        first.detach()
        seen.append(ours())

    handle = register_optimizer_step_pre_hook(detach)
    another.step()  # in a step torch goes through these hooks
    handle.remove()
    first.detach()
    assert len(seen[0]) == 1
    assert not ours()
    assert torch.autograd.backward.__code__ is code


def test_detaching_from_inside_a_step_is_fine():
    model, opt = built("adamw")
    found: list[sf.Attachment] = []
    found.append(sf.attach(model, opt, on_step=lambda record: found[0].detach()))
    train(model, opt, steps=3)
    assert found[0].steps == 1
    assert not opt._optimizer_step_pre_hooks


def test_neither_model_nor_optimizer_lives_longer_and_results_stay():
    model, opt = built("adamw")
    attachment = sf.attach(model, opt)
    train(model, opt, steps=3)
    alive = [weakref.ref(thing) for thing in (model, opt, *model.parameters(), *model.modules())]
    gc.disable()
    try:
        del model, opt
        assert [each() for each in alive if each() is not None] == [], "freed at once, without the collector"
    finally:
        gc.enable()
    assert attachment.optimizer is None
    assert not attachment.attached
    assert attachment.counts["applied"] == 3
    attachment.detach()


def test_dropping_the_attachment_does_not_detach_it():
    model, opt = built("adamw")
    sf.attach(model, opt)
    gc.collect()
    train(model, opt, steps=3, bad=frozenset({1}))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_parameters_added_later_are_guarded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    opt = torch.optim.Adam(model[2].parameters(), lr=0.01)
    attachment = sf.attach(model, opt, clip=sf.ClipPerTensor())
    train(model, opt, steps=3)
    opt.add_param_group({"params": model[0].parameters(), "lr": 0.001})
    train(model, opt, steps=3)
    assert attachment.history[-1].signals.layers.names == ("2.weight", "2.bias", "0.weight", "0.bias")
    before = state_of(model, opt)
    train(model, opt, steps=1, bad=frozenset({0}))
    assert same(before, state_of(model, opt))


def test_two_optimizers_are_guarded_on_their_own(tmp_path):
    torch.manual_seed(0)
    one, two = nn.Linear(6, 3), nn.Linear(6, 3)
    opts = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.Adam(two.parameters())
    attachments = [sf.attach(net, opt, log=tmp_path) for net, opt in zip((one, two), opts, strict=True)]
    for step in range(4):
        for net, opt in zip((one, two), opts, strict=True):
            opt.zero_grad()
            loss_of(net, step, frozenset({2}) if net is two else frozenset()).backward()
            opt.step()
    assert [each.counts["skipped"] for each in attachments] == [0, 1]
    attachments[0].log.close()
    assert sf.load_run(tmp_path).scalars.num_rows == 8


def test_guarding_twice_is_an_error_and_watching_beside_a_guard_is_not():
    model, opt = built("fused adamw")
    guard = sf.attach(model, opt, clip=sf.ClipByNorm(1e-3), decide_on="device")
    with pytest.raises(sf.UsageError, match="detach"):
        sf.attach(model, opt)
    watcher = sf.attach(model, opt, mode="watch")
    train(model, opt, steps=5)
    assert [each.signals.grad_norm for each in watcher.history] == [each.signals.grad_norm for each in guard.history]
    assert watcher.history[-1].signals.loss_scale == 1.0


def test_a_stabilizers_clipping_is_not_taken_for_a_loss_scale():
    model, opt = built("fused adamw")
    watcher = sf.attach(model, opt, mode="watch")
    stabilizer = sf.TrainingStabilizer(model, opt, clip=sf.ClipByNorm(1e-3), accumulate=2, decide_on="device")
    for step in range(10):
        stabilizer.backward(loss_of(model, step), weight=8)
        stabilizer.step()
    seen, own = watcher.history, stabilizer.history
    assert len(seen) == 5
    assert [each.signals.grad_norm for each in seen] == [each.signals.grad_norm for each in own]
    assert {each.signals.loss_scale for each in seen} == {1.0}
    stabilizer.backward(loss_of(model, 0, frozenset({0})), weight=8)
    stabilizer.step()
    stabilizer.backward(loss_of(model, 1), weight=8)
    stabilizer.step()
    assert watcher.counts["skipped"] == 1, "the kernel was told to leave it out"
    assert watcher.counts["overflows"] == 0


# ---- other hooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_order_of_hooks_does_not_matter(when):
    model, opt = built("adamw")
    seen: list[list[bool]] = []

    def poison(optimizer: Any, args: Any, kwargs: Any) -> None:
        model[0].weight.grad.fill_(NAN)

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append([p.grad is not None for p in model.parameters()])

    def register() -> None:
        opt.register_step_pre_hook(poison)
        opt.register_step_post_hook(look)

    if when == "before":
        register()
    attachment = sf.attach(model, opt)
    if when == "after":
        register()
    before = state_of(model, opt)
    train(model, opt, steps=1)
    assert same(before, state_of(model, opt)), "what a hook did to the gradients is decided on"
    assert seen == [[True] * len(list(model.parameters()))], "and its neighbour sees the gradients"
    assert attachment.counts["skipped"] == 1


def test_a_step_that_raises_leaves_nothing_behind():
    class Raising(torch.optim.Adam):
        fails = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("out of luck")
            return super().step(closure)

    model, opt = built(lambda p: Raising(p, lr=0.01))
    attachment = sf.attach(model, opt)
    train(model, opt, steps=2)
    opt.fails = True
    opt.zero_grad()
    loss_of(model, 0, frozenset({0})).backward()
    with pytest.raises(RuntimeError, match="out of luck"):
        opt.step()
    opt.fails = False
    train(model, opt, steps=2)
    assert attachment.counts["applied"] == 4
    opt.fails = True
    opt.zero_grad()
    loss_of(model, 0, frozenset({0})).backward()
    with pytest.raises(RuntimeError, match="out of luck"):
        opt.step()
    attachment.detach()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("optimizer", ["adam", "third-party", "lbfgs"])
def test_a_closure_that_raises_leaves_everything_as_it_was(optimizer):
    model, opt = built((lambda p: torch.optim.LBFGS(p)) if optimizer == "lbfgs" else optimizer)
    attachment = sf.attach(model, opt)
    train(model, opt, steps=2, closure=True)
    before = state_of(model, opt)

    def closure() -> Any:
        raise KeyError("row 7")

    with pytest.raises(KeyError, match="row 7"):
        opt.step(closure)
    assert same(before, state_of(model, opt))
    train(model, opt, steps=1, closure=True)
    assert attachment.counts["applied"] == 3


def test_a_callback_that_raises_does_not_end_training(caplog):
    model, opt = built("adamw")
    attachment = sf.attach(model, opt, on_step=lambda record: 1 / 0)
    train(model, opt, steps=3)
    assert attachment.steps == 3
    assert len([each for each in caplog.records if "on_step" in each.getMessage()]) == 1


def test_signals_and_losses_are_observed_with_the_step():
    model, opt = built("adamw")
    attachment = sf.attach(model, opt)
    for step in range(3):
        opt.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        attachment.observe(loss=loss, entropy=0.5)
        opt.step()
    assert attachment.history[-1].signals.loss == pytest.approx(loss.item())
    assert attachment.history[-1].signals.extra == {"entropy": 0.5}


def test_without_a_model_parameters_are_named_by_their_place_or_by_the_caller():
    model, opt = built("adamw")
    first, second = sf.attach(None, opt, mode="watch"), None
    named = GuardSettings(mode="watch", name_of=lambda p: f"shape {tuple(p.shape)}")
    second = attach_with(None, opt, named)
    train(model, opt, steps=1)
    assert first.history[0].signals.layers.names[0] == "optimizer.group0.0"
    assert second.history[0].signals.layers.names[0] == "shape (16, 6)"


def test_wrong_use_says_what_to_do():
    model, opt = built("adamw")
    with pytest.raises(sf.SettingError, match=r"torch\.optim\.Optimizer"):
        sf.attach(model, object())
    with pytest.raises(sf.SettingError, match="'guard' or 'watch'"):
        sf.attach(model, opt, mode="look")
    with pytest.raises(sf.SettingError, match="do not belong to the model"):
        sf.attach(nn.Linear(2, 2), opt)
    with pytest.raises(sf.SettingError, match="mode='guard'"):
        sf.attach(model, opt, mode="watch", clip=sf.ClipByNorm(1.0))


def test_a_wrapper_of_an_optimizer_is_looked_through():
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model, opt = built("adamw")
    attachment = sf.attach(model, Wrapper(opt))
    train(model, opt, steps=2)
    assert attachment.steps == 2


class _Unhashable(torch.optim.SGD):
    def __eq__(self, other: object) -> bool:
        return self is other


def test_an_optimizer_that_cannot_be_hashed_steps_as_ever_attached_or_not() -> None:
    model = nn.Linear(2, 2)
    sf.attach(model, torch.optim.SGD(model.parameters(), 0.1)).detach()
    optimizer = _Unhashable(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    attachment = sf.attach(model, optimizer)
    optimizer.step()
    attachment.detach()
    assert attachment.counts["applied"] == 1


class _LineSearch(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any) -> Any:
        closure(backward=True)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)
        return closure(backward=False)


@pytest.mark.parametrize("mode", ["guard", "watch"])
def test_a_closure_gets_the_arguments_that_the_optimizer_passes(mode: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = _LineSearch(model.parameters())
    calls = []

    def closure(backward: bool = True) -> torch.Tensor:
        calls.append(backward)
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        if backward:
            loss.backward()
        return loss

    attachment = sf.attach(model, optimizer, mode=mode)
    optimizer.step(closure)
    assert calls == [True, False]
    assert attachment.counts["applied"] == 1
