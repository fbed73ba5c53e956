"""Values about a run's data that several rules share: labels, batches, chance level, training and evaluation passes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

from surefoot.diagnose.curves import present
from surefoot.diagnose.sampled import are_too_few, squared_errors, variance_of
from surefoot.watch.operation_names import BINARY_LOSSES, CLASS_LOSSES, DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LoaderFacts, LossCall, StepBatch


def entropy(counts: dict[str, int] | Counter[str]) -> float:
    """The entropy of the distribution that the counts represent, in nats."""
    total = sum(counts.values())
    return -sum(c / total * math.log(c / total) for c in counts.values() if c) if total else 0.0


def class_count(loss: LossCall) -> int:
    """The number of classes of a classification loss."""
    return (loss.input.shape or [1])[1 if len(loss.input.shape) > 1 else 0]


def are_positions(loss: LossCall) -> bool:
    """Whether each label is the position of its row in the batch, as in a contrastive loss."""
    labels, count = loss.labels or {}, loss.valid or 0
    return count > 1 and len(labels) == count and loss.label_range == (0, count - 1)


def stream(run: RecordedRun) -> list[StepBatch]:
    """The data of each step, as far as it is known."""
    return run.facts.step_data.batches


def has_print(note: StepBatch) -> bool:
    """Whether a fingerprint of the batch was taken: on a device, only of the first ones."""
    return note.input_print is not None or note.target_print is not None


def main_line(run: RecordedRun) -> list[StepBatch]:
    """The records of the line of the script that called `backward` most often."""
    notes = stream(run)
    if not notes:
        return []
    line = Counter(note.line for note in notes).most_common(1)[0][0]
    return [note for note in notes if note.line == line]


def label_batches(run: RecordedRun) -> list[Counter[str]]:
    """The labels of each training batch, in order: from the loss itself, or else from the data loader.

    Labels that the loss ignores, such as -100 for padding, are left out.
    """
    ignored = {str(call.ignore_index) for call in run.sampled.training_losses(*CLASS_LOSSES)}

    def counted(labels: dict[str, int]) -> Counter[str]:
        return Counter({label: count for label, count in labels.items() if label not in ignored})

    own = [counted(note.labels) for note in main_line(run) if note.labels]
    if len(own) >= 10:
        return own
    loader = training_loader(run)
    if loader is None:
        return own
    notes = [b for b in run.facts.batches if b.loader == loader.number and b.grad_mode]
    drawn = [counted(note.labels) for note in notes if note.labels]
    return drawn if len(drawn) > len(own) else own


def training_loader(run: RecordedRun) -> LoaderFacts | None:
    """The data loader that most batches were drawn from with gradients on."""
    drawn = Counter(batch.loader for batch in run.facts.batches if batch.grad_mode)
    if not drawn:
        return None
    number_of = drawn.most_common(1)[0][0]
    return next((loader for loader in run.facts.loaders if loader.number == number_of), None)


@dataclass(frozen=True)
class Chance:
    """The loss of a model that ignores its input."""

    level: float
    """In the units of the loss."""
    kind: str
    """`classes`, `binary` or `variance` (of a loss that is a distance)."""
    site: str


def chance(run: RecordedRun) -> Chance | None:
    """The loss of the best constant prediction, when the run trains on one plain loss function."""
    notes = run.main_sampled.training_losses(*CLASS_LOSSES, *BINARY_LOSSES, *DISTANCE_LOSSES)
    notes = [n for n in notes if n.reduction == "mean" and n.value is not None]
    if not notes and not run.main_sampled.training_losses() and (errors := squared_errors(run.main_sampled.steps)):
        level = variance_of(errors)
        return Chance(level, "variance", errors[0].site) if level is not None else None
    if not notes or len({(n.op, n.site) for n in notes}) != 1:
        return None
    first = notes[0]
    if not all(_is_minimised_alone(run, note) for note in notes):
        return None
    if first.op == "mse_loss":
        return _variance_chance(notes)
    if first.op in DISTANCE_LOSSES:
        levels = present(n.constant_loss for n in notes)
        return Chance(mean(levels), "variance", first.site) if len(levels) >= 3 and mean(levels) > 0 else None
    counts: Counter[str] = Counter()
    for labels in label_batches(run) or [Counter(n.labels) for n in notes if n.labels]:
        counts.update(labels)
    if len(counts) < 2 or are_too_few(counts):
        return None
    return Chance(entropy(counts), "classes" if first.op in CLASS_LOSSES else "binary", first.site)


def _is_minimised_alone(run: RecordedRun, note: LossCall) -> bool:
    """Whether a loss is all that `backward` was called on; of a microbatch, divided by their number."""
    look = next((look for look in run.sampled.steps if look.step == note.step), None)
    roots = look.backward_calls if look is not None else []
    own = [root for root in roots if root.sign is not None and root.sign.index == note.index and root.factor]
    if own and run.sampled.adds_up_to_the_loss:
        total = None if own[0].value is None else own[0].value / (own[0].factor or 1.0)
    else:
        total = roots[0].value if roots else None
    return total is None or note.value is None or abs(total - note.value) <= 0.05 * abs(total) + 1e-6


def _variance_chance(notes: list[LossCall]) -> Chance | None:
    means = present(n.target.mean for n in notes)
    spreads = present(n.target.std for n in notes)
    if len(means) < 3:
        return None
    between = sum((m - mean(means)) ** 2 for m in means) / len(means)
    level = mean([s * s for s in spreads]) + between
    return Chance(level, "variance", notes[0].site) if level > 0 else None


def at_chance(run: RecordedRun, slack: float = 0.9) -> Chance | None:
    """The chance level, if the loss ended at or near it, or above."""
    found = chance(run)
    if found is None or not run.curve.finite or run.curve.end < slack * found.level:
        return None
    return found


def weights_moved(run: RecordedRun) -> float:
    """The approximate distance that the weights moved, in units of their size: update ratio times steps."""
    ratios = run.update_ratios()
    return median(ratios) * run.steps if ratios else 0.0


_MANY_STEPS = 20
"""From this length on, a recurrent network may need thousands of steps before its loss begins to fall."""


def reads_long_sequences(run: RecordedRun) -> bool:
    """Whether a recurrent layer reads long sequences that have one target each.

    Such a network can stay at the loss of the best constant answer for long and still learn: a target that depends on
    a few elements far apart (the adding problem) is found late. Comparing whole rows does not show such a dependence.
    """
    layers = [layer for layer in run.sampled.calls.layers if layer.time_steps and layer.trained_on]
    sequences = {layer.sequences for layer in layers}
    losses = run.sampled.training_losses()
    has_one_each = bool(losses) and all(math.prod(loss.target.shape) in sequences for loss in losses)
    return has_one_each and median(layer.time_steps or 0 for layer in layers) >= _MANY_STEPS


def where_of(*places: str | None) -> tuple[str, ...]:
    """The known places."""
    return tuple(place for place in places if place)
