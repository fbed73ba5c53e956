"""The confidence of a finding: what its rule says, corrected by how often such findings were true.

Measured on the tuning half of `surefoot zoo mutate`, where the true cause is known: 299 mutants that are faulty and 97
that do no harm (2026-11-18, 16 cores, torch 2.11, without false findings that were mended that day;
`benchmarks/calibration.py` prints the numbers):

- The first finding is true in 246 of 260 mutants. Findings of one cause are corrected by their own count (`FIRST`).
- A further finding beside it is true in 6 of 35 cases: the rest are consequences of the same fault that no rule
  connects with it. What was observed directly (the wiring, a crash) may be a second fault, and loses less.

What a rule states is what its author expects, and counts of scripts on which rules were changed flatter them. So what
is stated is lowered first, by kind of evidence (`UNFAMILIAR`), and the counts of a cause raise it again. On public
scripts with planted mistakes, on which nothing was tuned, the first cause was true in 82 of 103 runs that got one
(first judgements, November 2026).

Only the confidence that is shown changes. Findings are ranked by what the rules say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.diagnose.rule import Kind

FIRST: dict[str, tuple[int, int]] = {
    "clip.saturated": (0, 1), "data.class-collapse": (0, 1), "data.degenerate-batch": (19, 19),
    "data.labels-uninformative": (17, 18), "data.leakage": (6, 6), "data.nonfinite-input": (11, 11),
    "data.split-mismatch": (19, 19), "data.unshuffled": (10, 10), "loss.bounded-output": (8, 9),
    "loss.broadcast": (4, 4), "loss.sigmoid-before-bce-logits": (0, 1), "loss.softmax-before-cross-entropy": (11, 11),
    "loss.target-offset": (3, 3), "lr.schedule-broken": (15, 17), "lr.too-high": (14, 17), "model.dead-units": (0, 1),
    "model.eval-mode-training": (16, 16), "model.train-mode-eval": (7, 7), "optim.detached-graph": (11, 11),
    "optim.frozen-parameters": (5, 5), "optim.missing-zero-grad": (11, 11), "optim.no-update": (22, 22),
    "optim.not-learning": (0, 2), "optim.parameters-missing": (11, 11), "optim.stale-state": (0, 1),
    "optim.weight-decay": (21, 21),
}  # fmt: skip
"""By cause: the mutants in which the first finding was true, and all in which it came first."""
_OWN_WEIGHT = 10
"""What a rule says counts as much as this many mutants."""
UNFAMILIAR: dict[str, float] = {"dynamics": 0.8, "curve": 0.8}
"""The part of the stated confidence that is left if a cause was never counted, by kind of evidence; of others, all.

The wrong ones of the public scripts were not counted by kind: that only what is read off the course of a run loses
confidence is an assumption.
"""
_LATER = {"crash": 0.6, "wiring": 0.6}
"""The part that a finding keeps which is not the first, by its kind of evidence."""
_LATER_OTHERWISE = 0.25


def calibrated(code: str, kind: Kind, own: float, is_first: bool) -> float:
    """The confidence to show for a finding above `info`.

    Args:
        code: Its cause.
        kind: The kind of evidence.
        own: The confidence that the rule states.
        is_first: Whether no finding comes before it.
    """
    true, count = FIRST.get(code, (0, 0))
    stated = own * UNFAMILIAR.get(kind, 1.0)
    # No more than the rule says: if that is less than usual for the cause, there is less evidence than usual.
    shown = min(own, (_OWN_WEIGHT * stated + true) / (_OWN_WEIGHT + count))
    return shown if is_first else shown * _LATER.get(kind, _LATER_OTHERWISE)
