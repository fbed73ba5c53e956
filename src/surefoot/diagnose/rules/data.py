"""Inputs and labels: non-finite values, labels and ids that do not fit, scales, and labels without information."""

from __future__ import annotations

import math
import re
from statistics import mean
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import (
    at_chance,
    chance,
    class_count,
    stream,
    where_of,
)
from surefoot.diagnose.nonfinite import details
from surefoot.diagnose.rule import Claim, Rule
from surefoot.record.facts import CrashArguments
from surefoot.watch.operation_names import BINARY_LOSSES, CLASS_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import CrashFacts, NonFiniteLoss, TensorSummary

_CONSEQUENCES = (
    "loss.undefined-op", "lr.too-high", "lr.no-warmup", "init.too-large", "model.exploding-gradient",
    "precision.fp16-overflow", "optim.no-update", "data.unscaled-input", "data.class-collapse", "data.bad-batch",
    "loss.sum-reduction",
)  # fmt: skip


# ── values that are not finite ───────────────────────────────────────────────────────────────────────────────────────


def nonfinite_input(run: RecordedRun) -> Claim | None:
    """The first tensor that is not finite came from outside the graph."""
    bad = run.nonfinite.loss
    if bad is not None and bad.kind == "data" and not _half_infinite(bad):
        if bad.argument is not None:
            return None if _overflowed(run) else _claim_argument(bad)
        inferred = bad.tensor == "the other operand"
        late = not bad.nan and bad.step != 0  # an infinity may be an overflow once weights have moved
        return None if inferred and (late or _overflowed(run)) else _claim_autopsy(bad)
    first_bad = run.curve.first_bad
    if bad is None and first_bad is None and not run.nonfinite.in_crash:
        return None
    if bad is not None and (bad.kind == "parameter" or bad.without_graph or bad.from_model):
        return None
    step = bad.step if bad is not None else run.steps if first_bad is None else first_bad
    if bad is not None and _half_infinite(bad):  # the graph holds a cast copy: only the batch itself is evidence
        return _seen_in_pass(run, step)
    return _seen_in_pass(run, step) or _seen_in_stream(run, step)


def _overflowed(run: RecordedRun) -> bool:
    """Whether the loss had diverged before: then an overflow, not the data, made the first NaN."""
    late = [abs(value) for value in run.curve.finite[-6:]]
    return bool(late) and max(late) > 1e3 * max(1.0, abs(run.curve.start))


def _half_infinite(bad: NonFiniteLoss) -> bool:
    return bad.dtype == "float16" and not bad.nan and not (bad.largest is not None and math.isnan(bad.largest))


_SHOWN = frozenset({"nan", "inf", "shape", "rows", "bad_rows", "op", "tensor", "value"})


def _claim_argument(bad: NonFiniteLoss) -> Claim:
    """A compiled model got a non-finite input. Earlier operations, and those inside, were not observed."""
    held = _counted(bad) if bad.nan or bad.inf else "NaN" if math.isnan(bad.largest or 0.0) else "Inf"
    place = at_place(bad.site)
    shape = tuple(bad.shape or ())
    return Claim(
        0.92,
        f"The argument `{bad.argument}` of shape {shape} that the compiled `{bad.call}` is given{place} at step "
        f"{bad.step or 0} already contains {held}, and the loss of that step is the first that is not finite: they "
        "came with the data; the compiled code did not produce them.",
        step=bad.step,
        where=where_of(bad.site),
        evidence={key: value for key, value in details(bad).items() if key in _SHOWN | {"argument", "largest"}},
    )


def _counted(bad: NonFiniteLoss) -> str:
    """The number of non-finite values, and their rows."""
    nan, inf, rows, shape = bad.nan or 0, bad.inf or 0, bad.rows or [], tuple(bad.shape or ())
    count = f"{nan} NaN" if not inf else f"{inf} Inf" if not nan else f"{nan} NaN and {inf} Inf"
    if not rows or not shape:
        return count
    return f"{count} in {len(rows) if bad.bad_rows is None else bad.bad_rows} of {shape[0]} rows (first: row {rows[0]})"


