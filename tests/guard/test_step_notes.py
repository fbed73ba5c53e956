"""Notes of steps: an error ends them, a failing disk does not, and a loop of the script's own is followed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.guard.step_notes import LONGEST_PAUSE, DiskPauses, MicrobatchFollower, StepNotes, while_noting

CPU = torch.device("cpu")


def notes(errors: list[Exception] | None = None, **settings: Any) -> StepNotes:
    return StepNotes([nn.Linear(2, 1)], CPU, on_failure=([] if errors is None else errors).append, **settings)


def fail(error: Exception) -> None:
    raise error


def test_a_failing_disk_is_tried_again_after_pauses_that_double_and_is_reported_once():
    said: list[str] = []
    pauses = DiskPauses(said.append)
    tried = []
    for step in range(4 * LONGEST_PAUSE):
        if pauses.may_try(step):
            tried.append(step)
            pauses.failed(OSError("full"))
    assert tried[:6] == [0, 1, 3, 7, 15, 31]
    assert tried[-1] - tried[-2] == LONGEST_PAUSE
    assert len(said) == 1
    assert "step 0 cannot be written (OSError: full)" in said[0]
    pauses.end()
    assert pauses.may_try(tried[-1] + 1)
    pauses.written()
    assert pauses.failures == 0


def test_an_error_ends_the_notes_and_one_of_the_disk_does_not():
    errors: list[Exception] = []
    kept = notes(errors, pauses=DiskPauses(lambda message: None))
    kept.safely(fail, OSError("full"))
    assert (kept.pauses.failures, errors) == (1, [])
    assert kept.safely(int, "3") == 3
    kept.safely(fail, error := ValueError("wrong"))
    assert errors == [error]
    assert kept.capture is None
    assert kept.safely(int, "3") is None
    kept.drew(torch.ones(2))
    kept.begin(1)
    assert kept.window(0) is None


def test_methods_of_what_has_notes_end_them_by_their_errors():
    class Follower:
        def __init__(self, notes: StepNotes) -> None:
            self.notes = notes

        @while_noting
        def divide(self, by: int) -> float:
            return 1 / by

    errors: list[Exception] = []
    follower = Follower(notes(errors))
    assert follower.divide(2) == 0.5
    assert follower.divide(0) is None
    assert follower.divide(2) is None
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_each_backward_ends_a_microbatch_unless_a_closure_is_evaluated_again():
    kept = notes()
    follower = MicrobatchFollower(kept)
    for loss, again in ((1.0, False), (None, False), (2.0, False), (3.0, True)):
        follower.ran_backward(None if loss is None else torch.tensor(loss), again)
    assert kept.capture is not None
    found = [[float(loss) for loss in each.losses] for each in kept.capture.current.microbatches]
    assert found == [[1.0], [], [3.0]]
    assert kept.capture.current.microbatches[-1].evaluations == 2
    kept.restart(7)
    assert (kept.capture.current.step, kept.capture.current.microbatches) == (7, [])
    kept.close()


def test_notes_without_references_take_their_hooks_along():
    model = nn.Linear(2, 1)
    kept = StepNotes([model], CPU, on_failure=pytest.fail)
    assert model._forward_pre_hooks
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None
    assert not model._forward_pre_hooks
