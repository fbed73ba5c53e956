"""Step 9: are graphs of earlier steps retained? The rules judge how many graphs exist after each step.

Only what model and loss retain is visible here; a list of losses in the user's own loop is not. The second step of a
model that keeps its state without detaching it raises, which step 3 reports.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.doctor.batches import row_count
from surefoot.doctor.checks import Check, passed, skipped
from surefoot.doctor.context import TINY_ROWS, CheckContext
from surefoot.watch.retained_graphs import RetainedGraphCounter

if TYPE_CHECKING:
    from torch import Tensor

STEP = 9
_NAME = "kept graphs"
_STEPS = 16
_COUNTS = 4
"""The graphs of the last eight steps are not counted: a script may keep them for a while."""


def check_graphs(context: CheckContext) -> list[Check]:
    """Take a few steps and count the remaining graphs after each."""
    if context.optimizer is None:
        return [skipped(STEP, _NAME, "no optimizer was given")]
    trial, counter = context.trial(), RetainedGraphCounter()
    rows = TINY_ROWS if row_count(context.batches[0]) is not None else None

    def noted(loss: Tensor) -> None:
        if loss.grad_fn is not None:
            counter.add_token(loss)

    for step in range(_STEPS):
        trial.step(context.batch(step, rows=rows), noted)
        if step >= _STEPS - _COUNTS:
            if counter.retained and counter.retained[-1].alive:
                gc.collect()  # a cycle that the garbage collector frees is not retained
            counter.count(step)
    context.rehearsal = replace(context.facts, retained_graphs=counter.retained)
    held = counter.retained[-1].alive
    sound = passed(STEP, _NAME, f"{held} graphs of {_STEPS} steps are still in memory", held, "0")
    return [context.judged(("memory.graph-retained",), sound)]
