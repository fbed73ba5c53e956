"""Step 5: the learning rate, tried out: a tenth, as given, and ten times, on copies that go round the same few batches.

Start and end are measured on all of these batches, so that the noise between batches does not count. A rate that a
schedule is still warming up counts as what it warms up to, and is reached gradually, as the schedule would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surefoot.doctor.checks import Check, failed, from_catalogue, passed, skipped
from surefoot.doctor.model_copy import ModelCopy, peak_rate

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 5
_NAME = "learning rate"
_STEPS = 60
_SHARE = 0.07
_FELL = 0.1
"""Fall, as a share of the first loss, from which a probe is said to have learnt."""
_OVERWRITES, _BLOW_UP = 1.0, 2.0
"""A first update larger than the weights, and a loss that rises by this many times its size: too high, if survived."""
_TINY_UPDATE = 3e-5
"""Update-to-weight ratio under which a step hardly changes anything; 1e-3 is the usual size."""


@dataclass
class Probe:
    """A short training run."""

    factor: float
    start: float
    end: float
    steps: int
    peak: float
    """The largest loss on the way."""
    update_ratio: float
    """Norm of the first update over the norm of the weights, the median over parameters."""

    @property
    def fall(self) -> float:
        """How far the loss fell, as a share of its size; minus infinity when it blew up."""
        if not math.isfinite(self.end) or not math.isfinite(self.start):
            return -math.inf
        return (self.start - self.end) / max(abs(self.start), 1e-8)


def check_rates(context: CheckContext) -> list[Check]:
    """Probe three rates and judge the one in the middle."""
    if context.optimizer is None:
        return [skipped(STEP, _NAME, "no optimizer was given")]
    if context.look is not None and not math.isfinite(context.look.value):
        return [skipped(STEP, _NAME, "the first loss is not finite, see step 2")]
    rates = [peak_rate(group) for group in context.optimizer.param_groups]
    if not any(rates):
        summary = "the learning rate is 0 and no schedule is going to raise it"
        return [from_catalogue(STEP, _NAME, "fail", "optim.no-update", summary, 0.0, "more than 0")]
    warming = any(float(g["lr"]) < 0.99 * float(g.get("initial_lr", 0.0)) for g in context.optimizer.param_groups)
    probes = {factor: _probe(context, factor, ramp=warming) for factor in (0.1, 1.0, 10.0)}
    return [_judge(context, max(rates), probes, warming)]


def _probe(context: CheckContext, factor: float, ramp: bool) -> Probe:
    trial, batches = context.trial(), context.probe_batches()
    trial.scale_rates(factor)
    targets = [float(group["lr"]) for group in trial.optimizer.param_groups]
    start, ratio, steps = _mean_loss(trial, batches), 0.0, 0
    peak = start
    for step in context.steps(_STEPS, _SHARE):
        if ramp:
            _set_rates(trial, [rate * min(1.0, (step + 1) / (_STEPS // 2)) for rate in targets])
        before = [p.detach().clone() for p in trial.parameters] if step == 0 else []
        loss = trial.step(batches[step % len(batches)])
        steps += 1
        peak = max(peak, loss)
        if step == 0:
            ratio = _update_ratio(trial, before) / (2.0 / _STEPS if ramp else 1.0)
        if factor == 1.0:
            context.gradient_norms.append(trial.gradient_norm())
        if not math.isfinite(loss):
            return Probe(factor, start, loss, steps, loss, ratio)
    return Probe(factor, start, _mean_loss(trial, batches), steps, peak, ratio)


def _mean_loss(trial: ModelCopy, batches: list[Any]) -> float:
    return sum(float(trial.loss(batch).detach()) for batch in batches) / len(batches)


def _set_rates(trial: ModelCopy, rates: list[float]) -> None:
    for group, rate in zip(trial.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def _update_ratio(trial: ModelCopy, before: list[torch.Tensor]) -> float:
    ratios = [
        float(torch.linalg.vector_norm((new - old).float()) / torch.linalg.vector_norm(old.float()))
        for new, old in zip(trial.parameters, before, strict=True)
        if bool(old.any())
    ]
    finite = sorted(ratio for ratio in ratios if math.isfinite(ratio))
    return finite[len(finite) // 2] if finite else 0.0


def _judge(context: CheckContext, rate: float, probes: dict[float, Probe], warming: bool) -> Check:
    low, own, high = probes[0.1], probes[1.0], probes[10.0]
    story = (
        f"at {rate:.3g} the loss goes {_arrow(own)}, at a tenth {_arrow(low)}, at ten times {_arrow(high)} in "
        f"{own.steps} steps; the first update is {own.update_ratio:.2g} of the weights"
    )
    expected = "falls at this rate, and not much worse than at a tenth"
    if min(probe.steps for probe in probes.values()) < 2 * len(context.probe_batches()) and own.fall > -math.inf:
        return skipped(STEP, _NAME, f"the time budget allowed only {own.steps} steps; {story}")
    if own.fall < 0.02 and low.fall > _FELL:
        return _too_high(context, story, own, low, expected, warming)
    if own.update_ratio > _OVERWRITES and own.peak > own.start + _BLOW_UP * abs(own.start) and low.fall > _FELL:
        summary = f"{story}; on the way it jumps to {own.peak:.3g}"
        return from_catalogue(STEP, _NAME, "warn", "lr.too-high", summary, own.update_ratio, expected)
    if own.fall == -math.inf and low.fall < _FELL:
        return _at_no_rate(context, story, own, expected)
    if own.fall < 0.01 and 0.0 < own.update_ratio < _TINY_UPDATE and high.fall > max(3.0 * own.fall, 0.0):
        number = own.update_ratio
        return from_catalogue(
            STEP, _NAME, "warn", "lr.too-low", story, number, "a first update near 1e-3 of the weights"
        )
    if max(low.fall, own.fall, high.fall) < 0.02:
        return skipped(
            STEP, _NAME, f"no rate tried lowers the loss, so the rate cannot be judged (see step 3): {story}"
        )
    return passed(STEP, _NAME, story, own.update_ratio, expected)


def _too_high(context: CheckContext, story: str, own: Probe, low: Probe, expected: str, warming: bool) -> Check:
    look = context.look
    if look is not None and any(call.settings.get("reduction") == "sum" for call in look.recorded.losses):
        return from_catalogue(STEP, _NAME, "fail", "loss.sum-reduction", story, own.update_ratio, expected)
    if not warming and _probe(context, 1.0, ramp=True).fall >= max(low.fall, 0.3):
        summary = f"{story}; with the same rate reached gradually it learns"
        return from_catalogue(STEP, _NAME, "fail", "lr.no-warmup", summary, own.update_ratio, expected)
    return from_catalogue(STEP, _NAME, "fail", "lr.too-high", story, own.update_ratio, expected)


def _at_no_rate(context: CheckContext, story: str, own: Probe, expected: str) -> Check:
    for factor in (1e-2, 1e-3):
        probe = _probe(context, factor, ramp=False)
        if probe.fall > 0.02:
            summary = f"{story}; at {factor:g} of the rate {_arrow(probe)}"
            return from_catalogue(STEP, _NAME, "fail", "lr.too-high", summary, own.update_ratio, expected)
    fix = "Something else breaks the loss: cure what the other steps name first."
    return failed(STEP, _NAME, story, own.update_ratio, expected, fix)


def _arrow(probe: Probe) -> str:
    return f"{probe.start:.3g} to {probe.end:.3g}"
