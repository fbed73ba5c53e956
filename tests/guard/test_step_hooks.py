"""Hooks around a step, however it ends: nothing that was changed or copied for a step outlives it."""

from __future__ import annotations

import copy
import functools
import pickle
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import surefoot as sf
from surefoot.act import apply
from surefoot.core.nested import equal

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = float("nan")


class Done(Exception):
    pass


def made(kind: Callable[..., Any], *args: Any, **settings: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, kind(model.parameters(), *args, **settings)


def backward(model: nn.Module, times: float = 1.0) -> None:
    (model(torch.ones(3, 4)).square().mean() * times).backward()


def closure_of(model: nn.Module, optimizer: Any) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    return closure


def load_sevens(model: nn.Module) -> None:
    model.load_state_dict({name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()})


def is_sevens(model: nn.Module) -> bool:
    return all(bool((parameter == 7).all()) for parameter in model.parameters())


# ---- a step that raises ---------------------------------------------------------------------------------------------


class RaisesAtTheEnd(torch.optim.SGD):
    """Not torch's own step: a refused one is copied, and so is each one with a closure."""

    fails = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails:
            raise Done
        return loss


def interrupted_lbfgs(model: nn.Module, optimizer: Any) -> None:
    def interrupt(*_: object) -> None:
        raise Done

    optimizer._add_grad = interrupt  # as Ctrl-C outside of the closure
    with suppress(Done):
        optimizer.step(closure_of(model, optimizer))
    del optimizer._add_grad


def interrupted_closure(model: nn.Module, optimizer: Any) -> None:
    with suppress(Done):
        optimizer.step(closure_of(model, optimizer))


def interrupted_refused(model: nn.Module, optimizer: Any) -> None:
    backward(model, NAN)
    with suppress(Done):
        optimizer.step()


STALE = {
    "lbfgs": (functools.partial(torch.optim.LBFGS, lr=0.1), interrupted_lbfgs),
    "closure": (functools.partial(RaisesAtTheEnd, lr=0.1), interrupted_closure),
    "refused": (functools.partial(RaisesAtTheEnd, lr=0.1), interrupted_refused),
}


@pytest.mark.parametrize("then", ["detach", "step"])
@pytest.mark.parametrize("case", STALE)
def test_weights_loaded_after_a_step_that_raised_stay(case: str, then: str) -> None:
    make, interrupt = STALE[case]
    model, optimizer = made(make)
    attachment = sf.attach(model, optimizer)
    if case == "lbfgs":  # whose bare step does not survive an interrupted first one
        optimizer.step(closure_of(model, optimizer))
    interrupt(model, optimizer)
    load_sevens(model)
    optimizer.fails = False
    optimizer.param_groups[0]["lr"] = 0.0
    if then == "detach":
        attachment.detach()
    else:
        optimizer.step(closure_of(model, optimizer))
    assert is_sevens(model)


@pytest.mark.parametrize("case", STALE)
def test_weights_loaded_while_the_exception_is_handled_stay(case: str) -> None:
    """The frame of the step lives until then, and what was changed for the step is put back afterwards."""
    model, optimizer = made(STALE[case][0])
    attachment = sf.attach(model, optimizer)
    try:
        if case == "lbfgs":
            optimizer._add_grad = None
            optimizer.step(closure_of(model, optimizer))
        else:
            backward(model, NAN if case == "refused" else 1.0)
            optimizer.step(*([] if case == "refused" else [closure_of(model, optimizer)]))
    except (Done, TypeError):
        load_sevens(model)
    else:
        pytest.fail("the step did not raise")
    attachment.detach()
    assert is_sevens(model)


@pytest.mark.parametrize("guarded", ["stabilizer", "attach"])
def test_a_closure_may_raise_to_end_lbfgs_early(guarded: str) -> None:
    def run(how: str) -> float:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        x = torch.randn(32, 4)
        y = x.sum(1, True)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=100)
        stabilizer = sf.TrainingStabilizer(model, optimizer) if how == "stabilizer" else None
        if how == "attach":
            sf.attach(model, optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward() if stabilizer is None else stabilizer.backward(loss)
            if loss < 0.5:
                raise Done
            return loss

        with pytest.raises(Done):
            optimizer.step(closure) if stabilizer is None else stabilizer.step(closure)
        return float((model(x) - y).square().mean().detach())

    assert run(guarded) == run("bare") < 0.5


def test_a_closure_that_raises_on_weights_that_are_not_finite_leaves_those_of_before() -> None:
    model, optimizer = made(torch.optim.LBFGS, lr=0.1)
    sf.attach(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    evaluate = closure_of(model, optimizer)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        if losses:
            with torch.no_grad():
                model.weight.fill_(NAN)  # where the search has gone
            raise Done
        losses.append(evaluate())
        return losses[0]

    with pytest.raises(Done):
        optimizer.step(closure)
    assert equal(before, model.state_dict())


class Base(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise Done


class FallsBack(Base):
    def step(self, closure: Any = None) -> Any:
        try:
            super().step()
        except Done:
            torch.optim.SGD.step(self)


def test_a_subclass_may_catch_what_the_step_of_its_base_raises() -> None:
    Base([nn.Parameter(torch.ones(1))], 0.1)  # from here on the step of the base runs hooks
    model, optimizer = made(FallsBack, 0.1)
    attachment = sf.attach(model, optimizer)
    backward(model)
    optimizer.step()
    assert attachment.counts["applied"] == 1
    optimizer.zero_grad()
    backward(model, NAN)
    optimizer.step()
    assert bool(model.weight.grad.isnan().all()), "as backward left it"
    assert attachment.counts["skipped"] == 1
    load_sevens(model)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert is_sevens(model)


@pytest.mark.parametrize("mode", ["guard", "watch"])
def test_nothing_of_a_step_that_raised_is_kept_or_hidden(mode: Any) -> None:
    model, optimizer = made(RaisesAtTheEnd, 0.1)
    sf.attach(model, optimizer, mode=mode)
    backward(model, NAN)
    gradient = weakref.ref(model.weight.grad)
    with suppress(Done):
        optimizer.step()
    assert gradient() is not None
    assert model.weight.grad is gradient()
    optimizer.zero_grad()
    assert gradient() is None, "an out-of-memory handler can free the gradients"


# ---- what an optimizer does in its own step -------------------------------------------------------------------------


class SelfZeroing(torch.optim.SGD):
    to_none = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad(self.to_none)
        return loss


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_step_has_zeroed_do_not_come_back(to_none: bool) -> None:
    model, optimizer = made(SelfZeroing, 0.1)
    optimizer.to_none = to_none
    attachment = sf.attach(model, optimizer, escalation=None)
    for step in range(10):
        backward(model, NAN if step == 5 else 1.0)
        optimizer.step()
    assert attachment.counts["skipped"] == 1
    assert attachment.counts["applied"] == 9


class Decays(torch.optim.SGD):
    in_place = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            if self.in_place:
                group["lr"].mul_(0.9)
            else:
                group["lr"] *= 0.9
        return loss


class Schedules(torch.optim.SGD):
    taken = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * 0.99**self.taken
        return loss


def with_cuts(optimizer: Any, model: nn.Module) -> Any:
    """Four refused steps, so that the learning rate is cut, and five that are applied."""
    attachment = sf.attach(model, optimizer, escalation=sf.Escalation(skips=1, cuts=3, calm_steps=1000))
    for step in range(9):
        optimizer.zero_grad()
        backward(model, NAN if step < 4 else 1.0)
        optimizer.step()
    assert attachment.history[-1].signals.lr < 0.06, "a cut is active"
    return optimizer.param_groups[0]["lr"]


def test_a_learning_rate_that_the_step_has_changed_stays_changed_under_a_cut() -> None:
    model, optimizer = made(Decays, 0.1)
    assert with_cuts(optimizer, model) == pytest.approx(0.1 * 0.9**5)
    model, optimizer = made(Schedules, 0.1)
    assert with_cuts(optimizer, model) == 0.1 * 0.99**optimizer.taken


def test_a_learning_rate_in_a_tensor_that_the_step_has_changed_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    model, optimizer = made(Decays, rate)
    optimizer.in_place = True
    assert with_cuts(optimizer, model) is rate
    assert float(rate) == pytest.approx(0.1 * 0.9**5)


class NeedsGradients(torch.optim.Optimizer):
    """Evaluates a closure twice, as SAM does, and does not expect a missing gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=0.01)
            with torch.enable_grad():
                closure()
        for parameter in parameters:
            parameter.sub_(0.01 * parameter + self.param_groups[0]["lr"] * parameter.grad)
        return loss


@pytest.mark.parametrize("with_closure", [False, True])
def test_an_optimizer_that_needs_every_gradient_survives_a_refused_step(with_closure: bool) -> None:
    model, optimizer = made(NeedsGradients, 0.1)
    attachment = sf.attach(model, optimizer)
    before = copy.deepcopy(model.state_dict())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        backward(model, NAN)
        return torch.tensor(0.0)

    if with_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    assert equal(before, model.state_dict())
    assert bool(model.weight.grad.isnan().all()), "as backward left it"
    assert attachment.counts["skipped"] == 1


class Wraps(torch.optim.Optimizer):
    """As SAM does: the moments are those of an optimizer inside, and all gradients are needed."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.AdamW(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        torch.stack([parameter.grad.norm() for parameter in self.param_groups[0]["params"]])
        return self.inner.step(closure)


def test_the_moments_of_an_optimizer_inside_of_another_stay_too() -> None:
    model, optimizer = made(Wraps, 0.1)
    sf.attach(model, optimizer)
    backward(model)
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.inner.state_dict()))
    backward(model, NAN)
    optimizer.step()
    assert equal(before, (model.state_dict(), optimizer.inner.state_dict()))


class CountsInState(torch.optim.SGD):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.state["steps"] = 0

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] += 1
        return super().step(closure)


