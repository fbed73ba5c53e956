"""When to save, what is kept, what is loaded: against a simple model of all three."""

import copy
import logging
import math
import os
import pickle
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patience
import surefoot as sf
from surefoot import CheckpointError, CheckpointManager, SettingError, UsageError
from surefoot.keep.checkpoint.manager import Due
from surefoot.keep.checkpoint.manifest import TENSORS
from surefoot.keep.staging import Staged, stage

NAN = float("nan")


def state(value=1.0):
    return {"model": {"weight": torch.full((4, 3), float(value))}, "step": value}


def saved(manager, step, **options):
    value = options.pop("value", step)
    assert manager.save(state(value), step, blocking=True, **options)


def steps(manager):
    return [each.step for each in manager.checkpoints()]


class Slow(Staged):
    """A copy that arrives when it is told to."""

    gate = None

    def wait(self):
        assert self.gate.wait(patience.HANG_SECONDS)


def slow(tree):
    staged = Slow(stage(tree).tree)
    object.__setattr__(staged, "gate", threading.Event())
    return staged


# ---- saving and loading ---------------------------------------------------------------------------------------------


def test_it_is_used_alone_in_three_lines(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(tmp_path) as manager:
        assert manager.load() is None
        manager.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=5)
    loaded = CheckpointManager(tmp_path).load()
    assert loaded.step == 5
    assert loaded.path == tmp_path / "checkpoints" / "step-00000005"
    torch.nn.Linear(2, 2).load_state_dict(loaded.tree["model"])
    optimizer.load_state_dict(loaded.tree["optimizer"])


def test_what_training_does_after_a_save_is_not_in_it(tmp_path):
    tree = {"w": torch.ones(1_000), "list": [1], "array": torch.ones(3).numpy()}
    tree["tied"] = tree["w"]
    manager = CheckpointManager(tmp_path)
    manager.save(tree, 1)
    tree["w"].zero_()
    tree["list"].append(2)
    tree["array"][:] = 0
    found = manager.load().tree
    assert found["w"].sum() == 1_000
    assert found["tied"] is found["w"]
    assert found["list"] == [1]
    assert found["array"].sum() == 3


def test_a_checkpoint_that_is_loaded_does_not_hang_on_its_file(tmp_path):
    manager = CheckpointManager(tmp_path)
    saved(manager, 1)
    tree = manager.load().tree
    file = tmp_path / "checkpoints" / "step-00000001" / TENSORS
    file.write_bytes(b"")
    assert tree["model"]["weight"].sum() == 12


def test_latest_good_best_a_step_and_a_path_are_distinguished(tmp_path):
    manager = CheckpointManager(tmp_path, keep_evidence=2)
    saved(manager, 1, metric=0.1)
    saved(manager, 2, metric=0.5)
    saved(manager, 3, metric=0.01, quiet=False, reasons=("spike",))
    saved(manager, 4, metric=0.001, value=NAN)
    assert manager.load().step == 3
    assert manager.load("good").step == 2
    assert manager.load("best").step == 1
    assert manager.load(4).facts["broken"] == ["model.weight"]
    assert manager.load(tmp_path / "checkpoints" / "step-00000003").facts["reasons"] == ["spike"]
    assert [(each.step, each.good, each.finite, each.quiet, each.best) for each in manager.checkpoints()] == [
        (4, False, False, True, False),
        (3, False, True, False, False),
        (2, True, True, True, False),
        (1, True, True, True, True),
    ]
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 .* there are \[1, 2, 3, 4\]"):
        manager.load(9)
    with pytest.raises(UsageError, match="'newest'"):
        manager.load("newest")


