"""The size of each step: a learning rate that is too high or too low, and a missing warm-up."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from surefoot.diagnose.by_hand import updates_by_hand
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.scale import attention_logit_growth, dead_units, saturated_units
from surefoot.diagnose.rules.wiring import is_far_too_low
from surefoot.diagnose.straight_path import STRAIGHT, slope_kept, straight_path

if TYPE_CHECKING:
    from surefoot.diagnose.curves import LossCurve
    from surefoot.diagnose.findings import Severity
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import PreflightFacts, RateProbe

ADAPTIVE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Lion", "Nadam", "NAdam", "RAdam", "Adafactor")
_AT_ONCE = 3
"""Up to this step there is too little before a NaN to see anything grow."""
_FEWEST = 40
"""With fewer losses, a loss that has fallen may still be falling."""
_RECOVERED = 0.9
"""A loss that was thrown far up at first and then lost this share of its first value has recovered."""
_LAST = 10
"""Steps before a NaN in which a climb shows."""
_MANY_STEPS, _NEARLY_ALL = 300, 0.8
"""After this many small steps, this share of what there was to learn must be left for a warning."""
_HEAVY, _RISES_AGAIN, _LITTLE = 0.97, 1 / 3, 0.1
"""Momentum of this size overshoots if the loss rises again by this share of its fall, and this share is left."""
_UNMOVED = 1e-5
"""Weights that move by less than this share of their norm in a whole run have not learned, whatever the loss did."""


def too_high(run: RecordedRun) -> Claim | None:
    """Updates are large relative to the weights before the loss fails."""
    if run.facts.preflight is not None:
        return _lower_learns(run.facts.preflight)
    curve = run.curve
    if run.adversarial or not (run.main or updates_by_hand(run)):
        return None
    ratios = run.update_ratios(before=max(8, (curve.first_bad or 0) + 1) if curve.first_bad is not None else None)
    if not ratios:
        return None
    first = ratios[: _first_looks(run)]
    early = max(first)
    kept = slope_kept(run)
    blown = _climbed(run, early) if run.nonfinite.seen else curve.rose
    if kept is not None and kept >= STRAIGHT and not blown:
        return None  # the slope at the end of a path is that at its beginning: the steps are far from too large
    stalled = _is_stalled(run, first)
    thrown = early > 0.3 and (curve.blew_up or _never_recovered(curve))  # it came back, but from far away
    # Steps that large drive attention logits up; those of a policy rise as it becomes certain.
    saturated = attention_logit_growth(run) if early > 0.1 and not run.facts.policy_entropies else None
    killed = (_killed_units(run) or _driven_to_bounds(run)) if early > 1.0 else None
    if not (blown or stalled or thrown or saturated or killed) or early < 0.02:
        return None
    consequence = saturated or killed
    rate = max(run.lr, default=math.nan)  # a warmup begins at 0
    who = f"At a learning rate of {rate:.3g} one step of {run.main.type}" if run.main else "One update by hand"
    confidence = 0.9 if early > 0.3 else 0.8 if early > 0.1 else 0.65
    ends = "is not finite" if curve.first_bad is not None else f"ends at {curve.end:.3g}"
    moved = f"{early:.0%} of" if early < 10 else f"{early:.2g} times"
    return Claim(
        confidence,
        f"{who} changes the weights by up to {moved} their norm in the first sampled steps (1% is large), and the "
        f"loss, {curve.start:.3g} at first, peaks at {curve.peak:.3g} and {ends}."
        f"{'' if consequence is None else ' ' + consequence.summary}",
        step=curve.first_bad if curve.first_bad is not None else 0,
        where=(_stepped_at(run),),
        evidence={
            "update_to_weight": early,
            "lr": rate if rate == rate else None,
            "first": curve.start,
            "peak": curve.peak,
            "last": curve.end,
        },
        severity="error" if blown or stalled else "warning" if consequence or curve.drop < _RECOVERED else "info",
        fixes=(_lower_rate(run),) if rate == rate else (),
    )


def _lower_rate(run: RecordedRun) -> str:
    """The rates to try instead of one that is too high."""
    least, most, rate = *rate_divisors(run), max(run.lr)
    return f"Divide the rate by {least:,} to {most:,}: {rate / most:.1g} to {rate / least:.1g}."


def rate_divisors(run: RecordedRun) -> tuple[int, int]:
    """The least and the most to divide a rate by that is too high.

    They are 3 and 10, or more if that leaves steps of more than 10%, or 1%, of the weights: by the first step, since
    later ones are those of weights that it has enlarged, or of a loss that has blown up.
    """
    first = next((ratio for ratio in run.update_ratios() if ratio > 0), 0.0)
    rates = [rate for rate in run.lr if rate > 0] or [1.0]  # a warmup begins with lower ones
    momentum = (run.main.first_group.momentum or 0.0) if run.main is not None else 0.0
    full = first * max(rates) / rates[0] / max(1.0 - momentum, 0.01)
    return max(3, _rounded(full / 0.1)), max(10, _rounded(full / 0.01))


def _rounded(value: float) -> int:
    return int(float(f"{value:.1g}")) if math.isfinite(value) else 0


def overshoots(run: RecordedRun) -> Claim | None:
    """Heavy momentum, and a loss that rises again by much of its fall: the steps go on far beyond the lowest point."""
    curve = run.curve
    if run.main is None or run.adversarial or curve.blind or curve.continued or curve.count < _FEWEST:
        return None
    group = run.main.first_group
    heavy = max(group.momentum or 0.0, (group.betas or [0.0])[0])
    if not _HEAVY <= heavy < 1.0 or curve.rebound < _RISES_AGAIN or curve.left < _LITTLE or run.nonfinite.seen:
        return None
    claim = too_high(run)
    if claim is not None and claim.severity != "info":
        return None
    name, rate = "momentum" if group.momentum else "beta1", max(run.lr, default=math.nan)
    return Claim(
        0.85,
        f"{name}={heavy:g} of {run.main.type} adds up the gradients of about {1 / (1 - heavy):.0f} steps: the loss, "
        f"{curve.start:.3g} at first, rises again by {curve.rebound:.0%} of its fall and ends at {curve.end:.3g} after "
        f"{curve.count} steps.",
        step=0,
        where=(run.main.site,),
        evidence={name: heavy, "rebound": curve.rebound, "lr": rate if rate == rate else None, "last": curve.end},
        severity="info" if curve.chance is None and _is_lowest(curve) else "warning",
        fixes=(f"Set {'momentum=0.9' if group.momentum else 'betas=(0.9, 0.999)'}.",),
    )


def _is_lowest(curve: LossCurve) -> bool:
    """Whether the loss ended about where it was lowest: nothing shows then that it could end lower.

    Only where the best constant answer is not known: compared with that, a loss of some size has much left to learn.
    """
    return curve.end - curve.best < _LITTLE * (curve.start - curve.best)


def _is_stalled(run: RecordedRun, ratios: list[float]) -> bool:
    """Whether the loss does not fall, and that is due to the first steps, whose sizes are given, not to the batches."""
    before, largest = run.curve.before_bad, max(ratios)
    # Batches alone make single losses high; only steps that stay large, or weights that grow, are those of the rate.
    peaked = before.peak > abs(before.start) + max(0.5 * abs(before.start), 6 * before.noise) + 1e-9
    grown = largest > 0.05 and _weights_grew(run, run.steps)
    shaken = peaked or _restless(before) or median(ratios) > 0.1 or grown
    noisy = largest < 0.1 and before.fell_through_noise  # small steps, and the jumps are those of the batches
    falls_slowly = before.drop > 0.3 and before.count < _FEWEST  # a short run whose loss has fallen so far
    may_stay = largest < 0.1 and not _has_targets(run)
    return not (before.learned or noisy or falls_slowly or may_stay) and shaken and before.count >= 8


def _never_recovered(curve: LossCurve) -> bool:
    """Whether the loss was several times its first value, and much of what there was to learn is left."""
    return curve.peak > 4 * abs(curve.start) + 6 * curve.noise and curve.left >= 0.4


def _first_looks(run: RecordedRun) -> int:
    """The number of sampled steps in which the first updates grow to their full size: momentum takes some time."""
    momentum = (run.main.first_group.momentum or 0.0) if run.main is not None else 0.0
    full = 3.0 / (1.0 - momentum) if 0.0 < momentum < 1.0 else 0.0
    return max(8, sum(look.step <= full for look in run.sampled.steps))


def _has_targets(run: RecordedRun) -> bool:
    """Whether outputs are compared with targets. A loss over the hardest pairs of a batch need not fall."""
    return bool(run.sampled.training_losses() or run.sampled.calls.differences)


def _stepped_at(run: RecordedRun) -> str:
    """The line that made the optimizer; without one, the line that calls `backward`."""
    return run.main.site if run.main else next((root.site for root in run.sampled.backward_calls), "")


def _killed_units(run: RecordedRun) -> Claim | None:
    """Most units of a layer are dead and were not at the start: the steps have killed them, not the initial weights."""
    dead = dead_units(run)
    if dead is None or dead.evidence["share_at_start"] > 0.2 or dead.evidence["share"] < 0.6:
        return None
    return dead


def _driven_to_bounds(run: RecordedRun) -> Claim | None:
    """Most outputs of a sigmoid or tanh are at its bounds and were not at the start."""
    saturated = saturated_units(run)
    return saturated if saturated is not None and saturated.evidence["at_start"] < 0.2 else None


def _climbed(run: RecordedRun, early: float) -> bool:
    """Whether the loss, the gradient or the weights grew before the first value that is not finite.

    A NaN by itself says nothing about the learning rate. Where it comes so early that nothing can be seen to grow, an
    update that is larger than the weights has to do.
    """
    bad = run.nonfinite.first_step
    bad = run.steps if bad is None else bad
    before = run.curve.before_bad
    losses = [value for step, value in zip(before.steps, before.values, strict=True) if step <= bad]
    norms = [v for v in run.series.grad_norm[: bad + 1] if v is not None and math.isfinite(v)]
    if bad <= _AT_ONCE and early > 1.0:
        return True
    if losses and max(losses[-_LAST:]) > 2 * abs(before.start) + 2 * before.noise:
        return True
    if len(norms) > 2 and max(norms[-_LAST:]) > 10 * median(norms[: max(1, len(norms) - _LAST)]):
        return True
    return _weights_grew(run, bad)


def _weights_grew(run: RecordedRun, until: int) -> bool:
    """Whether the weights together became several times as large as at the first sampled step."""
    sizes: dict[int, float] = {}
    for step, row in run.sampled.weight_updates():
        size = row.weight
        if step <= until and size is not None and math.isfinite(size):
            sizes[step] = math.hypot(sizes.get(step, 0.0), size)
    return bool(sizes) and max(sizes.values()) > 5 * sizes[min(sizes)]


def _restless(curve: LossCurve) -> bool:
    """Whether the loss varies strongly around its level instead of settling."""
    half = curve.finite[curve.count // 2 :]
    if len(half) < 8:
        return False
    level = median(half)
    return curve.noise > 0.3 * abs(level) or max(half) > 3 * abs(level)


def too_low(run: RecordedRun) -> Claim | None:
    """Steady gradients, and steps too small to make progress."""
    if run.facts.preflight is not None:
        return _higher_learns(run.facts.preflight)
    curve = run.curve
    ratios = run.sampled.update_ratios()
    if run.adversarial or curve.count < 20 or run.nonfinite.seen or not ratios:
        return None
    if curve.rose or not run.grad_norms or median(run.grad_norms) == 0:
        return None
    typical = median(ratios)
    travelled = typical * curve.count
    is_stuck = (not curve.learned and typical <= 3e-4 and travelled <= 0.1) or travelled <= _UNMOVED
    is_slow = typical <= 1e-3 and travelled <= 0.5 and _falls_to_the_end(run)
    straight = straight_path(run)
    if typical <= 0 or not (is_stuck or is_slow or straight):
        return None
    rate = median(run.lr) if run.main and run.lr else None
    who = (
        "update by hand"
        if rate is None or not run.main
        else f"step of {run.main.type} at a learning rate of {rate:.2g}"
    )
    held_back = straight is not None and straight.is_held_back
    # Otherwise it may be the start of a long training.
    is_lost = held_back and curve.count >= _MANY_STEPS and curve.left >= _NEARLY_ALL
    is_stuck = is_stuck or (is_lost and not curve.learned)
    return Claim(
        0.85 if typical < 1e-5 or held_back else 0.7,
        f"One {who} changes the weights by {typical:.1e} of their norm, {travelled:.1e} over all {curve.count} steps; "
        f"gradients are steady (norm {median(run.grad_norms):.3g}) and the loss moved from {curve.start:.4g} to "
        f"{curve.end:.4g}{f'; {straight.words}' if straight is not None else ''}.",
        step=0,
        where=(_stepped_at(run),),
        evidence={"update_to_weight": typical, "lr": rate, "grad_norm": median(run.grad_norms),
                  "first": curve.start, "last": curve.end} | (straight._asdict() if straight is not None else {}),
        fixes=(f"Multiply the rate by 10 to 100{f': {rate * 10:.1g} to {rate * 100:.1g}' if rate else ''}.",),
        severity="error" if is_stuck else "warning" if is_lost else "info",
    )  # fmt: skip


def _falls_to_the_end(run: RecordedRun) -> bool:
    """Whether the second half of the steps, at an undiminished rate, brought about as much as the first half."""
    curve = run.curve
    losses = curve.finite
    if len(losses) < 40 or curve.blind or curve.around_zero or (run.lr and run.lr[-1] < 0.5 * max(run.lr)):
        return False
    middle = len(losses) // 2
    halfway = median(losses[middle - curve.window // 2 : middle + curve.window // 2 + 1])
    gained = halfway - curve.end
    return gained > 0.4 * (curve.start - curve.end) and gained > 2 * curve.noise / math.sqrt(curve.window)


def hardly_any_rate(run: RecordedRun) -> Claim | None:
    """A learning rate of 0, or almost 0, from the first step to the last."""
    held = run.main
    if held is None or run.facts.preflight is not None or not is_far_too_low(held):
        return None
    mine = [p for p in run.parameters.values() if held.number in p.optimizers and p.sampled and p.requires_grad]
    if not mine or any(p.changed for p in mine) or held.steps < 3 or run.facts.loss_scaler.skips:
        return None
    rate = max(run.lr)
    return Claim(
        0.95,
        f"The learning rate of {held.type} is {rate:g} throughout: it stepped {held.steps} times and none of its "
        f"{len(mine)} parameters changed. The loss stays at {run.curve.end:.4g}.",
        step=0,
        where=(held.site,),
        evidence={"update_to_weight": 0.0, "lr": rate, "steps": held.steps, "parameters": len(mine)},
        fixes=("Set a learning rate: 1e-3 is usual for Adam, 1e-2 for SGD.",),
    )


def no_warmup(run: RecordedRun) -> Claim | None:
    """A transformer that diverges in its first steps, at full learning rate."""
    if run.facts.preflight is not None:
        return _learns_gradually(run.facts.preflight)
    curve = run.curve
    if run.adversarial or not run.main or not run.lr or curve.count < 8:
        return None
    attention = any(len(n.shape) >= 3 for n in run.sampled.calls.softmaxes if n.op != "log_softmax") or any(
        "Attention" in part.type or "Transformer" in part.type for model in run.facts.models for part in model.modules
    )
    if not attention or run.lr[0] < 0.9 * max(run.lr):
        return None
    early = curve.finite[: max(10, min(60, curve.count // 3))]
    ratios = run.update_ratios()[:8]
    falls = _falls_from_the_start(curve, max(early))
    ended_early = curve.first_bad is not None and curve.first_bad < 100 and not falls
    jumped = max(early) > 1.3 * abs(curve.start) + 0.2 or ended_early
    if not ratios or max(ratios) < 0.03 or curve.learned or not (jumped or (max(ratios) > 0.1 and not falls)):
        return None
    if max(ratios) > 1:
        return None  # a step that is larger than the weights is too large at any time
    decays = run.lr[-1] < 0.5 * run.lr[0]
    if not decays and max(run.lr) > (2e-2 if run.main.type.startswith(ADAPTIVE) else 0.5):
        return None  # too high for later steps as well
    return Claim(
        0.8,
        f"A model with attention starts at its full learning rate of {run.lr[0]:.3g}: the first steps change the "
        f"weights by {max(ratios):.1%} of their norm each, the loss jumps from {curve.start:.3g} to {max(early):.3g} "
        f"within {len(early)} steps, and ends at {curve.end:.3g}.",
        step=early.index(max(early)),
        where=(run.main.site,),
        evidence={"lr": run.lr[:10], "update_to_weight": ratios, "peak": max(early), "last": curve.end},
        fixes=("Warm up the learning rate over the first few hundred steps (`surefoot.warmup_cosine`).",),
    )


def _falls_from_the_start(curve: LossCurve, early_peak: float) -> bool:
    """Whether the loss falls, perhaps slowly, and never rises first; single broken batches do not end that."""
    if early_peak > curve.start + max(0.02 * abs(curve.start), 2 * curve.noise):
        return False
    fall = curve.start - curve.end
    goes_on = curve.first_bad is None or (math.isfinite(curve.values[-1]) and curve.end < curve.before_bad.end)
    return goes_on and fall > max(0.03 * abs(curve.start), 5 * curve.noise / math.sqrt(curve.window))


# ── rates tried on copies ────────────────────────────────────────────────────────────────────────────────────────────

_FELL = 0.1
"""The fall, as a share of the first loss, from which a probe has learned."""


def fails_at_its_rate(preflight: PreflightFacts) -> bool:
    """Whether the loss does not fall at the learning rate itself, and does at a tenth of it or less."""
    own, low = preflight.rate(1.0), preflight.rate(0.1)
    if own is None or low is None:
        return False
    lowest = [probe for probe in preflight.rates if probe.factor < 0.1]
    diverges = own.fall == -math.inf and low.fall < _FELL and any(probe.fall > 0.02 for probe in lowest)
    return diverges or (own.fall < 0.02 and low.fall > _FELL)


def _lower_learns(preflight: PreflightFacts) -> Claim | None:
    own, low = preflight.rate(1.0), preflight.rate(0.1)
    if own is None or low is None:
        return None
    # A first update larger than the weights, and a loss that rises by several times its size.
    thrown = own.update_ratio > 1.0 and own.peak > own.start + 2.0 * abs(own.start) and low.fall > _FELL
    fails = fails_at_its_rate(preflight)
    if not (fails or thrown):
        return None
    lowest = [f"at {probe.factor:g} of it {_ends(probe)}" for probe in preflight.rates if probe.factor < 0.1]
    words = ", ".join([_tried(preflight), *lowest])
    return _rate_claim(f"{words}; on the way it jumps to {own.peak:.3g}.", own, "error" if fails else "warning")


def _higher_learns(preflight: PreflightFacts) -> Claim | None:
    own, high = preflight.rate(1.0), preflight.rate(10.0)
    if own is None or high is None or not 0.0 < own.update_ratio < 3e-5:  # 1e-3 is the usual size
        return None
    if own.fall >= 0.01 or high.fall <= max(3.0 * own.fall, 0.0):
        return None
    return _rate_claim(f"{_tried(preflight)}.", own, "warning")


def _learns_gradually(preflight: PreflightFacts) -> Claim | None:
    own, low, ramped = preflight.rate(1.0), preflight.rate(0.1), preflight.rate(1.0, gradually=True)
    if own is None or low is None or ramped is None or not fails_at_its_rate(preflight):
        return None
    if ramped.fall < max(low.fall, 0.3):
        return None
    return _rate_claim(f"{_tried(preflight)}; with the same rate reached gradually it learns.", own, "error")


def _rate_claim(words: str, own: RateProbe, severity: Severity) -> Claim:
    return Claim(0.85, words, step=0, evidence={"update_to_weight": own.update_ratio}, severity=severity)


def _tried(preflight: PreflightFacts) -> str:
    own, low, high = (preflight.rate(factor) for factor in (1.0, 0.1, 10.0))
    assert own is not None
    others = [
        f"at {words} {_ends(probe)}"
        for words, probe in (("a tenth of the rate", low), ("ten times the rate", high))
        if probe
    ]
    return (
        f"The loss goes {_ends(own)} in {own.steps} steps, {', '.join(others)}; the first update is "
        f"{own.update_ratio:.2g} of the weights"
    )


def _ends(probe: RateProbe) -> str:
    return f"from {probe.start:.3g} to {probe.end:.3g}"


RULES = (
    Rule("lr.too-high", "curve", too_high,
         explains=("model.dead-units", "model.saturated-units", "model.exploding-gradient", "data.class-collapse",
                   "model.attention-logit-growth", "loss.undefined-op")),
    Rule("lr.too-high", "dynamics", overshoots),
    Rule("lr.no-warmup", "dynamics", no_warmup,
         explains=("lr.too-high", "model.dead-units", "model.attention-logit-growth")),
    Rule("lr.too-low", "wiring", hardly_any_rate,
         explains=("model.*", "data.labels-uninformative", "data.class-collapse", "init.*", "optim.epsilon")),
    Rule("lr.too-low", "curve", too_low, explains=("data.labels-uninformative", "data.class-collapse")),
)  # fmt: skip
