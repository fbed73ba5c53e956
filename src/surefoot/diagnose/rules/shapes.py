"""Predictions and targets whose shapes differ, so that every row is compared with every other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.losses import source_of
from surefoot.watch.operation_names import DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import DifferenceCall, LossCall


def broadcast(run: RecordedRun) -> Claim | None:
    """Prediction and target have different shapes, which broadcast."""
    found: list[LossCall | DifferenceCall] = [
        n for n in run.sampled.training_losses(*DISTANCE_LOSSES) if not n.same_shape
    ]
    found += [n for n in run.sampled.calls.differences if n.grown and _same_but_for_ones(n.input.shape, n.target.shape)]
    for note in found:
        given, target = note.input.shape, note.target.shape
        out = _broadcast_shape(given, target)
        if note.op != "sub" and (square := _made_square(run, note)) is not None:
            return square
        if out is None or math.prod(out) <= max(math.prod(given), math.prod(target)):
            if note.op != "sub" and (uneven := _one_for_several(run, note)) is not None:
                return uneven
            continue
        if not _same_but_for_ones(given, target) and note.op == "sub":
            continue
        return Claim(
            0.97,
            f"{_meeting(note)}: they broadcast to {tuple(out)}, so every prediction is compared with every target, and "
            f"the best constant is the target's mean. The loss is at {run.curve.end:.3g}.",
            step=note.step,
            where=(note.site, source_of(note)),
            evidence={"prediction": given, "target": target, "broadcast": out, "loss": run.curve.end},
            fixes=(
                f"Give both the same shape: `.squeeze(-1)` on {tuple(given)} or `.unsqueeze(-1)` on {tuple(target)}.",
            ),
        )
    return None


def _made_square(run: RecordedRun, note: LossCall | DifferenceCall) -> Claim | None:
    """One side has one value per row, and the other is a square: it was broadcast while it was computed.

    As in `reward + discount * values` with a reward of shape (N, 1) and values of shape (N,).
    """
    given, target = note.input.shape, note.target.shape
    side = "target" if math.prod(given) < math.prod(target) else "prediction"
    small, large = (given, target) if side == "target" else (target, given)
    rows = math.prod(small)
    if rows < 2 or large != [rows, rows] or small not in ([rows, 1], [rows]):
        return None
    return Claim(
        0.95,
        f"{_meeting(note)}: the {side} has {rows} values for each of the {rows} rows, because shapes ({rows}, 1) and "
        f"({rows},) were broadcast when it was computed. Every row is compared with all of them. The loss is at "
        f"{run.curve.end:.3g}.",
        step=note.step,
        where=(note.site, source_of(note)),
        evidence={"prediction": given, "target": target, "loss": run.curve.end},
        fixes=(f"Give all operands of the {side} the same shape: `.unsqueeze(1)` on the one of shape ({rows},).",),
    )


def _one_for_several(run: RecordedRun, note: LossCall | DifferenceCall) -> Claim | None:
    """A loss function is given one prediction for several targets, or a class number as the target of every output.

    Several predictions of one target may be meant, as by an ensemble.
    """
    given, target = note.input.shape, note.target.shape
    uneven = [(a, b) for a, b in zip(given, target, strict=False) if a != b]
    if len(given) != len(target) or not uneven or given[0] != target[0] or given[0] < 2:
        return None
    if all(a == 1 for a, _ in uneven):
        fact = f"each prediction is compared with {math.prod(target) // math.prod(given)} targets, and can only be near"
        fact, fix = f"{fact} their mean", "Give the model one output for each target."
    elif all(b == 1 for _, b in uneven) and _are_class_numbers(run, note, math.prod(given) // math.prod(target)):
        fact = "the targets are numbers of classes, and every output is fitted to the number"
        fix = "Use `cross_entropy(outputs, labels)` with the labels as integers of shape (N,)."
    else:
        return None
    return Claim(
        0.93,
        f"{_meeting(note)}: {fact}. The loss is at {run.curve.end:.3g}.",
        step=note.step,
        where=(note.site, source_of(note)),
        evidence={"prediction": given, "target": target, "loss": run.curve.end},
        fixes=(fix,),
    )


def _are_class_numbers(run: RecordedRun, note: LossCall | DifferenceCall, outputs: int) -> bool:
    """Whether the targets at a place range from exactly 0 to the number of outputs less one."""
    targets = [call.target for call in run.sampled.training_losses(*DISTANCE_LOSSES) if call.site == note.site]
    ends = {(each.min, each.max) for each in targets}
    return outputs > 2 and len(targets) > 2 and ends == {(0.0, outputs - 1.0)}


def _meeting(note: LossCall | DifferenceCall) -> str:
    """Which shapes are compared, and where."""
    return (
        f"A prediction of shape {tuple(note.input.shape)} meets a target of shape {tuple(note.target.shape)}"
        f"{at_place(note.site)}"
    )


def _same_but_for_ones(a: list[int], b: list[int]) -> bool:
    return [n for n in a if n != 1] == [n for n in b if n != 1] and len(a) != len(b)


def _broadcast_shape(a: list[int], b: list[int]) -> list[int] | None:
    size = max(len(a), len(b))
    left, right = [1] * (size - len(a)) + a, [1] * (size - len(b)) + b
    out = []
    for i, j in zip(left, right, strict=True):
        if i != j and 1 not in (i, j):
            return None
        out.append(max(i, j))
    return out


RULES = (
    Rule("loss.broadcast", "wiring", broadcast,
         explains=("lr.*", "model.*", "data.labels-uninformative", "loss.bounded-output", "init.*")),
)  # fmt: skip
