"""Step 5: the learning rate: copies train on the same few batches at 0.1, 1 and 10 times the rate.

Start and end are measured on all of these batches, so that the noise between batches does not matter. A rate that a
schedule is still warming up counts as the rate after the warm-up, and is reached gradually, as in the schedule. The
rules judge the loss at each rate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.doctor.checks import Check, failed, passed, skipped
from surefoot.doctor.model_copy import ModelCopy, is_warming_up, peak_rate
from surefoot.record.facts import RateProbe

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 5
_NAME = "learning rate"
_STEPS = 60
_SHARE = 0.07
_CAUSES = ("optim.no-update", "loss.sum-reduction", "lr.no-warmup", "lr.too-high", "lr.too-low")
_EXPECTED = "the loss falls at this rate, and not much less than at a tenth"


def check_rates(context: CheckContext) -> list[Check]:
    """Probe three rates, and more if the middle one fails."""
    if context.optimizer is None:
        return [skipped(STEP, _NAME, "no optimizer was given")]
    if context.look is not None and not math.isfinite(context.look.value):
        return [skipped(STEP, _NAME, "the first loss is not finite, see step 2")]
    rate = max(peak_rate(group) for group in context.optimizer.param_groups)
    if not rate:
        sound = passed(STEP, _NAME, "the learning rate is 0, and no schedule raises it", 0.0, "more than 0")
        return [context.judged(("optim.no-update",), sound)]
    ramps = is_warming_up(context.optimizer)
    low, own, high = probes = [_probe(context, factor, ramps) for factor in (0.1, 1.0, 10.0)]
    story = (
        f"at {rate:.3g} the loss goes {_arrow(own)}, at a tenth {_arrow(low)}, at ten times {_arrow(high)} in "
        f"{own.steps} steps; the first update is {own.update_ratio:.2g} of the weights"
    )
    if min(probe.steps for probe in probes) < 2 * len(context.probe_batches()) and own.fall > -math.inf:
        return [skipped(STEP, _NAME, f"the time budget allowed only {own.steps} steps; {story}")]
    if own.fall < 0.02 and not ramps:
        probes.append(_probe(context, 1.0, ramp=True))
    if own.fall == -math.inf:
        probes += [_probe(context, factor, ramp=False) for factor in (1e-2, 1e-3)]
    context.measured(rates=probes)
    return [context.judged(_CAUSES, _otherwise(probes, story))]


def _otherwise(probes: list[RateProbe], story: str) -> Check:
    """The check if no rule names a cause."""
    own = probes[1]
    if own.fall == -math.inf:
        fix = "Something else breaks the loss: first fix what the other steps report."
        return failed(STEP, _NAME, story, own.update_ratio, _EXPECTED, fix)
    if max(probe.fall for probe in probes) < 0.02:
        text = f"none of the rates lowers the loss, so the rate cannot be judged (see step 3): {story}"
        return replace(skipped(STEP, _NAME, text), expected=_EXPECTED)
    return passed(STEP, _NAME, story, own.update_ratio, _EXPECTED)


def _probe(context: CheckContext, factor: float, ramp: bool) -> RateProbe:
    trial, batches = context.trial(), context.probe_batches()
    trial.scale_rates(factor)
    targets = trial.rates
    start, ratio, steps = _mean_loss(trial, batches), 0.0, 0
    peak, loss = start, math.nan
    for step in context.steps(_STEPS, _SHARE):
        if ramp:
            trial.set_rates([rate * min(1.0, (step + 1) / (_STEPS // 2)) for rate in targets])
        before = [p.detach().clone() for p in trial.parameters] if step == 0 else []
        loss = trial.step(batches[step % len(batches)])
        steps += 1
        peak = max(peak, loss)
        if step == 0:
            ratio = _update_ratio(trial, before) / (2.0 / _STEPS if ramp else 1.0)
        if not math.isfinite(loss):
            break
    return RateProbe(
        factor=factor,
        gradually=ramp,
        start=start,
        end=_mean_loss(trial, batches) if math.isfinite(loss) else loss,
        peak=peak if math.isfinite(loss) else loss,
        steps=steps,
        update_ratio=ratio,
    )


def _mean_loss(trial: ModelCopy, batches: list[Any]) -> float:
    return sum(float(trial.loss(batch).detach()) for batch in batches) / len(batches)


@torch.no_grad()
def _update_ratio(trial: ModelCopy, before: list[torch.Tensor]) -> float:
    ratios = [
        float(torch.linalg.vector_norm((new - old).float()) / torch.linalg.vector_norm(old.float()))
        for new, old in zip(trial.parameters, before, strict=True)
        if bool(old.any())
    ]
    finite = sorted(ratio for ratio in ratios if math.isfinite(ratio))
    return finite[len(finite) // 2] if finite else 0.0


def _arrow(probe: RateProbe) -> str:
    return f"from {probe.start:.3g} to {probe.end:.3g}"