def test_the_state_may_hold_values_that_are_no_dictionaries() -> None:
    model, optimizer = made(CountsInState, 0.1)
    attachment = sf.attach(model, optimizer)
    optimizer.step(closure_of(model, optimizer))
    backward(model, NAN)
    optimizer.step()
    assert optimizer.state["steps"] == 1
    assert attachment.counts["applied"] == attachment.counts["skipped"] == 1


@pytest.mark.parametrize("mode", ["guard", "watch"])
@pytest.mark.parametrize("what", ["parameters", "groups"])
def test_an_optimizer_whose_parameters_are_taken_out_steps_on_and_is_guarded_when_it_gets_others(
    what: str, mode: Any
) -> None:
    model, optimizer = made(torch.optim.SGD, 0.1)
    clip = {"clip": sf.ClipPerTensor()} if mode == "guard" else {}
    attachment = sf.attach(None, optimizer, mode=mode, **clip)
    backward(model)
    optimizer.step()
    if what == "groups":
        optimizer.param_groups.clear()
    else:
        optimizer.param_groups[0]["params"] = []
    optimizer.step()
    optimizer.add_param_group({"params": list(model.parameters()), "lr": 0.1})
    optimizer.zero_grad()
    backward(model, NAN)
    optimizer.step()
    assert attachment.counts["steps"] == 3
    assert [bool(each.reasons) for each in attachment.history] == [False, False, True]
    assert bool(model.weight.isfinite().all()) == (mode == "guard")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_gradients_of_any_layout_are_clipped_and_refused() -> None:
    compressed = nn.Parameter(torch.eye(3).to_sparse_csr())
    plain = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([compressed, plain], 0.1)
    attachment = sf.attach(None, optimizer, clip=sf.ClipByNorm(1.0))
    compressed.grad = compressed.detach().clone()
    plain.grad = torch.ones(1, 3).expand(2, 3)
    optimizer.step()
    assert attachment.history[0].signals.grad_norm == pytest.approx(3.0)
    assert compressed.detach().values().tolist() == pytest.approx([1 - 0.1 / 3] * 3)
    assert plain.detach().flatten().tolist() == pytest.approx([1 - 0.1 / 3] * 6)
    before = compressed.detach().values().clone()
    compressed.grad.values().fill_(NAN)
    optimizer.step()
    assert torch.equal(before, compressed.detach().values())
    assert attachment.counts["skipped"] == 1


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize("fused", [True, False])
def test_what_breaks_after_unscale_is_no_overflow(fused: bool, decide_on: Any) -> None:
    model, optimizer = made(torch.optim.AdamW, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attachment = sf.attach(model, optimizer, escalation=None, decide_on=decide_on)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
        scaler.unscale_(optimizer)
        model.weight.grad[0, 0] = NAN
        scaler.step(optimizer)
        scaler.update()
    counts = attachment.counts
    assert (counts["skipped"], counts["alarms"], counts["overflows"]) == (3, 3, 0)


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_an_overflow_that_unscale_has_found_is_one(decide_on: Any) -> None:
    model, optimizer = made(torch.optim.AdamW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attachment = sf.attach(model, optimizer, decide_on=decide_on)
    scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
    model.weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    counts = attachment.counts
    assert (counts["skipped"], counts["alarms"], counts["overflows"]) == (1, 0, 1)


class CountsOperations(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with FlopCounterMode(display=False):
            super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.9)


def test_a_step_that_runs_the_step_of_its_base_in_a_dispatch_mode_is_guarded_as_a_whole() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    model, optimizer = made(CountsOperations, 0.1)
    attachment = sf.attach(model, optimizer)
    before = model.weight.detach().clone()
    backward(model, NAN)
    optimizer.step()
    assert torch.equal(before, model.weight)
    assert attachment.counts["skipped"] == 1


# ---- where the hooks are --------------------------------------------------------------------------------------------


def test_detaching_in_a_hook_of_the_users_is_fine() -> None:
    model, optimizer = made(torch.optim.SGD, 0.1)
    attachment = sf.attach(model, optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: attachment.detach())
    backward(model)
    optimizer.step()
    assert not attachment.attached
    assert attachment.steps == 0
    optimizer.step()
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("decide_on", ["host", "device"])
@pytest.mark.parametrize("kind", ["adamw", "fused adamw", "lbfgs"])
def test_watching_beside_a_guard_counts_what_the_guard_has_left_out(kind: str, decide_on: Any) -> None:
    make = torch.optim.LBFGS if kind == "lbfgs" else functools.partial(torch.optim.AdamW, fused="fused" in kind)
    model, optimizer = made(make)
    guard = sf.attach(model, optimizer, decide_on=decide_on)
    watch = sf.attach(model, optimizer, mode="watch", decide_on=decide_on)
    for step in range(6):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean() * (NAN if step in (2, 3) else 1.0)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert watch.counts["skipped"] == guard.counts["skipped"] == 2
    assert watch.counts["applied"] == guard.counts["applied"] == 4


class SavesAll(torch.optim.SGD):
    def __getstate__(self) -> Any:
        return self.__dict__.copy()


def test_copies_of_an_optimizer_that_saves_its_hooks_are_not_attached() -> None:
    model, optimizer = made(SavesAll, 0.1)
    attachment = sf.attach(model, optimizer)
    pickled = pickle.dumps(optimizer)
    assert b"surefoot" not in pickled
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickled), copy.copy(optimizer)):
        for parameter in twin.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, NAN)
        twin.step()
        assert bool(twin.param_groups[0]["params"][0].isnan().all()), "not guarded"
    assert attachment.steps == 0


