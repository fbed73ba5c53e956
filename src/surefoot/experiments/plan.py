"""The changes, from cheap to invasive: their names, when they have nothing to change, how long their runs are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from surefoot.errors import UsageError
from surefoot.record.facts import OptimizerLoadedEvent

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.experiments.changes.run_order import RunOrder
    from surefoot.experiments.run_comparison import RunReading

Kind = Literal["cure", "probe", "baseline"]


@dataclass(frozen=True)
class Change:
    """One change that can be made to a run from outside."""

    name: str
    """The name in `--only`, in the run folder and in the results."""
    title: str
    """The name in tables."""
    kind: Kind = "cure"
    """A cure can be applied to the script; a probe only shows where the cause is."""
    slower: float = 1.0
    """How many times as many steps it needs to get equally far."""


CHANGES: tuple[Change, ...] = (
    Change("lr-3", "LR / 3", slower=3.0),
    Change("lr-10", "LR / 10", slower=10.0),
    Change("warm-up", "warm-up"),
    Change("clip", "clip 1.0"),
    Change("fp32", "fp32"),
    Change("bf16", "bf16 for fp16"),
    Change("other-batches", "other batches"),
    Change("skip-batch", "batch skipped"),
    Change("reset-moments", "moments reset"),
    Change("eps", "eps changed"),
    Change("smaller-model", "half the blocks"),
    Change("deterministic", "deterministic kernels"),
    Change("other-seed", "other seed", "probe"),
    Change("tiny-batch", "tiny batch", "probe"),
    Change("synthetic-inputs", "synthetic inputs", "probe"),
    Change("shuffled-labels", "shuffled labels", "probe"),
)
BY_NAME = {change.name: change for change in CHANGES}

FEWEST_STEPS = 200
"""A run that did not fail must have at least this many steps to learn in, if the script has them."""


def chosen(only: str) -> list[Change]:
    """The changes named in `--only`, in the order of the plan; all if none is named."""
    if not only.strip():
        return list(CHANGES)
    names = [name.strip().lower() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise UsageError(f"--only: there is no change {unknown[0]!r}. Choose from {', '.join(BY_NAME)}.")
    return [change for change in CHANGES if change.name in names]


def in_turn(changes: list[Change], first: dict[str, str]) -> list[Change]:
    """The order of the runs: first what would fix the cause that the diagnosis names, then the rest as planned."""
    return sorted(changes, key=lambda change: change.name not in first)


def nothing_to_change(change: Change, run: RecordedRun, baseline: RunReading) -> str | None:
    """Why a change would have no effect on this script, as far as the baseline shows."""
    seen = run.facts.experiment.seen if run.facts.experiment is not None else None
    if change.name in ("lr-3", "lr-10", "warm-up", "clip", "reset-moments") and run.main is None:
        return "no optimizer ever stepped"
    if change.name == "clip" and run.grad_norms and not run.nonfinite.seen and max(run.grad_norms) <= 1.0:
        return f"no gradient norm is above 1.0 (largest {max(run.grad_norms):.3g})"
    if change.name == "skip-batch" and not baseline.bad_steps and baseline.outcome != "non-finite":
        return "no single step is unusual"
    if change.name == "reset-moments":
        if seen is not None and not seen.has_state:
            return "the optimizer keeps no moments"
        known = baseline.failed_at is not None or baseline.suspected_at is not None
        if not known and not run.events(OptimizerLoadedEvent):
            return "no step is known at which the failure began"
    has_eps = any(isinstance(group.eps, float) for held in run.optimizers for group in held.settings)
    if change.name == "eps" and run.main is not None and not has_eps:
        return "the optimizer has no eps"
    if change.name == "synthetic-inputs" and baseline.outcome in ("stuck", "slow"):
        return "noise cannot be learned, so a run on noise is not comparable with a run that is stuck"
    if change.name == "deterministic" and seen is not None and seen.devices == ["cpu"]:
        return "everything runs on the CPU"
    return None


def order_for(change: Change | None, baseline: RunReading, seconds: float) -> RunOrder:
    """The order for the run of a change, or, for `None`, of the repetition of the baseline."""
    order: RunOrder = {"change": change.name if change else None, "seconds": seconds}
    failed = baseline.failed_at
    if failed is not None and baseline.outcome in ("non-finite", "crashed"):  # other failures need the whole curve
        slower = change.slower if change else 1.0
        longer = warmup_steps(baseline) if change and change.name == "warm-up" else 0
        least = FEWEST_STEPS if change else 0
        order["steps"] = max(least, math.ceil(1.5 * slower * failed) + longer + 30)
    if change and change.name == "warm-up":
        order["warmup_steps"] = warmup_steps(baseline)
    if change and change.name == "skip-batch":
        order["skip_steps"] = list(baseline.bad_steps)
    if change and change.name == "reset-moments":
        at = failed if failed is not None else baseline.suspected_at
        order["reset_at"] = max(1, at - 1) if at is not None else None
    return order


def warmup_steps(baseline: RunReading) -> int:
    """A third of the steps, within limits. After an early failure, five times the steps that it took to fail."""
    length = baseline.steps // 3 if baseline.failed_at is None else 5 * baseline.failed_at
    return min(500, max(50, length))
