"""A checkpoint that does not fit the run is refused as a whole: nothing is loaded, and the error says what differs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import forked
import surefoot as sf
from resumed import differences
from surefoot.core.random_state import read_streams
from surefoot.keep.checkpoint.storage import write
from surefoot.keep.restore import as_gradient

if TYPE_CHECKING:
    from collections.abc import Callable

optim = torch.optim


class Net(nn.Module):
    """Two layers that are used in a fixed order, and defined in one that can be exchanged."""

    def __init__(self, first: str = "down", dtype: torch.dtype = torch.float32, square: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"down": (4, 4), "up": (4, 4)} if square else {"down": (4, 64), "up": (64, 1)}
        for name in sorted(sizes, key=lambda name: name != first):
            setattr(self, name, nn.Linear(*sizes[name], dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x).relu())


def build(folder: Path, model: nn.Module, optimizer: Any, **settings: Any) -> sf.TrainingStabilizer:
    return sf.TrainingStabilizer(
        model, optimizer, checkpoints=sf.CheckpointManager(folder, every_steps=None), **settings
    )


def train(stabilizer: sf.TrainingStabilizer, model: nn.Module, steps: int = 3) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        stabilizer.backward(model(x).square().mean())
        stabilizer.step()


def saved_run(folder: Path, model: nn.Module | None = None, make: Any = None, **settings: Any) -> nn.Module:
    model = Net() if model is None else model
    stabilizer = build(folder, model, (make or optim.AdamW)(model.parameters()), **settings)
    train(stabilizer, model)
    stabilizer.save()
    return model


def everything(stabilizer: sf.TrainingStabilizer) -> Any:
    own = {"stabilizer": stabilizer.state_dict(), "streams": read_streams()}
    return copy.deepcopy({**stabilizer._run.run_state.gather(), **own})


def check_refused(stabilizer: sf.TrainingStabilizer, match: str) -> None:
    before = everything(stabilizer)
    with pytest.raises(sf.CheckpointError, match=match) as raised:
        stabilizer.restore()
    assert "Nothing was loaded" in str(raised.value)
    assert not differences(everything(stabilizer), before)


# ---- what must not be loaded --------------------------------------------------------------------------------------

SEGFAULT = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_resume_misfits import Net, build, saved_run, train
import surefoot as sf
fused = lambda p: torch.optim.AdamW(p, fused=True)
saved_run(Path(sys.argv[1]), Net("down"), fused)
model = Net("up")
stabilizer = build(Path(sys.argv[1]), model, fused(model.parameters()))
try:
    stabilizer.restore()
except sf.CheckpointError as error:
    print("refused", error)
train(stabilizer, model, 50)
print("alive", flush=True)
"""


def test_layers_that_were_exchanged_are_refused_and_memory_is_not_corrupted(tmp_path: Path) -> None:
    here = Path(__file__).parent
    done = forked.run(["-c", SEGFAULT, tmp_path, here, here.parent])
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout
    assert "in another order: position 0 was 'down.weight' and is 'up.weight'" in done.stdout
    assert "alive" in done.stdout


def test_moments_of_equal_shape_are_not_exchanged(tmp_path: Path) -> None:
    saved_run(tmp_path, Net("down", square=True))
    model = Net("up", square=True)
    check_refused(build(tmp_path, model, optim.AdamW(model.parameters())), "in another order: position 0")