def _claim_autopsy(bad: NonFiniteLoss) -> Claim:
    tensor = {"target": "The target", "the other operand": "A data tensor"}.get(bad.tensor or "", "The input")
    shape = tuple(bad.shape or ())
    place = at_place(bad.site)
    passed = bad.passed or []
    they, them = ("it", "it") if (bad.nan or 0) + (bad.inf or 0) == 1 else ("they", "them")
    end = f": {they} came with the data; no operation of the step produced {them}."
    if passed:  # whether it was finite before is not known
        end = f". It is not known whether {they} came with the data; operations in between: {', '.join(passed[:3])}."
    return Claim(
        0.6 if passed else 0.97,
        f"{tensor} of shape {shape} that reaches `{bad.call or bad.op}`{place} at step "
        f"{bad.step or 0} already contains {_counted(bad)}{end}",
        step=bad.step,
        where=where_of(bad.site, bad.module),
        evidence={key: value for key, value in details(bad).items() if key in _SHOWN},
    )


def _seen_in_pass(run: RecordedRun, step: int | None) -> Claim | None:
    for call in run.sampled.model_calls:
        if step is not None and call.step > step:
            break
        for position, given in enumerate(call.inputs):
            if given.nonfinite and call.step == step and not _is_mask(given):
                return Claim(
                    0.93,
                    f"Input {position} of `{call.model}` holds {given.nonfinite} values that are not finite at "
                    f"step {call.step} ({call.site}), before any layer has run.",
                    step=call.step,
                    where=where_of(call.site, call.model),
                    evidence={"nonfinite": given.nonfinite, "shape": given.shape, "step": call.step},
                )
    for note in run.sampled.training_losses():
        if note.target.nonfinite and note.step == step:
            return Claim(
                0.93,
                f"The target of `{note.op}` holds {note.target.nonfinite} values that are not finite at step "
                f"{note.step} ({note.site}).",
                step=note.step,
                where=where_of(note.site),
                evidence={"nonfinite": note.target.nonfinite, "shape": note.target.shape},
            )
    return None


def _is_mask(given: TensorSummary) -> bool:
    """A float mask: nothing finite in it but zeros."""
    return given.min == given.max == 0.0 or given.min is None


def _seen_in_stream(run: RecordedRun, step: int | None) -> Claim | None:
    for note in stream(run):
        sizes = (("x_largest", "input", note.input_largest), ("y_largest", "target", note.target_largest))
        for key, name, value in sizes:
            if value is not None and not math.isfinite(value) and note.step == step:
                return Claim(
                    0.9,
                    f"The {name} of the batch at step {note.step} contains a value of {value}, and the loss of the "
                    "same step is the first that is not finite.",
                    step=note.step,
                    evidence={key: str(value), "step": note.step},
                )
    return None


# ── labels and ids that do not fit ───────────────────────────────────────────────────────────────────────────────────

_BOUNDS = re.compile(r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)")


def label_crash(run: RecordedRun) -> Claim | None:
    """Labels without a corresponding output."""
    return _label_crash(run.facts.crash) if run.facts.crash is not None else None


def _label_crash(crash: CrashFacts) -> Claim | None:
    given = crash.arguments or CrashArguments()
    logits, target = given.input, given.target
    if crash.call in (*CLASS_LOSSES, "nll_loss_nd") and logits and target and target.min is not None:
        classes = logits.shape[1] if len(logits.shape) > 1 else logits.shape[0]
        ignored = -100 if given.ignore_index is None else given.ignore_index
        stated = re.search(r"Target (-?\d+) is out of bounds", crash.message)
        if "float" in target.dtype:
            return None
        low, high = int(target.min), int(target.max or 0)
        if not (stated or (low < 0 and low != ignored) or high >= classes):
            return None
        return _label_claim(crash.site or "", classes, low, high, ignored)
    if crash.call == "binary_cross_entropy" and target and _beyond_unit(target):
        return _binary_claim(crash.site or "", "binary_cross_entropy", target, None)
    if "Class values must be" in crash.message:
        label = given.input or given.tensor
        return Claim(
            0.9,
            f"`one_hot`{at_place(crash.site)} got a label outside its classes"
            + (
                f": labels run from {label.min} to {label.max}."
                if label and label.min is not None
                else f": {crash.message}"
            ),
            where=where_of(crash.site),
            evidence={"message": crash.message[:300]},
        )
    return _indexed_crash(crash)


