"""Bitwise resume of loops as people write them, and of runs to which something had happened before."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from resumed import PASS, Run, Stop, check_resume, differences, interrupted, net, seed_all

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# ---- loops --------------------------------------------------------------------------------------------------------


class Evaluated(Run):
    """Work of its own after every pass, with random numbers in it."""

    always = False

    def numbers(self) -> Iterable[int]:
        raise NotImplementedError

    def train(self, stop: int | None = None) -> None:
        for _ in self.numbers():
            drawn = 0
            for batch in self.stabilizer.resume(self.loader):
                self.step(batch)
                drawn += 1
                self.seen += 1
                if self.seen == stop:
                    self.stabilizer.save()
                    raise Stop
            if drawn or self.always:
                self.model(torch.randn(4, 6))  # dropout draws, and batch norm takes it in


class OverRange(Evaluated):
    def numbers(self) -> Iterable[int]:
        return range(self.epochs)


class OverEpochs(Evaluated):
    always = True  # what was evaluated is not entered again; a pass of which nothing is left may have to be

    def numbers(self) -> Iterable[int]:
        return self.stabilizer.epochs(self.epochs)


@pytest.mark.parametrize("stops", [(3,), (PASS + 2,), (2 * PASS + 1,), (2, PASS, 4)])
@pytest.mark.parametrize("kind", [OverRange, OverEpochs])
def test_loops_over_passes_go_on_bitwise(tmp_path: Path, kind: type[Run], stops: tuple[int, ...]) -> None:
    check_resume(tmp_path, stops, kind)


@pytest.mark.parametrize("stops", [(PASS,), (2 * PASS,), (PASS, PASS)])
def test_a_save_at_the_last_batch_of_a_pass_continues_after_it(tmp_path: Path, stops: tuple[int, ...]) -> None:
    check_resume(tmp_path, stops, OverEpochs)


class SavedBetween(Run):
    """Saves after every pass, as a program does that evaluates there."""

    def train(self, stop: int | None = None) -> None:
        for epoch in self.stabilizer.epochs(self.epochs):
            for batch in self.stabilizer.resume(self.loader):
                self.step(batch)
            self.seen += 1
            self.stabilizer.save(metric=-epoch)
            if self.seen == stop:
                raise Stop


@pytest.mark.parametrize("stops", [(1,), (2,), (1, 1), (3,)])
def test_a_save_between_passes_continues_with_the_next(tmp_path: Path, stops: tuple[int, ...]) -> None:
    check_resume(tmp_path, stops, SavedBetween)


class OnlySaved(Run):
    """Dies without a last save: what is on the disk is what the loop wrote by itself, some steps ago."""

    def train(self, stop: int | None = None) -> None:
        for batch in self.batches():
            self.step(batch)
            self.seen += 1
            if self.seen == stop:
                self.stabilizer._run.persistence.checkpoints.wait()
                raise Stop


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_run_that_dies_takes_its_last_steps_again(tmp_path: Path, decide_on: Any) -> None:
    settings = {"every_steps": 4, "decide_on": decide_on, "accumulate": 2, "epochs": 8}
    _, expected = interrupted(tmp_path / "undisturbed", (), OnlySaved, **settings)
    _, state = interrupted(tmp_path / "stopped", (21, 19, 18), OnlySaved, **settings)
    assert differences(state, expected) == []


class AveragedAfter(OnlySaved):
    """What the loop does with a batch after `step()` belongs to the checkpoint of that step."""

    def step(self, batch: Any) -> None:
        super().step(batch)
        self.also["average"].update_parameters(self.model)


def test_a_checkpoint_that_the_loop_wrote_itself_holds_what_came_after_the_step(tmp_path: Path) -> None:
    average = {"also": lambda run: {"average": torch.optim.swa_utils.AveragedModel(run.model)}, "every_steps": 4}
    _, expected = interrupted(tmp_path / "undisturbed", (), AveragedAfter, **average)
    _, state = interrupted(tmp_path / "stopped", (5, 6), AveragedAfter, **average)
    assert differences(state, expected) == []


def test_a_save_that_is_due_is_made_though_the_loop_is_left_or_takes_many_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=4)
    for batch in run.batches():
        run.step(batch)
        if run.stabilizer.steps == 4:
            break
    run.stabilizer._run.persistence.checkpoints.wait()
    assert [found.step for found in sf.CheckpointManager(tmp_path).checkpoints()] == [4]
    for batch in run.batches():
        for _ in range(6):  # due after the fourth of them, the first after which it is clear that no batch is drawn
            run.step(batch)
        break
    run.stabilizer._run.persistence.checkpoints.wait()
    assert sf.CheckpointManager(tmp_path).checkpoints()[0].step == 8


def test_batches_that_another_thread_draws_ahead_do_not_disturb_a_save(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=3)
    ahead: queue.Queue[Any] = queue.Queue(2)

    def draw() -> None:
        for batch in run.batches():
            ahead.put(batch)
        ahead.put(None)

    thread = threading.Thread(target=draw)
    thread.start()
    weights = []
    while (batch := ahead.get()) is not None:
        run.step(batch)
        weights.append(run.model.get_parameter("0.weight").detach().clone())
    thread.join()
    run.stabilizer._run.persistence.checkpoints.wait()
    manager = sf.CheckpointManager(tmp_path)
    assert manager.checkpoints()
    for found in manager.checkpoints():
        assert torch.equal(manager.load(found.step).tree["models"][0]["0.weight"], weights[found.step - 1])


def test_a_long_run_continues_with_every_number_it_has_noted(tmp_path: Path) -> None:
    check_resume(tmp_path, (103, 30), epochs=30, model=lambda: nn.Linear(6, 1))


def test_the_yardstick_for_gradients_is_the_same_after_a_restart(tmp_path: Path) -> None:
    """The norm of the weights is measured now and then; a restart is no reason to measure it again."""
    seed_all(0)
    run = Run(tmp_path, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    run.train()
    run.stabilizer.save()
    again = Run(tmp_path, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    again.train()
    again.step(next(iter(again.loader)))
    assert again.stabilizer.state_dict()["param_norm"] == run.stabilizer.state_dict()["param_norm"]


class WithClosure(Run):
    def step(self, batch: Any) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            self.stabilizer.backward(loss)
            return loss

        self.stabilizer.step(closure)
        self.losses.append(float(self.loss(batch).detach()))


def test_lbfgs_continues_with_its_history(tmp_path: Path) -> None:
    make = {"optimizer": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4)}
    check_resume(tmp_path, (5, 3), WithClosure, **make)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_continues(tmp_path: Path) -> None:
    model = {"model": lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False))}
    check_resume(tmp_path, optimizer=lambda p: torch.optim.Muon(p, lr=1e-2), **model)


# ---- two that train each other ------------------------------------------------------------------------------------


class Adversaries(Run):
    """A generator beside the model, with a stabilizer of its own that is saved through the other."""

    def __init__(self, folder: Path, **parts: Any) -> None:
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 6))
        optimizer = torch.optim.AdamW(self.generator.parameters(), lr=1e-2)
        schedule = sf.warmup_linear(optimizer, 5, 50)
        self.maker = sf.TrainingStabilizer(self.generator, optimizer, scheduler=schedule, clip=sf.ClipByZScore())
        super().__init__(folder, also=lambda run: {"maker": self.maker}, **parts)

    def step(self, batch: Any) -> None:
        fake = self.generator(torch.randn(4, 3))
        real = F.softplus(-self.model(batch[0])).mean()
        loss = real + F.softplus(self.model(fake.detach())).mean()
        self.stabilizer.backward(loss)
        self.stabilizer.step()
        made = F.softplus(-self.model(fake)).mean()
        self.maker.backward(made)
        self.maker.step()
        self.losses += [float(loss.detach()), float(made.detach())]

    def state(self) -> dict[str, Any]:
        return super().state() | {"made": [self.generator.state_dict(), self.maker.optimizer.state_dict()]}


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_two_stabilizers_go_on_together(tmp_path: Path, decide_on: Any) -> None:
    check_resume(tmp_path, (5, 7), Adversaries, decide_on=decide_on)


def test_two_stabilizers_are_saved_between_batches(tmp_path: Path) -> None:
    class Dying(Adversaries, OnlySaved):
        train = OnlySaved.train

    _, expected = interrupted(tmp_path / "undisturbed", (), Dying, every_steps=3)
    _, state = interrupted(tmp_path / "stopped", (4, 5), Dying, every_steps=3)
    assert differences(state, expected) == []


# ---- runs to which something had happened -------------------------------------------------------------------------


class Troubled(Run):
    """Some batches are not what they should be."""

    bad: tuple[int, ...] = ()
    value = float("nan")

    def step(self, batch: Any) -> None:
        x, y = batch
        if self.stabilizer.steps in self.bad:
            x = x.clone()
            x[0] = self.value
        super().step((x, y))


def troubled(*bad: int, value: float = float("nan")) -> type[Run]:
    return type("TroubledHere", (Troubled,), {"bad": bad, "value": value})


@pytest.mark.parametrize("stop", [4, 5, 6, 9])
@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_run_with_refused_steps_continues_bitwise(tmp_path: Path, decide_on: Any, stop: int) -> None:
    """The refused steps lie before, at and after the save; batch norm had taken the broken batches in."""
    settings = {"decide_on": "host"} if decide_on == "host" else {"decide_on": "device", "lag_steps": 0}
    state = check_resume(tmp_path, (stop,), troubled(2, 5, 6), **settings)
    assert state["stabilizer"]["results"]["history"]["counts"]["skipped"] == 3


def test_a_broken_step_right_after_a_restart_leaves_batch_norm_as_it_was(tmp_path: Path) -> None:
    state = check_resume(tmp_path, (5,), troubled(5))
    assert state["model"]["1.running_mean"].isfinite().all()


def test_a_window_that_turns_out_broken_after_a_restart_is_undone_from_its_beginning(tmp_path: Path) -> None:
    class SecondOfThree(Run):
        def step(self, batch: Any) -> None:
            if self.stabilizer.steps == 2 and self.losses[-1:] == self.losses[-1:] and self.due():
                batch = (batch[0] * float("nan"), batch[1])
            super().step(batch)

        def due(self) -> bool:
            return self.stabilizer._run.window.sums.count == 1

    state = check_resume(tmp_path, (7,), SecondOfThree, accumulate=3)
    assert state["stabilizer"]["results"]["history"]["counts"]["skipped"] == 1


@pytest.mark.parametrize("bad", [(3,), (2, 3), (7,), (3, 9, 10)])
def test_a_step_whose_verdict_was_still_out_is_undone_after_a_restart_too(tmp_path: Path, bad: tuple[int, ...]) -> None:
    """Decided on the device, saved before the host knows: batch norm has taken the batch in by then."""

    class BadTargets(OnlySaved):
        def step(self, batch: Any) -> None:
            x, y = batch
            super().step((x, y * float("nan") if self.stabilizer.steps in bad else y))

    settings = {"decide_on": "device", "lag_steps": 4, "every_steps": 4, "epochs": 8}
    _, expected = interrupted(tmp_path / "undisturbed", (), BadTargets, **settings)
    _, state = interrupted(tmp_path / "stopped", (10, 9, 12), BadTargets, **settings)
    assert differences(state, expected) == []
    assert state["stabilizer"]["results"]["history"]["counts"]["skipped"] == len(bad)


RECOVERY = {"recovery": lambda: sf.TrainingRecovery(every_steps=2, patience_steps=2, margin_steps=1)}


@pytest.mark.parametrize("stop", [12, 14])
def test_a_run_that_had_gone_back_to_earlier_weights_continues_bitwise(tmp_path: Path, stop: int) -> None:
    class Corrupted(Run):
        def step(self, batch: Any) -> None:
            if self.stabilizer.steps == 8 and not self.losses[8:9] and self.seen == 8:
                with torch.no_grad():
                    self.model[4].weight.fill_(float("nan"))
            super().step(batch)

    state = check_resume(tmp_path, (stop,), Corrupted, **RECOVERY)
    assert state["stabilizer"]["results"]["lr_factor"] < 1


# ---- what is not a dataclass --------------------------------------------------------------------------------------


class Counting:
    """A detector of somebody else's, without a `repr`: it must not start anew with each process."""

    def init(self) -> tuple[float]:
        return (0.0,)

    def update(self, state: tuple[float], signals: sf.Signals) -> tuple[tuple[float], sf.Verdict]:
        return (state[0] + 1,), sf.Verdict("counting", False)


