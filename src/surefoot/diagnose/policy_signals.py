"""Interprets the numbers that a trainer has logged about its policy, for the rules in `rules/policy.py`.

TRL computes rewards, entropy and KL of each step by itself. If the operations of the loss were not observed, only these
numbers are known. Only a run that logs rewards trains a policy: the entropy of a language model that learns from text
falls too, and should.
"""

from __future__ import annotations

from statistics import mean, median
from typing import TYPE_CHECKING

from surefoot.diagnose.rule import Claim

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import PolicySignal

_NO_SPREAD = 1e-8
"""Rewards with a smaller spread are equal: they are means of 32-bit numbers."""


def _of_kind(run: RecordedRun, kind: str) -> list[PolicySignal]:
    return [each for each in run.facts.policy_signals if each.kind == kind]


def logged_gain(run: RecordedRun) -> float | None:
    """The rise of the logged rewards from the first third to the last, in units of their early spread."""
    rewards, spreads = _of_kind(run, "reward"), _of_kind(run, "reward_std")
    third = len(rewards) // 3
    if third < 2:
        return None
    early, late = mean(each.value for each in rewards[:third]), mean(each.value for each in rewards[-third:])
    spread = mean(each.value for each in spreads[: max(2, len(spreads) // 3)]) if spreads else 0.0
    unit = spread + 0.1 * abs(early)
    return (late - early) / unit if unit > 0 else None


def logged_zero_advantage(run: RecordedRun) -> Claim | None:
    """All samples that are compared with one another have the same reward, in most of the logged steps."""
    shares, spreads = _of_kind(run, "equal_groups"), _of_kind(run, "reward_std")
    known = shares or spreads
    equal = [each for each in shares if each.value >= 0.999] if shares else []
    if not shares:
        equal = [each for each in spreads if each.value < _NO_SPREAD]
    if len(known) < 3 or len(equal) < 0.7 * len(known):
        return None
    fact = "every group of samples has one and the same reward" if shares else "all samples have the same reward"
    rewards = {each.step: each.value for each in _of_kind(run, "reward")}
    level = rewards.get(equal[0].step)
    number = "" if level is None else f", {level:.4g} at step {equal[0].step}"
    return Claim(
        0.94,
        f"In {len(equal)} of {len(known)} logged steps {fact} (`{equal[0].name}` is {equal[0].value:.3g}{number}): "
        "every advantage is 0, and the policy gets no gradient from its rewards.",
        step=equal[0].step,
        evidence={"steps_without": len(equal), "steps": len(known), "signal": equal[0].name, "reward": level},
        fixes=("Print the rewards of one group: the reward function must give different numbers to its samples.",),
    )


def logged_kl_blowup(run: RecordedRun) -> Claim | None:
    """The logged KL rises far above its beginning, and the rewards do not rise with it."""
    found = _of_kind(run, "kl")
    names = {each.name for each in found}
    found = [each for each in found if each.name == min(names)]
    if len(found) < 6:
        return None
    values, third = [each.value for each in found], len(found) // 3
    early, late = median(values[: max(2, len(values) // 20)]), median(values[-third:])
    if late <= 0.5 or late <= 5 * max(early, 0.01):
        return None
    rise = logged_gain(run)
    is_better = rise is not None and rise > 1
    return Claim(
        0.5 if is_better else 0.85,
        f"The logged KL divergence from the old or reference policy (`{found[0].name}`) goes from {early:.2g} to "
        f"{late:.2g} (highest {max(values):.2g})"
        + (f"; the rewards change by {rise:.2f} of their early spread." if rise is not None else "."),
        step=next(each.step for each in found if each.value > 0.5 * late),
        evidence={"early": early, "late": late, "highest": max(values), "gain_of_rewards": rise},
        severity="info" if is_better else "error",
    )


def logged_entropy_collapse(run: RecordedRun) -> Claim | None:
    """The logged entropy of a policy falls to a small part of its initial value, early in the run."""
    found = _of_kind(run, "entropy")
    if len(found) < 8 or not _of_kind(run, "reward"):
        return None
    values = [each.value for each in found]
    start, end = max(values[: max(2, len(values) // 10)]), median(values[-max(3, len(values) // 5) :])
    if start < 0.3 or end > 0.05 * start:
        return None
    last_high = max((each.step for each in found if each.value > 0.1 * start), default=0)
    rise = logged_gain(run)
    is_harmless = (rise is not None and rise > 1) or last_high > 0.5 * run.steps
    return Claim(
        0.5 if is_harmless else 0.88,
        f"The logged entropy of the policy (`{found[0].name}`) falls from {start:.3g} to {end:.2g} nats and stays "
        f"under a tenth of its first value after step {last_high} of {run.steps}"
        + (f"; the rewards change by {rise:.2f} of their early spread." if rise is not None else "."),
        step=last_high,
        evidence={"start": start, "end": end, "collapsed_at": last_high, "gain_of_rewards": rise},
        severity="info" if is_harmless else "error",
    )


def logged_ratio_explosion(run: RecordedRun) -> Claim | None:
    """Logged importance ratios far above 1."""
    found = _of_kind(run, "ratio")
    wild = [each for each in found if not each.value < 10]
    if len(wild) < 2 or all(each.value < 20 for each in wild):
        return None
    worst = max(wild, key=lambda each: each.value)
    return Claim(
        0.9,
        f"The logged importance ratio `{worst.name}` reaches {worst.value:.3g} at step {worst.step}; it is above 10 in "
        f"{len(wild)} of {len(found)} logged steps, first at step {wild[0].step}: a few samples outweigh all others.",
        step=wild[0].step,
        evidence={"largest": worst.value, "steps_above_10": len(wild), "of": len(found)},
    )