def _label_claim(site: str, classes: int, low: int, high: int, ignored: int) -> Claim:
    outside = high if high >= classes else low
    fixes = []
    if low == 1 and high == classes:
        fixes.append("The labels count from 1: subtract 1 from them.")
    elif outside in (255, -1):
        fixes.append(f"{outside} usually means unlabelled: pass `ignore_index={outside}` to the loss.")
    return Claim(
        0.97,
        f"Labels run from {low} to {high}{at_place(site)}, but the model has {classes} outputs (labels 0 to "
        f"{classes - 1}) and the ignore index is {ignored}.",
        where=where_of(site),
        evidence={"classes": classes, "lowest": low, "highest": high, "ignore_index": ignored},
        fixes=tuple(fixes),
    )


def _indexed_crash(crash: CrashFacts) -> Claim | None:
    """A loss written by hand that picks the output of each label."""
    stated = _BOUNDS.search(crash.message)
    if stated is None or crash.call == "embedding":
        return None
    index, size = int(stated[1]), int(stated[3])
    held = crash.locals or {}
    outputs = [n for n, d in held.items() if d.requires_grad and size in d.shape[1:]]
    labels = [n for n, d in held.items() if "int" in d.dtype and not _is_within(d, -size, size)]
    if not outputs or not labels:
        return None
    return Claim(
        0.9,
        f"`{labels[0]}` contains the label {index}{at_place(crash.site)}, but `{outputs[0]}` has {size} columns "
        f"(labels 0 to {size - 1}).",
        where=where_of(crash.site, labels[0]),
        evidence={"label": index, "classes": size, "labels": labels[0], "outputs": outputs[0]},
    )


def _is_within(tensor: TensorSummary, low: int, size: int) -> bool:
    """Whether all values are valid indices for this size; values that could not be read count as valid."""
    return tensor.min is None or tensor.max is None or low <= tensor.min <= tensor.max < size


def _beyond_unit(target: TensorSummary) -> bool:
    low, high = target.min, target.max
    return low is not None and high is not None and (low < -1e-3 or high > 1 + 1e-3)


def label_beyond(run: RecordedRun) -> Claim | None:
    """A binary loss whose targets are not probabilities, or labels beyond the outputs in a batch that did not run."""
    for note in run.sampled.training_losses(*CLASS_LOSSES):
        low, high = note.label_range or (0, 0)
        if note.valid and not 0 <= low <= high < class_count(note):
            ignored = -100 if note.ignore_index is None else note.ignore_index
            return _label_claim(note.site, class_count(note), low, high, ignored)
    for note in run.sampled.training_losses(*BINARY_LOSSES):
        if _beyond_unit(note.target):
            return _binary_claim(note.site, note.op, note.target, note.step)
    return None


def _binary_claim(site: str, op: str, target: TensorSummary, step: int | None) -> Claim:
    return Claim(
        0.9,
        f"The targets of `{op}`{at_place(site)} run from {target.min:g} to {target.max:g}; it is only defined for "
        "labels of 0 and 1 (or probabilities between).",
        step=step,
        where=where_of(site),
        evidence={"lowest": target.min, "highest": target.max},
    )


def token_crash(run: RecordedRun) -> Claim | None:
    """Ids without a row in the embedding table."""
    crash = run.facts.crash
    if crash is None:
        return None
    if crash.call in ("embedding", "embedding_bag") and crash.arguments is not None:
        ids, table = crash.arguments.input, crash.arguments.weight
        if ids and table and not _is_within(ids, 0, table.shape[0]):
            return _ids_claim(crash.site or "", int(ids.min or 0), int(ids.max or 0), table.shape[0])
    return _lookup_crash(crash)