def test_where_nothing_is_finite_nothing_is_loaded_and_that_is_said(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    saved(manager, 1, value=NAN)
    assert manager.load() is None
    assert "none of the 1 checkpoints" in caplog.text


def test_after_going_back_the_newest_is_the_one_saved_last(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        saved(manager, step)
    assert manager.load(20).step == 20
    saved(manager, 21)
    assert manager.load().step == 21
    saved(manager, 22)
    assert steps(manager) == [22, 21]


# ---- when -----------------------------------------------------------------------------------------------------------


def test_a_save_is_due_at_every_multiple_and_stays_due_until_one_is_good(tmp_path):
    manager = CheckpointManager(tmp_path, every_steps=10)
    assert [step for step in range(10) if manager.due(step)] == []
    assert manager.due(10)
    saved(manager, 10, quiet=False)
    assert manager.due(11)
    saved(manager, 11, value=NAN)
    assert manager.due(12)
    saved(manager, 12)
    assert [step for step in range(12, 20) if manager.due(step)] == []
    assert manager.due(20)


def test_what_is_due_follows_training_when_it_goes_back(tmp_path):
    manager = CheckpointManager(tmp_path, every_steps=10)
    saved(manager, 10)
    saved(manager, 20)
    assert not manager.due(21)
    assert manager.load(10).step == 10
    assert [step for step in range(10, 25) if manager.due(step)] == [20, 21, 22, 23, 24]
    saved(manager, 24)
    assert not manager.due(24)
    assert not manager.due(13)  # gone back in memory
    assert manager.due(20)


def test_a_resumed_run_does_not_save_at_once_again(tmp_path):
    saved(CheckpointManager(tmp_path, every_steps=10), 57)
    manager = CheckpointManager(tmp_path, every_steps=10)
    manager.load()
    assert [step for step in range(57, 62) if manager.due(step)] == [60, 61]


def test_minutes_count_too(tmp_path, monkeypatch):
    clock = patience.Clock()
    monkeypatch.setattr("surefoot.keep.checkpoint.manager.time", clock)
    manager = CheckpointManager(tmp_path, every_steps=None, every_minutes=2)
    clock.now += 119
    assert not manager.due(1)
    clock.now += 1
    assert manager.due(1)
    saved(manager, 1)
    assert not manager.due(2)


def test_a_save_while_another_is_written_is_postponed_and_a_blocking_one_waits(tmp_path):
    manager = CheckpointManager(tmp_path, every_steps=10)
    first = slow(state(10))
    assert manager.save(None, 10, staged=first)
    assert not manager.due(11)
    assert not manager.save(state(20), 20)
    assert manager.due(20)
    assert manager.postponed == 1
    threading.Timer(0.2, first.gate.set).start()
    saved(manager, 21)
    assert steps(manager) == [21, 10]
    assert not manager.due(22)


# ---- what is kept ---------------------------------------------------------------------------------------------------

histories = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.sampled_from([None, NAN, 1.0, 2.0, 3.0])), min_size=1, max_size=12
)


def kept_by_the_model(history, keep_last, keep_evidence):
    """The same rules once more, over plain tuples (step, finite, quiet, metric)."""
    kept = []
    for entry in history:
        entries = [*kept, entry]
        good = [each for each in entries if each[1] and each[2]]
        rated = [each for each in good if each[3] is not None and math.isfinite(each[3])]
        best = min(rated, key=lambda each: (each[3], -each[0]), default=None)
        evidence = [each for each in entries if each not in good]
        stays = good[-keep_last:] + ([best] if best else []) + (evidence[-keep_evidence:] if keep_evidence else [])
        finite = [each for each in entries if each[1]]
        if finite and not any(each[1] for each in stays):
            stays.append(finite[-1])
        kept = [each for each in entries if each in stays]
    return kept, best


@given(histories, st.integers(1, 3), st.integers(0, 2))
def test_the_last_good_ones_the_best_and_some_evidence_stay(tmp_path_factory, history, keep_last, keep_evidence):
    folder = tmp_path_factory.mktemp("run")
    manager = CheckpointManager(folder, keep_last=keep_last, keep_evidence=keep_evidence)
    told = [(step, *entry) for step, entry in enumerate(history)]
    for step, finite, quiet, metric in told:
        saved(manager, step, value=1.0 if finite else NAN, quiet=quiet, metric=metric)
    kept, best = kept_by_the_model(told, keep_last, keep_evidence)
    found = manager.checkpoints()
    assert [each.step for each in found] == [each[0] for each in reversed(kept)]
    assert [each.step for each in found if each.best] == ([best[0]] if best else [])
    good = [each[0] for each in kept if each[1] and each[2]]
    assert [each.step for each in found if each.good] == good[::-1]
    loaded = manager.load("good")
    assert (loaded.step if loaded else None) == (good[-1] if good else None)
    shutil.rmtree(folder)


# ---- settings and copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"every_steps": 0},
        {"every_steps": 1.5},
        {"every_minutes": 0},
        {"keep_last": 0},
        {"keep_evidence": -1},
        {"rank": 2, "world_size": 2},
        {"rank": 1},
        {"world_size": 2},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(tmp_path, settings):
    with pytest.raises(SettingError):
        CheckpointManager(tmp_path, **settings)


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_a_step_that_is_none_is_refused(tmp_path, step):
    with pytest.raises(UsageError, match="step"):
        CheckpointManager(tmp_path).save({}, step)