OTHER_KINDS: dict[str, Callable[[Any], Any]] = {
    "Adam": optim.Adam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_another_optimizer_is_refused(tmp_path: Path, name: str) -> None:
    saved_run(tmp_path)
    model = Net()
    check_refused(
        build(tmp_path, model, OTHER_KINDS[name](model.parameters())), f"optimizer is AdamW, and the run's is {name}"
    )


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    saved_run(tmp_path)
    model = Net(dtype=torch.bfloat16)
    check_refused(build(tmp_path, model, optim.AdamW(model.parameters())), "'down.weight' is float32, .* is bfloat16")


def test_another_scheduler_is_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    first = build(tmp_path, model, optimizer, scheduler=optim.lr_scheduler.CosineAnnealingLR(optimizer, 100))
    train(first, model)
    first.save()
    other = optim.AdamW(model.parameters())
    check_refused(
        build(tmp_path, model, other, scheduler=optim.lr_scheduler.LinearLR(other)),
        "scheduler is CosineAnnealingLR, and the run's is LinearLR",
    )


@pytest.mark.parametrize("saved_with", [True, False])
def test_a_scheduler_on_one_side_only_is_refused(tmp_path: Path, saved_with: bool) -> None:
    def run(scheduled: bool) -> tuple[nn.Module, sf.TrainingStabilizer]:
        model = Net()
        optimizer = optim.AdamW(model.parameters())
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 100) if scheduled else None
        return model, build(tmp_path, model, optimizer, scheduler=scheduler)

    model, first = run(saved_with)
    train(first, model)
    first.save()
    expected = (
        "saved with the scheduler CosineAnnealingLR, and the run has none"
        if saved_with
        else "saved without a scheduler, and the run has CosineAnnealingLR"
    )
    check_refused(run(not saved_with)[1], expected)
    assert run(saved_with)[1].restore() == 3


def test_parameters_that_left_the_optimizer_are_named(tmp_path: Path) -> None:
    saved_run(tmp_path)
    model = Net()
    stabilizer = build(tmp_path, model, optim.AdamW(model.up.parameters()))
    check_refused(stabilizer, "optimizer has 'down.weight', 'down.bias', and the run's does not")


def test_a_second_optimizer_beside_the_run_is_compared_too(tmp_path: Path) -> None:
    def both(order: str) -> sf.TrainingStabilizer:
        model, critic = Net(), Net(order, square=True)
        second = optim.AdamW(critic.parameters())
        for parameter in critic.parameters():
            parameter.grad = torch.ones_like(parameter)
        second.step()
        also = {"critic": critic, "critic_optimizer": second}
        return build(tmp_path, model, optim.AdamW(model.parameters()), also_save=also)

    both("down").save()
    check_refused(both("up"), "in 'critic_optimizer', the parameters are in another order")


def forge(folder: Path, change: Callable[[Any], None]) -> None:
    """Rewrite a checkpoint with valid checksums, as whoever wants to do harm would."""
    manager = sf.CheckpointManager(folder)
    found = manager.load()
    assert found is not None
    tree = found.tree
    change(tree)
    facts = {key: found.facts[key] for key in ("quiet", "reasons", "metric", "metric_given", "rank", "world_size")}
    write(found.path, tree, facts, step=found.step, unchecked=("stabilizer", "streams", "data"))