def _ids_claim(site: str, low: int, high: int, rows: int) -> Claim:
    return Claim(
        0.97,
        f"Ids run from {low} to {high}{at_place(site)}, but the embedding has {rows} rows (ids 0 to {rows - 1}).",
        where=where_of(site),
        evidence={"lowest": low, "highest": high, "rows": rows},
        fixes=(f"Create the embedding with at least {high + 1} rows.",) if low >= 0 else (),
    )


def _lookup_crash(crash: CrashFacts) -> Claim | None:
    """A table looked up by hand, with ids beyond its rows."""
    stated = _BOUNDS.search(crash.message)
    if stated is None or int(stated[2]) != 0:
        return None
    size, held = int(stated[3]), crash.locals or {}
    tables = [n for n, d in held.items() if d.requires_grad and d.shape[:1] == [size] and len(d.shape) == 2]
    ids = [d for d in held.values() if "int" in d.dtype and d.max is not None and d.max >= size]
    return _ids_claim(crash.site or "", int(ids[0].min or 0), int(ids[0].max or 0), size) if tables and ids else None


def token_forced(run: RecordedRun) -> Claim | None:
    """Ids from the data that were clamped or wrapped to the rows of a table, or that exceed it in a later batch."""
    for call in run.sampled.calls.embeddings:
        if not 0 <= call.lowest <= call.highest < call.rows:  # a batch that did not run
            return _ids_claim(call.site, call.lowest, call.highest, call.rows)
    tables = {(note.step, note.rows) for note in run.sampled.calls.embeddings}
    hits = [
        note
        for note in run.sampled.calls.folded_ids
        if (note.step, note.kept + 1) in tables and note.source is None and note.changed > 0.005
    ]
    clamped = [note for note in hits if note.op in ("clamp", "clip")]
    folded = [note for note in hits if note.op not in ("clamp", "clip") and note.highest < 4 * note.kept]
    if not clamped and not folded:
        return None
    note = max(clamped or folded, key=lambda item: item.changed)
    return Claim(
        0.85 if clamped else 0.6,
        f"{note.changed:.1%} of the ids reach beyond the {note.kept + 1} rows of the embedding (up to "
        f"{note.highest}) and are forced into it by `{note.op}`{at_place(note.site)}: different tokens become one.",
        step=note.step,
        where=where_of(note.site),
        evidence={"changed": note.changed, "highest": note.highest, "rows": note.kept + 1},
        severity="error" if clamped else "warning",
    )


# ── scale ────────────────────────────────────────────────────────────────────────────────────────────────────────────


_WIDE = 20.0
"""The size from which on a single feature is as bad as an input of that size."""


