"""Predictions that an operation keeps within bounds which the targets exceed."""

from __future__ import annotations

import math
from statistics import mean, median
from typing import TYPE_CHECKING, Literal

from surefoot.core.wording import at_place
from surefoot.diagnose.curves import present
from surefoot.diagnose.data_summary import are_positions
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.losses import by_site, source_of
from surefoot.record.facts import LossCall
from surefoot.watch.operation_names import DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import DifferenceCall, OutputRange

BOUNDS: dict[str, tuple[float, float]] = {
    "sigmoid": (0, 1), "sigmoid_": (0, 1), "tanh": (-1, 1), "tanh_": (-1, 1), "softmax": (0, 1),
    "hardtanh": (-1, 1), "relu": (0, math.inf), "relu_": (0, math.inf), "relu6": (0, 6),
    "softplus": (0, math.inf), "hardsigmoid": (0, 1), "clamp_min": (0, math.inf), "log_softmax": (-math.inf, 0),
    "logsigmoid": (-math.inf, 0), "exp": (0, math.inf),
}  # fmt: skip
"""The bounds of an operation's results."""


def bounded_output(run: RecordedRun) -> Claim | None:
    """Targets are outside the range of the last operation."""
    if run.facts.preflight is not None and run.facts.preflight.output_range is not None:
        return _out_of_range(run.facts.preflight.output_range)
    notes: list[LossCall | DifferenceCall] = [*run.sampled.training_losses(*DISTANCE_LOSSES)]
    notes += [n for n in run.sampled.calls.differences if not n.grown]
    for site, group in by_site(notes).items():
        first = group[0]
        op = first.producer.op if first.producer is not None else ""
        if op not in BOUNDS or first.target.min is None or _learned_target(first):
            continue
        low, high = BOUNDS[op]
        goals = (min(present(n.target.min for n in group)), max(present(n.target.max for n in group)))
        room = 0.05 * max(1e-9, goals[1] - goals[0])
        over = goals[1] > high + room or goals[0] < low - room
        share = median(max(n.above or 0.0, n.below or 0.0) for n in group)
        if over and share > 0.02 and len(group) >= min(3, run.steps):
            return Claim(
                0.95,
                f"The prediction{at_place(site)} comes out of {op} and stays within [{low:g}, {high:g}], but targets "
                f"go from {goals[0]:.3g} to {goals[1]:.3g}; {share:.0%} of them are out of its range. The loss is at "
                f"{run.curve.end:.3g}.",
                step=first.step,
                where=(site, source_of(first)),
                evidence={"operation": op, "bounds": [low, high], "targets": list(goals), "out_of_reach": share},
                fixes=(f"Remove the {op}{at_place(source_of(first))}, or scale the targets into [{low:g}, {high:g}].",),
            )
    return _rectified_scores(run) or _bounded_scores(run)


_RECTIFIERS = {op for op, bounds in BOUNDS.items() if bounds[0] == 0 and bounds[1] != 1} | {"clamp", "clamp_", "abs"}
"""Operations after which no score is below 0."""