def grow_moment(tree: Any) -> None:
    tree["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)


def spoil_models(tree: Any) -> None:
    tree["models"][0]["down.weight"] = "no tensor"


def spoil_window(tree: Any) -> None:
    del tree["stabilizer"]["window"]


def spoil_streams(tree: Any) -> None:
    tree["streams"]["torch"] = torch.zeros(3, dtype=torch.uint8)


def spoil_position(tree: Any) -> None:
    tree["data"] = {"schema": 99}


def drop_groups(tree: Any) -> None:
    del tree["optimizer"]["param_groups"]


FORGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a moment of another size": (grow_moment, "'exp_avg' of parameter 0 is of shape \\(3,\\), and must be of shape"),
    "no tensor": (spoil_models, "'down.weight' is a str"),
    "no window": (spoil_window, "KeyError: 'window'"),
    "random streams": (spoil_streams, "RNG state size to be 3"),
    "data position": (spoil_position, "schema 99"),
    "no groups": (drop_groups, "not a state that a TrainingStabilizer saved"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_checkpoint_changes_nothing(tmp_path: Path, name: str) -> None:
    saved_run(tmp_path)
    change, match = FORGED[name]
    forge(tmp_path, change)
    model = Net("down")
    stabilizer = build(tmp_path, model, optim.AdamW(model.parameters(), fused=True))
    train(stabilizer, model, 2)
    check_refused(stabilizer, match)


def test_a_failure_in_something_of_the_users_own_changes_nothing_else(tmp_path: Path) -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("not today")

    saved_run(tmp_path, also_save={"picky": Picky()})
    model = Net()
    check_refused(build(tmp_path, model, optim.AdamW(model.parameters()), also_save={"picky": Picky()}), "not today")


def test_a_checkpoint_that_does_not_fit_is_not_returned_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = saved_run(tmp_path)
    forge(tmp_path, grow_moment)
    stabilizer = build(tmp_path, model, optim.AdamW(model.parameters(), fused=True))
    train(stabilizer, model)
    before = everything(stabilizer)
    assert stabilizer._run.persistence.return_to(before=10, tried=0, keep_present=False) is None
    assert not differences(everything(stabilizer), before)
    assert "cannot return to the checkpoint of step 3: its 'exp_avg' of parameter 0" in caplog.text


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ("fp16", None, "it was saved with loss scaling (DynamicLossScaler("),
        ("fp16", "bf16", "and the run has none"),
        (None, "fp16", "it was saved without loss scaling, and the run has DynamicLossScaler("),
        ("fp16", "fp16", None),
    ],
)
def test_loss_scaling_that_was_added_or_dropped_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: Any, now: Any, words: str | None
) -> None:
    saved_run(tmp_path, precision=then)
    model = Net()
    stabilizer = build(tmp_path, model, optim.AdamW(model.parameters()), precision=now)
    assert stabilizer.restore() == 3
    assert words is None or words in caplog.text
    assert ("loss scaling" in caplog.text) == (words is not None)


# ---- what may differ ----------------------------------------------------------------------------------------------


def check_loaded(stabilizer: sf.TrainingStabilizer, model: nn.Module, expected: nn.Module, steps: int = 3) -> None:
    assert stabilizer.restore() == steps
    for one, other in zip(model.parameters(), expected.parameters(), strict=False):
        assert torch.equal(one, other)
    train(stabilizer, model)


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_compiled_model_and_a_plain_one_load_each_others_checkpoints(tmp_path: Path, wrapped_first: bool) -> None:
    def compiled() -> Any:
        return torch.compile(Net(), backend="eager")

    expected = saved_run(tmp_path, compiled() if wrapped_first else Net())
    model = Net() if wrapped_first else compiled()
    check_loaded(build(tmp_path, model, optim.AdamW(model.parameters())), model, expected)


def test_fused_foreach_and_plain_kernels_load_each_others_checkpoints(tmp_path: Path) -> None:
    expected = saved_run(tmp_path, make=lambda p: optim.AdamW(p, fused=True))
    for kernel in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        model = Net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-4, **kernel)  # type: ignore[arg-type]
        check_loaded(build(tmp_path, model, optimizer), model, expected)


def test_a_group_that_was_added_keeps_its_settings_and_starts_again(tmp_path: Path) -> None:
    model = Net()
    first = build(tmp_path, model, optim.AdamW(model.down.parameters(), lr=0.01))
    train(first, model)
    first.save()
    again = Net()
    optimizer = optim.AdamW(again.down.parameters(), lr=0.01)
    optimizer.add_param_group({"params": list(again.up.parameters()), "lr": 0.5})
    stabilizer = build(tmp_path, again, optimizer)
    assert stabilizer.restore() == 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    assert len(optimizer.state) == 2
    train(stabilizer, again)
    assert len(optimizer.state) == 4


def test_parameters_that_were_frozen_stay_in_the_optimizer_and_load(tmp_path: Path) -> None:
    expected = saved_run(tmp_path)
    model = Net()
    model.down.requires_grad_(False)
    check_loaded(build(tmp_path, model, optim.AdamW(model.parameters())), model, expected)


