"""Targets that are among the inputs, and targets far larger than what the model can output."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import chance, where_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.data_labels import known_pairs
from surefoot.diagnose.rules.pace import ADAPTIVE, too_high
from surefoot.diagnose.straight_path import STRAIGHT, slope_kept
from surefoot.watch.operation_names import DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LossCall

_FEWEST_ROWS = 60
_UNEXPLAINED = 1e-6
"""The share of the variance of the targets that a feature which holds them may leave unexplained (rounding)."""
_RELATED = 4.0
"""From this many standard errors on, another feature is related to the targets, too."""
_LARGE = 30.0
"""Targets of this size, and as many times larger than the predictions, are out of reach for small updates."""
_FEWEST_LOSSES = 100
"""With fewer losses, the outputs of any model may still be on their way."""
_LATE = 0.125
"""The share of all progress beyond the best constant answer from which on the second half brought much of it."""


class _Holder(NamedTuple):
    """The feature that holds the targets, or those that hold them one-hot encoded."""

    features: list[int]
    rows: int
    related: int
    """The number of other features that are related to the targets."""


def target_in_inputs(run: RecordedRun) -> Claim | None:
    """One of several features determines the target exactly, or one for each class; others are related to it as well.

    In made-up data the target is often one of otherwise unrelated features; that is not a leak.
    """
    if run.facts.preflight is not None or run.adversarial or run.nonfinite.seen:
        return None
    losses = [call for call in run.sampled.training_losses() if call.target.shape]
    differences = [call for call in run.sampled.calls.differences if not call.grown]
    sites = {call.site for call in (losses or differences)}
    pairs = known_pairs(run)
    if len(sites) != 1 or len(pairs) < _FEWEST_ROWS or not _takes_table(run):
        return None
    held = _holder([row for row, _ in pairs], [target for _, target in pairs])
    if held is None:
        return None
    call = next(call for call in run.sampled.trained_model_calls if call.inputs)
    site = next(iter(sites))
    is_one = len(held.features) == 1
    columns = ", ".join(map(str, held.features))
    return Claim(
        0.85,
        f"Feature{'' if is_one else 's'} {columns} of the input of `{call.model}`{at_place(call.site)} "
        f"{'determines' if is_one else 'together determine'} the target of {site} exactly in all {held.rows} compared "
        f"rows, and {held.related} other features are only related to it: the target, or a column computed from it, "
        "is among the features.",
        step=0,
        where=where_of(call.site, site),
        evidence={"features": held.features, "rows": held.rows, "related_features": held.related},
        severity="warning",
        fixes=(
            f"Remove column{'' if is_one else 's'} {columns} from the input, and check which of the table "
            f"{'it is' if is_one else 'they are'}.",
        ),
    )


def _takes_table(run: RecordedRun) -> bool:
    """Whether the model takes rows of at least three numbers, few enough that all of them were recorded."""
    given = [call.inputs[0] for call in run.sampled.trained_model_calls if call.inputs]
    return bool(given) and all(
        len(each.shape) == 2 and 3 <= each.shape[1] <= 64 and "float" in each.dtype for each in given
    )


def _holder(rows: list[list[float]], targets: list[float]) -> _Holder | None:
    """The features that determine the targets, one or one for each class, if others are related to them."""
    import numpy as np

    x, y = np.array(rows), np.array(targets)
    kinds = np.unique(y)
    if len(kinds) < 2 or not np.isfinite(x).all() or not np.isfinite(y).all():
        return None
    is_class = len(kinds) <= len(y) / 10
    exact = [_names_class(x[:, i], y, kinds) if is_class else _is_linear(x[:, i], y) for i in range(x.shape[1])]
    if not any(exact) and is_class:
        exact = _one_hot(x, y, kinds)
    if sum(exact) not in (1, len(kinds) - 1, len(kinds)):
        return None
    spread = x.std(0)
    goals = [(y == kind).astype(float) for kind in kinds] if is_class else [y]
    size = math.sqrt(len(y))
    related = sum(
        not exact[i] and spread[i] > 0 and max(abs(_correlation(x[:, i], goal)) for goal in goals) * size > _RELATED
        for i in range(x.shape[1])
    )
    return _Holder([i for i, holds in enumerate(exact) if holds], len(y), related) if related else None


def _correlation(a: Any, b: Any) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def _is_linear(feature: Any, targets: Any) -> bool:
    """Whether the targets are a linear function of a feature."""
    return 1.0 - _correlation(feature, targets) ** 2 < _UNEXPLAINED


def _names_class(feature: Any, labels: Any, kinds: Any) -> bool:
    """Whether a feature has one value for each class, different from those of the others."""
    values = [set(feature[labels == kind].tolist()) for kind in kinds]
    return all(len(each) == 1 for each in values) and len(set.union(*values)) == len(kinds)


def _one_hot(x: Any, labels: Any, kinds: Any) -> list[bool]:
    """The features that have one value for a class and one other value for the rest, if all classes but one have one.

    Nothing if several features belong to one class: they would be copies of something else.
    """
    classes = [
        next((kind for kind in kinds if _names_class(x[:, i], labels == kind, [True, False])), None)
        for i in range(x.shape[1])
    ]
    found = [kind for kind in classes if kind is not None]
    if len(set(found)) < len(found) or len(found) < len(kinds) - 1:
        return [False] * len(classes)
    return [kind is not None for kind in classes]


def unscaled_target(run: RecordedRun) -> Claim | None:
    """Targets so large that the predictions, which start near 0, do not reach them, and the loss says so."""
    if run.adversarial or run.nonfinite.seen or run.curve.blind or run.facts.preflight is not None or run.steps < 30:
        return None
    calls = run.sampled.training_losses(*DISTANCE_LOSSES)
    late = [call for call in calls[len(calls) // 2 :] if not call.target_from_model]
    level = chance(run)
    if len({call.site for call in calls}) != 1 or len(late) < 2 or level is None:
        return None
    sizes, given = [_size(call, "target") for call in late], [_size(call, "input") for call in late]
    size, reached = median(sizes), median(given)
    outside = median((call.above or 0.0) + (call.below or 0.0) for call in late)
    first = calls[0]
    is_beyond = size >= _LARGE * reached and outside >= 0.9 and run.curve.end >= 0.9 * level.level
    is_far = size >= _LARGE * _size(first, "input") and run.curve.end > 0.1 * level.level
    if size < _LARGE or not (is_beyond or (is_far and (_is_on_its_way(run) or _is_thrown(run)))):
        return None
    return Claim(
        0.9 if is_beyond else 0.8,
        f"The targets of {first.op}{at_place(first.site)} have a typical size of {size:.3g}; after {late[-1].step:,} "
        f"steps the predictions are at {reached:.3g}, and {outside:.0%} of the targets are beyond all of them. The "
        f"loss is at {run.curve.end:.3g}, and that of the best constant answer is {level.level:.3g}.",
        step=first.step,
        where=where_of(first.site),
        evidence={"targets": size, "predictions": reached, "outside": outside, "best_constant_answer": level.level},
        severity="error" if is_beyond else "warning",
        fixes=(
            "Standardise the targets: subtract their mean over the training set and divide by their standard "
            "deviation; undo it for predictions.",
        ),
    )


def _is_on_its_way(run: RecordedRun) -> bool:
    """Whether the outputs still moved towards the targets in the second half, at the speed that the rate allows.

    What noise in the targets leaves of the loss does not fall any more.
    """
    curve = run.curve
    if curve.count < _FEWEST_LOSSES or (slope_kept(run) or 0.0) < STRAIGHT:
        return False
    around = curve.finite[curve.count // 2 - curve.window // 2 :][: curve.window]
    gained = min(curve.start, curve.chance or curve.start) - curve.end
    return median(around) - curve.end >= _LATE * gained


def _is_thrown(run: RecordedRun) -> bool:
    """Whether the first steps were too large, as the errors are that they are proportional to."""
    claim = too_high(run) if run.main is not None and not run.main.type.startswith(ADAPTIVE) else None
    return claim is not None and claim.severity != "info"


def _size(call: LossCall, side: str) -> float:
    held = call.target if side == "target" else call.input
    return math.hypot(held.mean or 0.0, held.std or 0.0)


RULES: tuple[Rule, ...] = (
    Rule("data.leakage", "value", target_in_inputs),
    Rule(
        "data.unscaled-target",
        "value",
        unscaled_target,
        explains=(
            "lr.*",
            "optim.*",
            "clip.saturated",
            "init.*",
            "data.unscaled-input",
            "model.dead-units",
            "model.saturated-units",
            "model.exploding-gradient",
        ),
    ),
)