class OnlyRenamed(torch.optim.AdamW):
    pass


class Borrowed(torch.optim.AdamW):
    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.5)


def test_a_subclass_that_brings_no_step_of_its_own_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[object] = []
    made_copy = apply.StepCopy.__init__

    def counted(self: Any, *args: Any) -> None:
        copies.append(self)
        made_copy(self, *args)

    monkeypatch.setattr(apply.StepCopy, "__init__", counted)
    model, optimizer = made(OnlyRenamed, lr=0.1)
    attachment = sf.attach(model, optimizer)
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer))
    backward(model, NAN)
    optimizer.step()
    assert attachment.counts["applied"] == 3
    assert copies == []
    model, optimizer = made(Borrowed, lr=0.1)
    before = model.weight.detach().clone()
    sf.attach(model, optimizer)
    backward(model, NAN)
    optimizer.step()
    assert torch.equal(before, model.weight)
    assert len(copies) == 1


def test_a_renamed_fused_optimizer_is_known_whether_it_or_its_base_is_used_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        if "step" in vars(kind):
            monkeypatch.setattr(kind, "step", apply.own_step(kind))  # as before its first use

    class UsedFirst(torch.optim.AdamW):
        pass

    _, optimizer = made(UsedFirst, lr=0.1, fused=True)
    assert UsedFirst.step is not torch.optim.AdamW.step
    assert apply.can_fold(optimizer)
    assert apply.has_torchs_step(optimizer)