def _rectified_scores(run: RecordedRun) -> Claim | None:
    """Scores that cannot be below 0, as after a ReLU on the last layer, in a run to which that does harm.

    A score of 0 gets no gradient through the ReLU: a class whose score is 0 for every row is never predicted again.
    """
    for site, notes in by_site(run.sampled.training_losses("cross_entropy", _BINARY)).items():
        op = notes[0].producer.op if notes[0].producer is not None else ""
        if op not in _RECTIFIERS or len(notes) < 3 or any((n.input.min or 0.0) < 0 for n in notes):
            continue
        negative, never = 0.0, list[str]()
        if notes[0].op == _BINARY:
            negative = 1 - median(n.target.mean or 0.0 for n in notes)
            harm = f"no probability can be below 0.5, and {negative:.0%} of the targets are 0"
        else:
            never = _never_predicted(notes[-max(3, len(notes) // 3) :])
            named = f", and classes are never predicted: {', '.join(never[:5])}" if never else ""
            harm = f"a score of 0 gets no gradient{named}"
        if negative < 0.01 and not never and (run.curve.learned or notes[0].op == _BINARY):
            continue
        return Claim(
            0.9,
            f"The scores that {notes[0].op} is given{at_place(site)} come out of {op}{at_place(source_of(notes[0]))}, "
            f"and none is below 0: {harm}. The loss is at {run.curve.end:.4g}, and began at {run.curve.start:.4g}.",
            step=notes[0].step,
            where=(site, source_of(notes[0])),
            evidence={"operation": op, "bounds": [0.0, None], "never_predicted": never, "loss": run.curve.end},
            fixes=(f"Remove the {op}{at_place(source_of(notes[0]))}: the scores of the last layer need both signs.",),
        )
    return None


_BINARY = "binary_cross_entropy_with_logits"


def _never_predicted(losses: list[LossCall]) -> list[str]:
    """Classes that are among the labels of several calls and among the predictions of none."""
    common = {label for label, count in _sums(losses, "labels").items() if count >= _OFTEN}
    return sorted(common - _sums(losses, "predicted").keys(), key=int)


_OFTEN = 10
"""Labels of a class from which on it should have been predicted once."""


def _sums(losses: list[LossCall], column: Literal["labels", "predicted"]) -> dict[str, int]:
    found: dict[str, int] = {}
    for loss in losses:
        for label, count in (getattr(loss, column) or {}).items():
            found[label] = found.get(label, 0) + count
    return found


_LIMITED = {op: bounds for op, bounds in BOUNDS.items() if math.isfinite(sum(bounds)) and op != "softmax"}


def _bounded_scores(run: RecordedRun) -> Claim | None:
    """The scores that cross-entropy is given have bounds, so the probability of a class cannot approach 1.

    The operation that made them shows it; so do scores that come close to 1 and never exceed it while most of the
    predictions are right, like cosine similarities without a temperature.
    """
    for site, notes in by_site(run.sampled.training_losses("cross_entropy")).items():
        seen = [n for n in notes if n.distribution is not None and n.distribution.classes > 1]
        op = notes[0].producer.op if notes[0].producer is not None else ""
        if len(seen) < 3 or any(n.weighted for n in seen):
            continue
        low, high = _LIMITED.get(op) or (-1.0, 1.0)
        late = [n for n in seen[-3:] if n.distribution is not None]
        close = all(max(-n.distribution.min, n.distribution.max) > 0.9 for n in late if n.distribution is not None)
        right = median(n.accuracy or 0.0 for n in late) > 0.5
        inside = all(n.distribution.min >= low and n.distribution.max <= high + 1e-3 for n in seen if n.distribution)
        classes = min(n.distribution.classes for n in seen if n.distribution is not None)
        floor = math.log(1 + (classes - 1) * math.exp(low - high))
        stays = run.curve.end > max(0.9 * floor, 0.3 * math.log(classes))
        if not (inside and stays) or not (op in _LIMITED or (close and right)):
            continue
        made = f"come out of {op} and " if op in _LIMITED else ""
        return Claim(
            0.9 if op in _LIMITED else 0.8,
            f"The scores that cross_entropy is given{at_place(site)} {made}stay within [{low:g}, {high:g}] at all "
            f"{len(seen)} sampled calls: with {classes} classes the loss cannot fall below {floor:.3g}. It is at "
            f"{run.curve.end:.3g}; {median(n.accuracy or 0.0 for n in late):.0%} of the predictions are right.",
            step=seen[0].step,
            where=(site, source_of(seen[0])),
            evidence={"operation": op, "bounds": [low, high], "classes": classes, "floor": floor},
            severity="info" if op not in _LIMITED and _are_right(seen) else "error",
            fixes=(
                f"Remove the {op}{at_place(source_of(seen[0]))}."
                if op in _LIMITED
                else "Divide the similarities by a temperature, for example 0.07, before cross_entropy.",
            ),
        )
    return _tiny_scores(run)


def _are_right(losses: list[LossCall]) -> bool:
    """Whether nearly every prediction of the last third of the sampled calls is right: the bounds did no harm."""
    late = losses[-max(3, len(losses) // 3) :]
    return mean(loss.accuracy or 0.0 for loss in late) > 0.9


def _tiny_scores(run: RecordedRun) -> Claim | None:
    """A contrastive loss over similarities that were divided by a large number: they use all of their tiny range."""
    for site, notes in by_site(run.sampled.training_losses("cross_entropy")).items():
        ranges = [(n.distribution.min, n.distribution.max) for n in notes if n.distribution and are_positions(n)]
        bound = max((max(-low, high) for low, high in ranges), default=math.inf)
        if len(ranges) < max(4, len(notes)) or not 0.0 < bound < 0.2:
            continue
        low, high = (median(ends) for ends in zip(*ranges[-3:], strict=True))
        classes = min(n.distribution.classes for n in notes if n.distribution)
        floor = math.log(1 + (classes - 1) * math.exp(-2 * bound))
        if low > -0.5 * bound or high < 0.8 * bound or run.curve.end < 0.95 * floor:
            continue
        return Claim(
            0.8,
            f"The similarities that cross_entropy is given{at_place(site)} use all of their range, from {low:.2g} to "
            f"{high:.2g}, and never exceed {bound:.2g}: with {classes} rows the loss cannot fall below {floor:.4g}. It "
            f"is at {run.curve.end:.4g}.",
            step=notes[0].step,
            where=(site, source_of(notes[0])),
            evidence={"bound": bound, "classes": classes, "floor": floor},
            fixes=("Divide the similarities by a temperature below 1, for example 0.07, before cross_entropy.",),
        )
    return None


def _out_of_range(seen: OutputRange) -> Claim | None:
    """What no weights can reach: bounds that look like those of an activation, and what is asked of the output."""
    low, high = seen.low, seen.high
    if high - low < 0.5:  # no bounds: the output hardly depends on these weights
        return None
    if seen.loss == "cross_entropy":
        unit, centred = low >= 0.0 and high <= 1.0, low >= -1.0 and high <= 1.0 and high - low > 1.5
        words = "so the probability of a class cannot approach 1"
        share = 1.0 if unit or centred else 0.0
    else:
        bounded_below = abs(low + 1.0) < 1e-2 or 0.0 <= low < 1e-2
        share = seen.below * bounded_below + seen.above * (abs(high - 1.0) < 1e-2)
        words = (
            f"and {share:.0%} of the targets ({seen.target_low:.3g} to {seen.target_high:.3g}) are outside this range"
        )
    if share <= 0.01:
        return None
    return Claim(
        0.9,
        f"The input of {seen.loss} stays within {low:.3g} to {high:.3g} for any weights, {words}.",
        step=0,
        evidence={"out_of_reach": share, "bounds": [low, high]},
    )


def _learned_target(note: LossCall | DifferenceCall) -> bool:
    """Whether the target was computed by a model: a codebook, a teacher, a bootstrapped value."""
    if isinstance(note, LossCall):
        return note.target_from_model
    return bool(set(note.target_history) & {"linear", "conv2d", "embedding", "matmul", "index_select"})


RULES: tuple[Rule, ...] = (
    Rule("loss.bounded-output", "wiring", bounded_output,
         explains=("lr.*", "model.*", "init.*", "data.unscaled-input", "data.unscaled-target",
                   "data.labels-uninformative")),
)  # fmt: skip
