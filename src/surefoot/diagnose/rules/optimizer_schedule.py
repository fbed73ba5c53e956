"""Learning-rate schedules that decay too early, rebound, or rise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TYPE_CHECKING

from surefoot.diagnose.curves import present
from surefoot.diagnose.rule import Claim, Rule
from surefoot.record.facts import STEPS_ONLY

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Evidence
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import OptimizerFacts, SchedulerFacts


CYCLES = {"CosineAnnealingWarmRestarts", "OneCycleLR", "CyclicLR"}
"""Schedules that rise on purpose."""


def schedule_broken(run: RecordedRun) -> Claim | None:
    """The learning rate itself jumps, rebounds, or reaches zero too early."""
    for held in run.optimizers:
        found = _schedule(run, held)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class RateHistory:
    """The learning rates of one optimizer, and their schedulers."""

    rates: list[float]
    base: float
    """The initial settings of the optimizer."""
    schedulers: list[SchedulerFacts]
    place: tuple[str, ...]

    @property
    def kinds(self) -> set[str]:
        """The classes of the schedulers."""
        return {each.type for each in self.schedulers}

    @property
    def evidence(self) -> Evidence:
        """First, last and highest rate."""
        rates = self.rates
        found = {"lr_first": rates[0], "lr_highest": max(rates), "lr_last": rates[-1]}
        return found | {"schedulers": sorted(self.kinds), "steps": len(rates)}

    def claim(self, confidence: float, words: str, step: int, **more: float) -> Claim:
        """What is wrong with them."""
        return Claim(confidence, words, step=step, where=self.place, evidence=self.evidence | more)


def _schedule(run: RecordedRun, held: OptimizerFacts) -> Claim | None:
    rates = present(held.series.lr)
    schedulers = [s for s in run.facts.schedulers if s.optimizer == held.number]
    base = held.first_group.initial_lr or held.first_group.lr or (rates[0] if rates else 0.0)
    known = RateHistory(rates, base, schedulers, (schedulers[-1].site if schedulers else held.site,))
    if len(rates) < 10 or known.kinds & CYCLES:
        return None
    top = max(rates)
    if schedulers and 0 < top < 0.03 * base and not run.curve.learned:
        return known.claim(
            0.93,
            f"The optimizer was created with a learning rate of {base:.3g} and never steps with more than {top:.2g}: "
            "the schedule multiplies it by far too little (it may return rates instead of factors).",
            0,
            lr_of_optimizer=base,
        )
    if min(rates) < 0:
        return known.claim(0.97, f"The learning rate becomes negative ({min(rates):.3g}).", rates.index(min(rates)))
    if top == 0:
        return None
    is_only_rate = len(held.settings) == 1 and len(run.optimizers) == 1  # others may train meanwhile
    begins = _begins_with_zero(known) if is_only_rate else None
    return begins or _fades(run, known) or _rebound(known) or _climbs(run, known)


def _begins_with_zero(known: RateHistory) -> Claim | None:
    """Many steps with a rate of exactly 0, then the whole rate at once: a warm-up that rounds down to 0."""
    rates, count = known.rates, len(known.rates)
    zeros = next((i for i, rate in enumerate(rates) if rate > 0), count)
    if not known.schedulers or zeros < max(5, 0.02 * count) or zeros == count or rates[zeros] < 0.5 * max(rates):
        return None
    claim = known.claim(
        0.93,
        f"The learning rate is 0 for the first {zeros} of {count} steps, which change nothing, and then "
        f"{rates[zeros]:.3g} at once: the warm-up is rounded down to 0.",
        0,
        steps_at_zero=zeros,
    )
    fix = f"Divide without rounding: `step / {zeros}`, not `step // {zeros}` or `int(step / {zeros})`."
    return replace(claim, fixes=(fix,))


def _fades(run: RecordedRun, known: RateHistory) -> Claim | None:
    """The rate reaches zero long before the end."""
    rates, count, top = known.rates, len(known.rates), max(known.rates)
    each_batch = _per_step(known.schedulers, count)
    first_tiny = _first_below(rates, 1e-4 * top)
    if (
        first_tiny is None and run.curve.finite and run.curve.left >= 0.5
    ):  # hardly anything was learned before it was almost 0
        first_tiny = _first_below(rates, 9e-3 * top)
    if first_tiny is None and each_batch:  # milestones in epochs, counted in batches, are passed at the very beginning
        early = _first_below(rates, 2e-3 * top)
        first_tiny = early if early is not None and early < 0.1 * count else None
    if first_tiny is None:
        return None
    waits = "ReduceLROnPlateau" in known.kinds and not (each_batch and _was_falling(run, rates))
    if run.curve.learned and run.curve.drop > (0.5 if waits else 0.9):
        return None
    claim = known.claim(
        0.93,
        f"The learning rate falls from {top:.3g} to {rates[first_tiny]:.2g} by step {first_tiny} of {count} "
        f"and stays there: nothing is learned in the last {1 - first_tiny / count:.0%} of the run (loss "
        f"{run.curve.end:.3g}){each_batch}.",
        first_tiny,
    )
    once = "Call `scheduler.step()` once per epoch, after the loop over the batches."
    return replace(claim, fixes=(once,)) if each_batch else claim


def _first_below(rates: list[float], limit: float) -> int | None:
    """The step from which on all rates are below a limit, if the first is not and it is long before the end."""
    first = next((i for i in range(len(rates), 0, -1) if rates[i - 1] >= limit), 0)
    return first if rates[0] >= limit and first < 0.7 * len(rates) else None


def _was_falling(run: RecordedRun, rates: list[float]) -> bool:
    """Whether the loss still fell when the rate was first lowered: it was no plateau, but the noise of the batches."""
    before = run.curve.finite[: next((i for i, rate in enumerate(rates) if rate < rates[0]), 0)]
    third = len(before) // 3
    return third >= 5 and mean(before[-third:]) < 0.9 * mean(before[third : 2 * third])


def _rebound(known: RateHistory) -> Claim | None:
    """A cosine that is stepped beyond its end rises again."""
    rates = known.rates
    for s in known.schedulers:
        period = s.cosine_period
        if s.type == "CosineAnnealingLR" and period and s.last_epoch > 1.05 * period and _rebounds(rates):
            claim = known.claim(
                0.93,
                f"CosineAnnealingLR was created for {period:.0f} steps and stepped {s.last_epoch} times: the learning "
                f"rate reaches its minimum and rises again to {max(rates[rates.index(min(rates)) :]):.3g}.",
                rates.index(min(rates)),
                T_max=period,
                stepped=s.last_epoch,
            )
            return replace(claim, where=(s.site,))
    return None


def _climbs(run: RecordedRun, known: RateHistory) -> Claim | None:
    """The rate jumps, or only grows, and the run fails."""
    rates, count, base, top = known.rates, len(known.rates), known.base, max(known.rates)
    jump = next((i for i in range(max(2, count // 20), count) if rates[i] > 5 * rates[i - 1] > 0), None)
    if jump is not None and (run.failing or _worse_after(run, jump)) and _is_kept_up(run, jump):
        claim = known.claim(
            0.88, f"The learning rate jumps from {rates[jump - 1]:.3g} to {rates[jump]:.3g} at step {jump}.", jump
        )
        keep = f"Keep the learning rate at {rates[jump - 1]:.3g} at step {jump}: "
        who = (
            f"correct the milestones or factors of {', '.join(sorted(known.kinds))}."
            if known.kinds
            else ('remove the line that sets `group["lr"]` there.')
        )
        return replace(claim, fixes=(keep + who,))
    if top > 3 * base and rates[-1] > 3 * rates[0] and rates[-1] >= 0.99 * top and run.failing:
        return known.claim(
            0.9,
            f"The learning rate only grows: from {rates[0]:.3g} to {rates[-1]:.3g}, {rates[-1] / base:.3g} times the "
            f"initial rate of the optimizer (loss {run.curve.start:.3g} to {run.curve.end:.3g}).",
            count - 1,
        )
    return None


def _is_kept_up(run: RecordedRun, step: int) -> bool:
    """Whether the loss is worse to the end. Used only if schedulers may be unknown: a warm restart recovers."""
    if run.facts.scope != STEPS_ONLY:
        return True
    before = run.curve.finite[max(0, step - 20) : step]
    return bool(before) and run.curve.end > median(before) + 0.2 * abs(median(before))


def _per_step(schedulers: list[SchedulerFacts], count: int) -> str:
    for s in schedulers:
        stepped = s.last_epoch if s.type == "ReduceLROnPlateau" else s.steps
        if stepped >= 0.9 * count and s.type in ("StepLR", "MultiStepLR", "ExponentialLR", "ReduceLROnPlateau"):
            return f"; {s.type} is stepped once per batch, {stepped} times"
    return ""


def _rebounds(rates: list[float]) -> bool:
    low = rates.index(min(rates))
    return low < len(rates) - 2 and max(rates[low:]) > 0.3 * max(rates)


def _worse_after(run: RecordedRun, step: int) -> bool:
    values = run.curve.finite
    before, after = values[max(0, step - 20) : step], values[step : step + 20]
    return bool(before and after) and median(after) > median(before) + 0.2 * abs(median(before))


RULES: tuple[Rule, ...] = (
    Rule("lr.schedule-broken", "value", schedule_broken, dated=True, from_steps=True,
         explains=("lr.too-low", "lr.too-high", "lr.no-warmup", "optim.no-update", "model.dead-units",
                   "loss.sum-reduction")),
)  # fmt: skip