def unscaled_input(run: RecordedRun) -> Claim | None:
    """Inputs far from unit scale before the first update, in a run that goes wrong."""
    note = next((n for n in run.sampled.trained_model_calls if n.features is not None and n.step <= 1), None)
    if note is None or note.features is None or note.inputs[0].nonfinite or _normalised_first(run):
        return None
    features = note.features
    sizes = [math.hypot(m, s) for m, s in zip(features.mean, features.std, strict=True)]
    size = math.sqrt(mean([v * v for v in sizes])) if sizes else 0.0
    size = max(sizes) if sizes and max(sizes) >= _WIDE else size  # one such feature outweighs all others
    if size == 0 or not math.isfinite(size) or 0.02 < size < 15:
        return None
    small = size < 1
    stuck = at_chance(run)
    curve = run.curve
    failing = run.failing or stuck is not None
    slowed = curve.starts_far_up and not curve.blind
    blown = _blown_start(run)
    bad = failing or slowed or blown
    is_learned = not failing and not slowed and _ends_below_chance(run)  # the first losses did no harm
    thrown = max(run.update_ratios()[:8], default=0.0) > 1.0  # small inputs do not make steps this large
    if small and (thrown or not (curve.flat or stuck is not None)):
        bad = False
    if not bad or run.adversarial:
        return None
    worst = max(range(len(sizes)), key=lambda i: sizes[i])
    reach = abs(math.log10(size))
    end = f"the loss went from {curve.start:.3g} to {curve.end:.3g}" if curve.finite else "no loss was finite"
    if stuck is not None:
        end += f" (the loss of a constant answer is {stuck.level:.3g})"
    largest = f"feature {worst}: mean {features.mean[worst]:.3g}, spread {features.std[worst]:.3g}"
    is_bytes = _is_image_bytes(note.inputs[0])
    if is_bytes:
        largest = f"images with values from {note.inputs[0].min:g} to {note.inputs[0].max:g}"
    return Claim(
        min(0.92, 0.55 + 0.15 * reach),
        f"The input of `{note.model}` has a typical size of {size:.3g} at step {note.step}, before any update "
        f"({largest}), and {end}.",
        step=note.step,
        where=where_of(note.site, note.model),
        evidence={
            "size": size,
            "largest_feature": {"index": worst, "mean": features.mean[worst], "std": features.std[worst]},
            "range": [note.inputs[0].min, note.inputs[0].max],
            "first_loss": curve.start,
            "last_loss": curve.end,
            "chance": stuck.level if stuck is not None else None,
        },
        severity="info" if is_learned else "warning" if _is_mild(run, size) or not (failing or blown) else "error",
        fixes=(f"Divide the images by 255 before they reach `{note.model}`.",) if is_bytes else (),
    )


def _is_mild(run: RecordedRun, size: float) -> bool:
    """Whether it is not known yet that the size does harm."""
    return run.facts.preflight is not None and size < 100


def _is_image_bytes(given: TensorSummary) -> bool:
    """Whether a batch of images has the range of bytes."""
    lowest, highest = given.min, given.max
    return (
        len(given.shape) == 4 and lowest is not None and highest is not None and lowest >= 0 and 128 <= highest <= 255
    )


def _blown_start(run: RecordedRun) -> bool:
    """Whether the first losses are many times above those of an untrained model."""
    level = chance(run)
    return level is not None and level.kind != "variance" and max(run.curve.finite[:20], default=0) > 8 * level.level


def _ends_below_chance(run: RecordedRun) -> bool:
    """Whether the loss ends far below that of the best constant answer."""
    level = chance(run)
    return level is not None and run.curve.end < 0.5 * level.level


def _normalised_first(run: RecordedRun) -> bool:
    """Whether the first layer normalises, so that the scale of the input does not matter."""
    for look in run.sampled.steps[:1]:
        norms = [call.index for call in look.calls.normalizations]
        layers = [call.index for call in look.calls.layers]
        tables = look.calls.embeddings
        if norms and min(norms) < min(layers, default=math.inf) and not tables:
            return True
        # A convolution or linear layer directly followed by batch norm does not depend on the scale either.
        if layers and any(n.op == "batch_norm" and n.index <= min(layers) + 2 for n in look.calls.normalizations):
            return True
    return False


RULES: tuple[Rule, ...] = (
    Rule("data.nonfinite-input", "value", nonfinite_input, explains=_CONSEQUENCES),
    Rule("data.label-out-of-range", "crash", label_crash),
    Rule("data.label-out-of-range", "wiring", label_beyond, explains=("loss.sign-flipped", "lr.too-high")),
    Rule("data.token-mismatch", "crash", token_crash),
    Rule("data.token-mismatch", "value", token_forced, explains=("data.labels-uninformative",)),
    Rule(
        "data.unscaled-input",
        "value",
        unscaled_input,
        explains=(
            "lr.too-high",
            "lr.too-low",
            "lr.no-warmup",
            "init.too-large",
            "init.too-small",
            "model.dead-units",
            "model.saturated-units",
            "model.exploding-gradient",
            "model.vanishing-gradient",
            "clip.saturated",
            "data.class-collapse",
            "data.labels-uninformative",
            "data.bad-batch",
        ),
    ),
)
