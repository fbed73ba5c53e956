"""The confidence of a finding: what its rule says, corrected by how often such findings were true.

Measured on the tuning half of `surefoot zoo mutate`, where the true cause is known: 299 mutants that are faulty and 97
that do no harm (2026-11-18, 16 cores, torch 2.11, without false findings that were mended that day;
`benchmarks/calibration.py` prints the numbers):

- The first finding is true in 246 of 260 mutants. Findings of one cause are corrected by their own count (`FIRST`).
  28 first findings on eight operators that were added later (initial weights, rates, scales, outlying rows) were
  counted before any rule was changed on them: 18 of them are true.
- A further finding beside it is true in 6 of 35 cases: the rest are consequences of the same fault that no rule
  connects with it. What was observed directly (the wiring, a crash) may be a second fault, and loses less.

What a rule states is what its author expects, and counts of scripts on which rules were changed flatter them. So what
is stated is lowered first, by kind of evidence (`UNFAMILIAR`), and the counts of a cause raise it again. On public
scripts with planted mistakes, on which nothing was tuned, the first cause was true in 82 of 103 runs that got one
(first judgements, November 2026).

Some causes are often consequences of another one that no rule named (`CONSEQUENCES`): units die after large weights,
and a run that does not learn has a reason. They were the first finding of 10 mutants of the tuning half and true in
none, because no operator of that half plants one; and of 8 scripts of the zoo's tuning half that show one, true in all.

Only the confidence that is shown changes. Findings are ranked by what the rules say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.diagnose.rule import Kind

FIRST: dict[str, tuple[int, int]] = {
    "data.bad-batch": (1, 3), "data.degenerate-batch": (19, 19), "data.labels-uninformative": (17, 18),
    "data.leakage": (6, 6), "data.nonfinite-input": (11, 11), "data.split-mismatch": (19, 19),
    "data.unscaled-input": (3, 4), "data.unshuffled": (10, 10), "init.symmetric": (1, 1), "init.too-large": (2, 3),
    "loss.bounded-output": (8, 9), "loss.broadcast": (4, 4), "loss.sigmoid-before-bce-logits": (0, 1),
    "loss.softmax-before-cross-entropy": (11, 11), "loss.target-offset": (3, 3), "lr.schedule-broken": (15, 17),
    "lr.too-high": (16, 20), "lr.too-low": (9, 9), "model.eval-mode-training": (16, 16),
    "model.train-mode-eval": (7, 7), "optim.detached-graph": (11, 11), "optim.frozen-parameters": (5, 5),
    "optim.missing-zero-grad": (11, 11), "optim.no-update": (22, 22), "optim.parameters-missing": (11, 11),
    "optim.stale-state": (0, 1), "optim.weight-decay": (21, 21),
}  # fmt: skip
"""By cause: the mutants in which the first finding was true, and all in which it came first."""
CONSEQUENCES = frozenset(
    (
        "clip.saturated",
        "data.class-collapse",
        "model.attention-logit-growth",
        "model.dead-units",
        "model.exploding-gradient",
        "model.saturated-units",
        "model.vanishing-gradient",
        "optim.not-learning",
    )
)
"""Causes that are often consequences of others. They are corrected together, and not by counts of their own."""
_OF_CONSEQUENCES = (8 + 0 + 8) / (10 + 10 + 8)
"""The part of their stated confidence that is left: public scripts (0.8, as ten), mutants, scripts of the zoo."""
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
    stated = own * (_OF_CONSEQUENCES if code in CONSEQUENCES else UNFAMILIAR.get(kind, 1.0))
    # No more than the rule says: if that is less than usual for the cause, there is less evidence than usual.
    shown = min(own, (_OWN_WEIGHT * stated + true) / (_OWN_WEIGHT + count))
    return shown if is_first else shown * _LATER.get(kind, _LATER_OTHERWISE)
