"""A save that fails is never silent, never replaces a good checkpoint, and one that is due is not lost."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import surefoot as sf
from patience import HANG_SECONDS
from runlogs import KeptEvents
from surefoot.guard.data_loop import write_copies
from surefoot.record.reading import load_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def build(folder: Path, model: nn.Module, every_steps: int | None = None, **settings: Any) -> sf.TrainingStabilizer:
    optimizer = torch.optim.AdamW(model.parameters())
    manager = sf.CheckpointManager(folder, every_steps=every_steps)
    return sf.TrainingStabilizer(model, optimizer, checkpoints=manager, **settings)


def step(stabilizer: sf.TrainingStabilizer, model: nn.Module) -> None:
    stabilizer.backward(model(torch.ones(2, 4)).square().mean())
    stabilizer.step()


def blocked(folder: Path) -> Path:
    """A file where the checkpoints should go."""
    place = folder / "checkpoints"
    place.write_text("mine")
    return place


# ---- saves that fail ----------------------------------------------------------------------------------------------


def test_a_save_that_cannot_be_written_raises(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    stabilizer = build(tmp_path, model)
    step(stabilizer, model)
    place = blocked(tmp_path)
    with pytest.raises(sf.CheckpointError, match=r"step 1 could not be written.*There is no good checkpoint") as raised:
        stabilizer.save()
    assert isinstance(raised.value.__cause__, OSError)
    place.unlink()
    stabilizer.save()


def test_saves_that_fail_repeatedly_are_reported_again_in_log_run_log_and_sinks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "surefoot")
    model, sink = nn.Linear(4, 1), KeptEvents()
    log = sf.RunLog(tmp_path / "log", sinks=[sink], device_seconds=None)
    stabilizer = build(tmp_path, model, every_steps=1, log=log)
    manager = stabilizer._run.persistence.checkpoints
    assert manager is not None
    step(stabilizer, model)
    manager.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    place = blocked(tmp_path)
    for number in range(30):
        if number == 20:
            place.unlink()
        step(stabilizer, model)
        manager.wait()
    log.close()
    told = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
    assert "There is no good checkpoint" in told[0]
    assert "4 consecutive saves have failed" in told[1]
    assert "16 consecutive saves have failed" in told[2]
    events = [event for event in load_run(tmp_path / "log").events if event.cause == "checkpoint.failed"]
    assert [event.severity for event in events][:3] == ["error"] * 3
    assert events[0].event == "alarm"
    assert events[1].evidence["failures"] == 4
    assert "can be written again" in events[-1].summary
    assert [event.summary for event in sink.events if event.cause == "checkpoint.failed"] == [
        event.summary for event in events
    ]


def test_two_thousand_failing_saves_make_a_few_lines_with_the_age_of_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = sf.CheckpointManager(tmp_path, every_steps=1)
    tree = {"w": torch.ones(2)}
    assert manager.save(tree, 1, blocking=True)
    assert "The newest good checkpoint is from step 1, 4 steps and 0 s ago." in manager.newest_good_age(5)
    (tmp_path / "checkpoints" / "step-00000001").rename(tmp_path / "kept")
    (tmp_path / "checkpoints").rmdir()
    blocked(tmp_path)
    for number in range(2, 2002):
        assert not manager.save(tree, number, blocking=True)
    told = [record.getMessage() for record in caplog.records]
    assert [line.split("; ")[1].split(" ")[0] for line in told[1:]] == ["4", "16", "64", "256", "1,024"]


def test_a_signal_still_ends_a_run_that_cannot_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 1)
    stabilizer = build(tmp_path, model)

    def train() -> None:
        for _ in stabilizer.resume([1, 2, 3]):
            blocked(tmp_path)
            step(stabilizer, model)
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 128 + signal.SIGUSR1
    assert "could not be written" in caplog.text


# ---- evidence and good checkpoints of one step ----------------------------------------------------------------------


def test_a_broken_state_does_not_replace_the_good_one_of_the_same_step(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    stabilizer = build(tmp_path, model)
    step(stabilizer, model)
    stabilizer.save(metric=0.5)
    good = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    stabilizer.save(metric=0.1)
    stabilizer.save(metric=0.1)
    manager = sf.CheckpointManager(tmp_path)
    assert [(found.step, found.good, found.best) for found in manager.checkpoints()] == [
        (1, False, False),
        (1, True, True),
    ]
    for which in ("latest", "good", "best", 1):
        found = manager.load(which)  # type: ignore[arg-type]
        assert found is not None
        assert torch.equal(found.tree["models"][0]["weight"], good)
    evidence = manager.load(manager.checkpoints()[0].path)
    assert evidence is not None
    assert evidence.tree["models"][0]["weight"].isnan().all()
    assert stabilizer.restore("good") == 1
    assert torch.equal(model.weight, good)


def test_evidence_beside_a_good_one_is_deleted_as_other_evidence_is(tmp_path: Path) -> None:
    manager = sf.CheckpointManager(tmp_path, keep_last=1)
    whole, broken = {"w": torch.ones(2)}, {"w": torch.full((2,), float("inf"))}
    for number in (1, 2, 3):
        assert manager.save(whole, number, blocking=True)
        assert manager.save(broken, number, blocking=True)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000003.evidence",
    ]
    assert manager.save(whole, 3, blocking=True)
    assert [found.good for found in manager.checkpoints()] == [True, False]


def test_ranks_put_what_was_not_quiet_beside_the_good_one_alike(tmp_path: Path) -> None:
    ranks = [sf.CheckpointManager(tmp_path, rank=rank, world_size=2) for rank in (0, 1)]
    for quiet in (True, False):
        for manager in ranks:
            assert manager.save({"w": torch.ones(2)}, 7, quiet=quiet, blocking=True)
    for manager in ranks:
        assert [(found.good, found.step) for found in manager.checkpoints()] == [(False, 7), (True, 7)]
        found = manager.load()
        assert found is not None
        assert found.facts["quiet"]


# ---- saves that are due -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decide_on", ["host", "device"])
def test_a_worker_that_is_killed_costs_neither_a_save_that_was_due_nor_a_complete_step(
    tmp_path: Path, decide_on: str
) -> None:
    model = nn.Linear(4, 1)
    stabilizer = build(tmp_path, model, every_steps=2, decide_on=decide_on, lag_steps=1)
    manager = stabilizer._run.persistence.checkpoints
    assert manager is not None
    finish = threading.Event()
    manager.events.on_saved = lambda *_: finish.wait(HANG_SECONDS) and None  # the first save is not over before this
    loader = DataLoader(list(torch.ones(40, 4)), batch_size=2, num_workers=1)  # type: ignore[arg-type]

    def train() -> None:
        for _ in stabilizer.resume(loader):
            step(stabilizer, model)
            if stabilizer.steps == 5:
                threading.Timer(0.5, finish.set).start()
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid or 0, signal.SIGKILL)

    with pytest.raises((RuntimeError, OSError, EOFError)) as caught:  # by what it was doing when it was killed
        train()
    assert isinstance(caught.value, EOFError) or re.search("worker|reset by peer", str(caught.value))
    manager.wait()
    found = manager.load()
    assert found is not None
    assert found.step == 5


def test_a_worker_that_dies_during_a_save_is_no_trouble_with_the_disk(tmp_path: Path) -> None:
    class Dies:
        """Its state is read while a save is made, and a worker is gone by then."""

        def __init__(self) -> None:
            self.workers: Sequence[Any] = ()

        def state_dict(self) -> dict[str, Any]:
            workers, self.workers = self.workers, ()
            for worker in workers:
                os.kill(worker.pid, signal.SIGKILL)
                worker.join(HANG_SECONDS)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    model, dies = nn.Linear(4, 1), Dies()
    stabilizer = build(tmp_path, model, every_steps=3, also_save={"dies": dies})
    loader = DataLoader(list(torch.ones(40, 4)), batch_size=2, num_workers=1)  # type: ignore[arg-type]

    def train() -> None:
        for _ in stabilizer.resume(loader):
            dies.workers = multiprocessing.active_children()
            step(stabilizer, model)

    with pytest.raises(RuntimeError, match="worker"):
        train()
    manager = stabilizer._run.persistence.checkpoints
    assert manager is not None
    manager.wait()
    found = manager.load()
    assert found is not None
    assert found.step == 3


# ---- saves that are due while another is written ------------------------------------------------------------------


class HeldWriter:
    """Lets the thread that writes checkpoints wait when it has written the first one."""

    def __init__(self, manager: sf.CheckpointManager) -> None:
        self.may_go_on = threading.Event()
        manager.events.on_saved = lambda step, path, facts: self._wait()

    def _wait(self) -> None:
        self.may_go_on.wait(HANG_SECONDS)


def due_at_five(folder: Path, **settings: Any) -> tuple[nn.Module, sf.TrainingStabilizer, sf.CheckpointManager]:
    model = nn.Linear(4, 1)
    manager = sf.CheckpointManager(folder, every_steps=5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return model, sf.TrainingStabilizer(model, optimizer, checkpoints=manager, **settings), manager


def test_a_save_that_is_due_while_another_is_written_is_written_without_a_further_step(tmp_path: Path) -> None:
    model, stabilizer, manager = due_at_five(tmp_path)
    held = HeldWriter(manager)
    for _ in range(12):
        step(stabilizer, model)
    held.may_go_on.set()
    manager.wait()
    assert [found.step for found in manager.checkpoints()] == [10, 5]


def test_of_saves_that_wait_for_the_writer_the_newest_is_written_and_memory_holds_one(tmp_path: Path) -> None:
    model, stabilizer, manager = due_at_five(tmp_path)
    held = HeldWriter(manager)
    for number in range(1, 28):
        step(stabilizer, model)
        assert manager.has_next == (number >= 10)
    held.may_go_on.set()
    manager.wait()
    assert [found.step for found in manager.checkpoints()] == [25, 5]
    step(stabilizer, model)
    assert not manager.busy  # the save of step 25 was the one that was due


def test_a_state_that_is_not_quiet_does_not_replace_a_good_one_that_waits(tmp_path: Path) -> None:
    model, stabilizer, manager = due_at_five(tmp_path)
    held = HeldWriter(manager)
    for _ in range(12):
        step(stabilizer, model)
    for _ in range(4):
        stabilizer.backward(model(torch.ones(2, 4)).square().mean() * float("nan"))
        stabilizer.step()
    held.may_go_on.set()
    manager.wait()
    assert [(found.step, found.good) for found in manager.checkpoints()] == [(10, True), (5, True)]


def test_a_save_whose_step_is_not_known_yet_is_written_before_a_restore_and_at_exit(tmp_path: Path) -> None:
    model, stabilizer, manager = due_at_five(tmp_path / "restored", decide_on="device")
    for _ in range(12):
        step(stabilizer, model)
    assert stabilizer.restore() == 10
    model, stabilizer, manager = due_at_five(tmp_path / "at exit", decide_on="device")
    for _ in range(12):
        step(stabilizer, model)
    write_copies()  # as at exit
    manager.wait()
    assert [found.step for found in manager.checkpoints()] == [10, 5]


def test_a_manager_waits_for_what_another_one_is_writing_into_its_folder(tmp_path: Path) -> None:
    model, stabilizer, manager = due_at_five(tmp_path)
    held = HeldWriter(manager)
    for _ in range(12):
        step(stabilizer, model)
    threading.Timer(0.2, held.may_go_on.set).start()
    loaded = sf.CheckpointManager(tmp_path).load()
    assert loaded is not None
    assert loaded.step == 10