def test_moments_and_gradients_come_back_in_the_memory_layout_of_their_parameter(tmp_path: Path) -> None:
    def fresh() -> tuple[list[nn.Module], list[Any], sf.TrainingStabilizer]:
        torch.manual_seed(0)
        convolutions: list[nn.Module] = [
            nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            for _ in range(2)  # type: ignore[call-overload]
        ]
        optimizers = [optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in convolutions]
        also = {"critic": convolutions[1], "critic_optimizer": optimizers[1]}
        return convolutions, optimizers, build(tmp_path, convolutions[0], optimizers[0], also_save=also)

    def pictures(seed: int) -> Tensor:
        picture = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        return picture.to(memory_format=torch.channels_last)

    def run(models: Any, optimizers: Any, stabilizer: sf.TrainingStabilizer, seeds: range) -> None:
        for seed in seeds:
            stabilizer.backward(models[0](pictures(seed)).square().mean())
            stabilizer.step()
            optimizers[1].zero_grad()
            models[1](pictures(seed)).square().mean().backward()
            optimizers[1].step()

    models, optimizers, stabilizer = fresh()
    run(models, optimizers, stabilizer, range(5))
    stabilizer.save()
    run(models, optimizers, stabilizer, range(5, 8))
    others, other_optimizers, again = fresh()
    assert again.restore() == 5
    for other, optimizer in zip(others, other_optimizers, strict=True):
        weight: Any = other.weight
        assert optimizer.state[weight]["exp_avg"].stride() == weight.stride() != (27, 9, 3, 1)
        assert as_gradient(torch.ones(4, 3, 3, 3), weight).stride() == weight.stride()
    run(others, other_optimizers, again, range(5, 8))
    for one, other in zip(models, others, strict=True):
        assert all(map(torch.equal, one.parameters(), other.parameters()))


class LowRank(optim.Optimizer):
    """Keeps a moment of its own shape under a name that torch uses too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("exp_avg", torch.zeros(2))
            average.add_(parameter.grad.norm())
            parameter.sub_(0.001 * average[0] * parameter.grad)


ODD: dict[str, Callable[[Any], Any]] = {
    "low rank": LowRank,
    "adafactor": optim.Adafactor,
    "muon": lambda p: optim.Muon([each for each in p if each.ndim == 2]),
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "adadelta": optim.Adadelta,
    "derived": lambda p: type("Mine", (optim.AdamW,), {})(p, amsgrad=True),
}


@pytest.mark.parametrize("name", ODD)
def test_state_of_every_shape_loads(tmp_path: Path, name: str) -> None:
    expected = saved_run(tmp_path, make=ODD[name])
    model = Net()
    check_loaded(build(tmp_path, model, ODD[name](model.parameters())), model, expected)


def test_the_state_of_lbfgs_loads(tmp_path: Path) -> None:
    def steps(stabilizer: sf.TrainingStabilizer, model: nn.Module) -> None:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

        def closure() -> Tensor:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            stabilizer.step(closure)

    model = Net()
    first = build(tmp_path, model, optim.LBFGS(model.parameters()))
    steps(first, model)
    first.save()
    again = Net()
    stabilizer = build(tmp_path, again, optim.LBFGS(again.parameters()))
    assert stabilizer.restore() == 3
    steps(stabilizer, again)


# ---- checkpoints without names ------------------------------------------------------------------------------------


def without_names(tree: Any) -> None:
    tree.pop("described", None)


def test_a_checkpoint_without_names_loads_where_shapes_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = saved_run(tmp_path)
    forge(tmp_path, without_names)
    model = Net()
    check_loaded(build(tmp_path, model, optim.AdamW(model.parameters())), model, expected)
    assert "did not save the names of parameters" in caplog.text


def test_a_checkpoint_without_names_is_refused_where_they_do_not(tmp_path: Path) -> None:
    saved_run(tmp_path)
    forge(tmp_path, without_names)
    model = Net("up")
    check_refused(build(tmp_path, model, optim.AdamW(model.parameters())), "'exp_avg' of parameter 0")
