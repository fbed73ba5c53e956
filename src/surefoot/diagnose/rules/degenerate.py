"""Batches without information: inputs that are all equal or all 0, and labels of one kind only.

For most steps, the size of their inputs and the counts of their labels are recorded; the spread of each feature is
known for the sampled steps. Batches with one label each are another problem: sorted data (`data_order`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import main_line, stream, where_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.watch.operation_names import BINARY_LOSSES, CLASS_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LossCall, ModelCall, StepBatch

_FEWEST_ROWS = 8
_LARGEST_SHARE = 0.25
"""If more batches than this are alike, the data is drawn that way."""
_UNLIKELY = 1e-9
_FEWEST_LABELS = 40
"""Fewer labels than these may be the same by chance, or because the task is tiny."""


def constant_inputs(run: RecordedRun) -> Claim | None:
    """Every row of every batch is the same, while the labels differ."""
    calls = [call for call in run.sampled.trained_model_calls if call.rows and len(call.rows) >= _FEWEST_ROWS]
    same = [call for call in calls if _is_constant(call)]
    losses = run.sampled.training_losses()
    differ = [loss for loss in losses if len(loss.labels or {}) > 1 or (loss.target_variance or 0.0) > 0]
    if len(same) < 3 or len(same) < 0.8 * len(calls) or len(differ) < 0.5 * len(losses) or not losses:
        return None
    if run.adversarial or len({row for call in same for row in call.rows or []}) > len(same):
        return None
    call, given = same[0], same[0].inputs[0]
    value = "0" if given.min == given.max == 0 else "the same in every row"
    return Claim(
        0.93,
        f"The input of `{call.model}`{at_place(call.site)} is {value} in {len(same)} of {len(calls)} sampled batches "
        f"of {given.shape[0]} rows, while their labels differ: the inputs do not distinguish the rows.",
        step=call.step,
        where=where_of(call.site, call.model),
        evidence={"batches": len(calls), "constant": len(same), "range": [given.min, given.max]},
        fixes=("Print one batch directly before the model, and find the step of the loading that loses its values.",),
    )


def _is_constant(call: ModelCall) -> bool:
    spread = call.features.std if call.features is not None else None
    return len(set(call.rows or [])) == 1 and spread is not None and max(spread, default=1.0) == 0.0


def constant_labels(run: RecordedRun) -> Claim | None:
    """Every label of every batch is the same, and a layer with an output per class is trained on it.

    Some contrastive losses have one label too (the partner is column 0): their scores are products, not outputs of a
    layer. If each row is compared with every row of the batch, the partner of each is another column.
    """
    losses = run.sampled.training_losses(*CLASS_LOSSES, *BINARY_LOSSES)
    if not all(loss.labels for loss in losses):
        return None
    held = [*(loss.labels for loss in losses), *(note.labels for note in stream(run))]
    labels = {f"{float(label):g}" for counts in held for label in counts or {}}
    count = sum(sum((loss.labels or {}).values()) for loss in losses)
    if run.adversarial or len(labels) != 1 or len({loss.step for loss in losses}) < 3:
        return None
    if count < _FEWEST_LABELS or not all(_is_of_layer(run, loss) or _compares_all(loss) for loss in losses):
        return None
    label, first = next(iter(labels)), losses[0]
    return Claim(
        0.9,
        f"All {count:,} labels of the {len(losses)} sampled batches{at_place(first.site)} are {label}: the loss falls "
        f"from {run.curve.start:.3g} to {run.curve.end:.3g} without regard to the inputs.",
        step=first.step,
        where=where_of(first.site),
        evidence={"label": label, "labels": count, "batches": len(losses)},
        fixes=("Print the labels of one batch directly before the loss, and find the step that makes them equal.",),
    )


def _compares_all(loss: LossCall) -> bool:
    """Whether the scores are a square: each row of a batch against each."""
    shape = loss.input.shape
    return len(shape) == 2 and shape[0] == shape[1] >= _FEWEST_ROWS and loss.valid == shape[0]


def _is_of_layer(run: RecordedRun, loss: LossCall) -> bool:
    """Whether a layer made the predictions of a loss, directly or through a softmax; a sigmoid counts as one."""
    calls, producer = run.sampled.calls, loss.producer
    softmaxes = {(call.step, call.index): call.producer for call in calls.softmaxes}
    if producer is not None and (loss.step, producer.index) in softmaxes:
        producer = softmaxes[loss.step, producer.index]
    made = {(layer.step, layer.index) for layer in calls.layers}
    return producer is not None and (producer.op == "sigmoid" or (loss.step, producer.index) in made)


def degenerate_batch(run: RecordedRun) -> Claim | None:
    """A few batches are all 0, or have one label, while the others are mixed."""
    notes = [note for note in main_line(run) if (note.size or 0) >= _FEWEST_ROWS]
    if run.adversarial or len(notes) < 20:
        return None
    zeroed = [note for note in notes if note.input_largest == 0.0]
    if 0 < len(zeroed) <= _LARGEST_SHARE * len(notes):
        return _claim(zeroed, len(notes), "The inputs of the batch are all 0", {"input_largest": 0.0})
    labels: Counter[str] = Counter()
    for note in notes:
        labels.update(note.labels or {})
    total = sum(labels.values())
    if len(labels) < 2:
        return None
    alike = [note for note in notes if note.labels and _is_unlikely(note.labels, labels, total)]
    if 0 < len(alike) <= 0.1 * len(notes):
        label = next(iter(alike[0].labels or {}))
        share = labels[label] / total
        share_of_all = f"{share:.0%}" if share >= 0.005 else "under 1%"
        count = sum((alike[0].labels or {}).values())
        words = f"All {count} labels of the batch are {label}, which {share_of_all} of all labels are,"
        return _claim(alike, len(notes), words, {"label": label, "share": share})
    return None


def _is_unlikely(batch: dict[str, int], labels: Counter[str], total: int) -> bool:
    """Whether rows drawn at random would hardly ever have one label only."""
    count = sum(batch.values())
    return len(batch) == 1 and (labels[next(iter(batch))] / total) ** count * total / count < _UNLIKELY


def _claim(found: list[StepBatch], of: int, words: str, evidence: dict[str, object]) -> Claim:
    first = found[0]
    more = (
        f" (also at {len(found) - 1} more of {of:,} steps)"
        if len(found) > 1
        else f" (not at the other {of - 1:,} steps)"
    )
    return Claim(
        0.85,
        f"{words} at step {first.step}{more}: a step of the data loading produced it.",
        step=first.step,
        evidence={"steps": [note.step for note in found[:20]], "batches": of, **evidence},
        severity="warning",
        fixes=(f"Draw the batch of step {first.step} again and print it before and after each transform.",),
    )


RULES: tuple[Rule, ...] = (
    Rule("data.degenerate-batch", "value", constant_inputs,
         explains=("model.dead-units", "lr.*", "data.class-collapse", "data.labels-uninformative", "optim.not-learning",
                   "data.repeated-batches", "data.unscaled-input", "data.split-mismatch", "model.vanishing-gradient",
                   "init.too-small")),
    Rule("data.degenerate-batch", "value", constant_labels,
         explains=("data.class-collapse", "data.labels-uninformative", "optim.not-learning", "model.dead-units",
                   "data.unshuffled", "lr.*")),
    Rule("data.degenerate-batch", "value", degenerate_batch, explains=("data.bad-batch",), dated=True),
)  # fmt: skip