def test_a_copy_has_the_settings_and_a_life_of_its_own(tmp_path):
    manager = CheckpointManager(tmp_path, every_steps=7, keep_last=2, signals=(signal.SIGTERM,))
    staged = slow(state())
    manager.save(None, 7, staged=staged)
    for twin in (copy.deepcopy(manager), pickle.loads(pickle.dumps(manager))):
        assert (twin.every_steps, twin.keep_last, twin.signals) == (7, 2, (signal.SIGTERM,))
        saved(twin, 8)
    staged.gate.set()
    manager.wait()
    assert sorted(steps(manager)) == [7, 8]
    assert repr(manager).startswith("CheckpointManager(")


def test_two_managers_that_overwrite_each_other_are_reported_once(tmp_path, caplog):
    generator, discriminator = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    for step in (1, 2):
        saved(generator, step)
        saved(discriminator, step)
    assert caplog.text.count("Give each its own folder") == 1
    caplog.clear()
    saved(CheckpointManager(tmp_path / "alone"), 1)
    saved(CheckpointManager(tmp_path / "alone"), 1)  # the first is gone: a run that was started again
    assert caplog.text == ""


def test_the_names_are_exported():
    assert sf.CheckpointManager is CheckpointManager
    assert issubclass(sf.CheckpointError, (sf.SurefootError, RuntimeError))


def test_nothing_is_written_before_the_first_save(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    assert manager.load() is None
    assert manager.checkpoints() == []
    assert not (tmp_path / "run").exists()
    assert os.listdir(tmp_path) == []
    assert isinstance(manager.folder, Path)
    assert logging.getLogger("surefoot").level == 0


# ---- when a checkpoint is due ---------------------------------------------------------------------------------------


def due_steps(due: Due, steps: range, together: bool = False, good: bool = True) -> list[int]:
    """The steps at which a save is due, if each is written at once."""
    found = []
    for step in steps:
        if due.at(step, together):
            found.append(step)
            due.end(step, due.begin(step), good)
    return found


def test_one_process_saves_at_every_multiple():
    assert due_steps(Due(10, None), range(35)) == [10, 20, 30]


def test_a_step_that_was_passed_over_is_saved_at_the_next_one():
    assert due_steps(Due(10, None), range(7, 50, 7)) == [14, 21, 35, 42]


def test_a_save_that_was_not_good_stays_due():
    assert due_steps(Due(10, None), range(13), good=False) == [10, 11, 12]


def test_while_a_save_is_written_none_is_due_before_the_next_multiple():
    due = Due(10, None)
    due.begin(10)
    assert [step for step in range(10, 25) if due.at(step, together=False)] == [20, 21, 22, 23, 24]


def test_several_processes_save_the_multiples_only_and_each_once_whatever_became_of_it():
    assert due_steps(Due(10, None), range(35), together=True, good=False) == [10, 20, 30]
    assert due_steps(Due(10, None), range(7, 50, 7), together=True) == []


def test_after_a_return_to_an_earlier_step_its_multiples_are_due_again():
    due = Due(10, None)
    assert due_steps(due, range(25)) == [10, 20]
    assert due_steps(due, range(12, 35)) == [20, 30]


def test_a_save_that_ends_after_a_return_does_not_count():
    due = Due(10, None)
    assert due.at(20, together=False)
    line = due.begin(20)
    assert due_steps(due, range(12, 14)) == [12], "training has returned to a step that was never saved"
    due.end(20, line, good=True)
    assert due_steps(due, range(14, 25)) == [20]


def test_after_loading_a_step_the_next_multiple_is_due():
    due = Due(10, None)
    due.restart(20)
    assert due_steps(due, range(20, 35)) == [30]
    assert due_steps(due, range(35, 36), together=True) == []


def test_minutes_count_from_the_last_good_save(monkeypatch):
    clock = patience.Clock()
    monkeypatch.setattr("surefoot.keep.checkpoint.manager.time", clock)
    due = Due(None, 2.0)
    clock.now += 119
    assert not due.at(6, together=False)
    clock.now += 1
    assert due.at(7, together=False)
    due.end(7, due.begin(7), good=False)
    assert due.at(8, together=False), "it failed"
    due.end(8, due.begin(8), good=True)
    assert not due.at(9, together=False)
