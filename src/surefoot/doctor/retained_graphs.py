"""Step 9: does anything keep the graph of past steps alive? Counts live tensors with a graph.

Only what model and loss keep can be seen from here; a list of losses in the user's own loop cannot. The second step of
a model that carries its state without detaching it raises, which step 3 reports.
"""

from __future__ import annotations

import gc

from torch import Tensor

from surefoot.doctor.batches import row_count
from surefoot.doctor.checks import Check, from_catalogue, passed, skipped
from surefoot.doctor.context import TINY_ROWS, CheckContext

STEP = 9
_NAME = "kept graphs"
_SETTLING, _STEPS = 2, 3


def check_graphs(context: CheckContext) -> list[Check]:
    """Take a few steps and count after each what is still held."""
    if context.optimizer is None:
        return [skipped(STEP, _NAME, "no optimizer was given")]
    trial = context.trial()
    rows = TINY_ROWS if row_count(context.batches[0]) is not None else None
    before = 0
    for index in range(_SETTLING + _STEPS):
        if index == _SETTLING:
            before = _tensors_with_graph()
        trial.step(context.batch(index, rows=rows))
    per_step = (_tensors_with_graph() - before) / _STEPS
    summary = f"{per_step:.3g} more live tensors with a graph per step"
    if per_step >= 1.0:
        return [from_catalogue(STEP, _NAME, "fail", "memory.graph-retained", summary, per_step, "0 more per step")]
    return [passed(STEP, _NAME, summary, per_step, "0 more per step")]


def _tensors_with_graph() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing.grad_fn is not None)