def test_a_detector_that_does_not_print_itself_keeps_its_state(tmp_path: Path) -> None:
    seed_all(0)
    run = Run(tmp_path, checker=lambda: sf.StabilityChecker(spike=Counting()))
    run.train()
    run.stabilizer.save()
    again = Run(tmp_path, checker=lambda: sf.StabilityChecker(spike=Counting()))
    again.stabilizer.restore()
    assert differences(again.stabilizer.state_dict(), run.stabilizer.state_dict()) == []


def test_the_average_of_a_model_with_masks_is_good_too(tmp_path: Path) -> None:
    class Lowest(nn.Module):
        """The lowest value so far starts at infinity, and stays there until somebody looks."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("lowest", torch.tensor(float("inf")))
            self.register_buffer("bias", torch.tensor([0.0, -1.0, float("-inf")]))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    average = {"also": lambda run: {"average": torch.optim.swa_utils.AveragedModel(run.model)}}
    run = Run(tmp_path, model=Lowest, **average)
    run.train()
    run.stabilizer.save()
    assert [found.good for found in sf.CheckpointManager(tmp_path).checkpoints()] == [True]
    with torch.no_grad():
        run.model.get_buffer("inner.1.running_var").fill_(float("inf"))
    run.stabilizer.save()  # of the same step: kept beside the good one
    assert [found.good for found in sf.CheckpointManager(tmp_path).checkpoints()] == [False, True]


# ---- the last window of microbatches ------------------------------------------------------------------------------


def accumulated(folder: Path | None, **settings: Any) -> tuple[nn.Module, sf.TrainingStabilizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    checkpoints = None if folder is None else sf.CheckpointManager(folder, every_steps=None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, sf.TrainingStabilizer(model, optimizer, accumulate=4, checkpoints=checkpoints, **settings)


MICROBATCHES = [torch.full((2, 3), float(number)) for number in range(1, 7)]


def train_on(stabilizer: sf.TrainingStabilizer, model: nn.Module, batch: Tensor) -> None:
    stabilizer.backward(model(batch).square().mean())
    stabilizer.step()


def test_the_end_of_the_data_steps_on_a_window_that_is_not_full() -> None:
    by_hand, flushed = accumulated(None)
    for batch in MICROBATCHES:
        train_on(flushed, by_hand, batch)
    flushed.flush()
    model, stabilizer = accumulated(None)
    for batch in stabilizer.resume(MICROBATCHES):
        train_on(stabilizer, model, batch)
    assert stabilizer.steps == 2
    assert stabilizer.flush() is None
    assert torch.equal(model.weight, by_hand.weight)


@pytest.mark.parametrize("stop", range(1, 13))
def test_a_run_that_stops_anywhere_steps_on_the_same_windows(tmp_path: Path, stop: int) -> None:
    def run(folder: Path, stop: int | None) -> nn.Module:
        model, stabilizer = accumulated(folder)
        seen = 0
        for _ in range(2):
            for batch in stabilizer.resume(MICROBATCHES):
                train_on(stabilizer, model, batch)
                seen += 1
                if seen == stop:
                    stabilizer.save()
                    return model
        assert stabilizer.steps == 4
        return model

    run(tmp_path / "stopped", stop)
    whole, resumed = run(tmp_path / "whole", None), run(tmp_path / "stopped", None)
    assert torch.equal(whole.weight, resumed.weight)


def test_passes_that_are_chained_share_a_window_and_a_loop_that_is_left_early_keeps_it() -> None:
    model, stabilizer = accumulated(None)
    for batch in stabilizer.resume(MICROBATCHES, epochs=2):
        train_on(stabilizer, model, batch)
    assert stabilizer.steps == 3
    for number, batch in enumerate(stabilizer.resume(MICROBATCHES)):
        train_on(stabilizer, model, batch)
        if number == 4:
            break
    assert stabilizer.steps == 4
    assert stabilizer.flush() is not None


def test_batches_that_were_drawn_ahead_are_not_cut_off_from_their_window() -> None:
    model, stabilizer = accumulated(None)
    batches = iter(stabilizer.resume(MICROBATCHES))
    ahead = next(batches, None)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        train_on(stabilizer, model, batch)
    assert stabilizer.steps == 1
    assert stabilizer.flush() is not None


class DiesInNextPass(Run):
    """Uses what the inner loop has left behind after every pass, and dies without a last save."""

    def __init__(self, folder: Path, **parts: Any) -> None:
        super().__init__(folder, **parts)
        self.entered: list[int] = []

    def train(self, stop: int | None = None) -> None:
        for epoch in self.stabilizer.epochs(self.epochs):
            self.entered.append(epoch)
            last = None
            for batch in self.stabilizer.resume(self.loader):
                self.step(batch)
                last = batch
                self.seen += 1
                if self.seen == stop:
                    self.stabilizer._run.persistence.checkpoints.wait()
                    raise Stop
            assert last is not None, f"epoch {epoch} was entered although it has no batch left"
            self.model(torch.randn(4, 6))


@pytest.mark.parametrize("every_passes", [1, 2])
def test_a_checkpoint_at_the_end_of_a_pass_does_not_bring_the_pass_back(tmp_path: Path, every_passes: int) -> None:
    settings = {"every_steps": PASS * every_passes, "epochs": 5}
    _, expected = interrupted(tmp_path / "undisturbed", (), DiesInNextPass, **settings)
    _, state = interrupted(tmp_path / "stopped", (2 * PASS + 3,), DiesInNextPass, **settings)
    assert differences(state, expected) == []


def test_a_save_with_a_metric_after_a_pass_is_not_replaced_by_one_without(tmp_path: Path) -> None:
    run = SavedBetween(tmp_path, every_steps=PASS, epochs=2)
    run.train()
    run.stabilizer._run.persistence.checkpoints.wait()
    found = {each.step: each.metric for each in sf.CheckpointManager(tmp_path).checkpoints()}
    assert found == {PASS: 0.0, 2 * PASS: -1.0}


def test_a_checkpoint_that_is_loaded_between_passes_is_not_saved_under_a_later_step(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=PASS, epochs=3)
    checkpoints = run.stabilizer._run.persistence.checkpoints
    for epoch in run.stabilizer.epochs(3):
        if epoch == 2:
            break
        for batch in run.stabilizer.resume(run.loader):
            run.step(batch)
        checkpoints.wait()
        if epoch == 1:
            run.stabilizer.restore(PASS)
    checkpoints.wait()
    weights = [sf.CheckpointManager(tmp_path).load(step).tree["models"][0]["0.weight"] for step in (PASS, 2 * PASS)]
    assert not torch.equal(*weights)
