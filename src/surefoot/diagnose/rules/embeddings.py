"""Embeddings that are compared with one another, without targets: whether they still differ."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from surefoot.diagnose.data_summary import where_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.watch.operation_names import SIMILARITIES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LossCall

_TRIPLETS = {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
_ALIKE, _FALLEN = 0.25, 0.35
"""Below this spread of directions, rows are alike; that it fell to this share shows that training made them so."""


def collapsed(run: RecordedRun) -> Claim | None:
    """Training compares outputs of the model with one another only, and the outputs of all rows become the same."""
    if run.adversarial or len(run.optimizers) != 1 or run.nonfinite.seen or run.steps < 60:
        return None
    calls = run.sampled.calls
    losses = run.sampled.training_losses()
    similarities = [call for call in calls.risky if call.op in SIMILARITIES]
    compared = {call.op for call in (*losses, *similarities)}
    if not compared or calls.differences or not all(map(_compares_outputs, losses)):
        return None
    if any((call.sides or 0) < 2 for call in similarities):
        return None  # one side is given
    known = [call for call in run.sampled.trained_model_calls if call.row_spread is not None and call.reached]
    spreads = [call.row_spread for call in known if call.model == known[0].model and call.row_spread is not None]
    if len(spreads) < 8:
        return None
    first, last = median(spreads[:3]), median(spreads[-3:])
    if last > _ALIKE or last > _FALLEN * first:
        return None
    fix = "Detach the side that the predictions are compared with, as in `similarity(p1, z2.detach())`."
    if compared & _TRIPLETS:
        fix = "Pass anchor, positive and negative to the loss in this order, and check how the negatives are chosen."
    return Claim(
        0.85,
        f"`{known[0].model}` gives all rows nearly the same embedding: their directions differ by {last:.2g}, "
        f"and by {first:.2g} at the start (1: a centred cloud). The loss (now {run.curve.end:.3g}) only compares "
        "embeddings with one another.",
        step=known[-1].step,
        where=where_of(known[-1].site),
        evidence={"spread_first": first, "spread_last": last, "compared_by": sorted(compared)},
        fixes=(fix,),
    )


def _compares_outputs(loss: LossCall) -> bool:
    """Whether a loss moves both of its sides. One without a gradient is given: by a teacher or a target network."""
    both_move = loss.input.requires_grad and loss.target.requires_grad
    return loss.op in _TRIPLETS or (loss.target_from_model and both_move)


RULES: tuple[Rule, ...] = (
    Rule("model.collapsed-embedding", "value", collapsed, explains=("optim.not-learning", "lr.*", "model.dead-units")),
)
