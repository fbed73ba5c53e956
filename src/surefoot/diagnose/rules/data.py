"""What goes in: values that are not finite, labels and ids that do not fit, scales, and labels that say nothing."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.diagnose.data_summary import (
    at_chance,
    chance,
    class_count,
    entropy,
    label_batches,
    stream,
    weights_moved,
    where_of,
)
from surefoot.diagnose.nonfinite import details
from surefoot.diagnose.rule import Claim, Rule
from surefoot.record.facts import CrashArguments
from surefoot.watch.operation_names import BINARY_LOSSES, CLASS_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import CrashFacts, LabelControl, LossCall, NonFiniteLoss, TensorSummary

_CONSEQUENCES = (
    "loss.undefined-op", "lr.too-high", "lr.no-warmup", "init.too-large", "model.exploding-gradient",
    "precision.fp16-overflow", "optim.no-update", "data.unscaled-input", "data.class-collapse", "data.bad-batch",
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
    if bad is not None and _half_infinite(bad):  # what the graph holds was cast: only the batch itself is a witness
        return _seen_in_pass(run, step)
    return _seen_in_pass(run, step) or _seen_in_stream(run, step)


def _overflowed(run: RecordedRun) -> bool:
    """Whether the loss had left all bounds before: then an overflow, not the data, made the first NaN."""
    late = [abs(value) for value in run.curve.finite[-6:]]
    return bool(late) and max(late) > 1e3 * max(1.0, abs(run.curve.start))


def _half_infinite(bad: NonFiniteLoss) -> bool:
    return bad.dtype == "float16" and not bad.nan and not (bad.largest is not None and math.isnan(bad.largest))


_SHOWN = frozenset({"nan", "inf", "shape", "rows", "bad_rows", "op", "tensor", "value"})


def _claim_argument(bad: NonFiniteLoss) -> Claim:
    """A compiled model was given something that is not finite. What happens inside, and before, was not seen."""
    held = _counted(bad) if bad.nan or bad.inf else "NaN" if math.isnan(bad.largest or 0.0) else "Inf"
    place = f" at {bad.site}" if bad.site else ""
    shape = tuple(bad.shape or ())
    return Claim(
        0.92,
        f"The argument `{bad.argument}` of shape {shape} that the compiled `{bad.call}` is given{place} at step "
        f"{bad.step or 0} already holds {held}, and the loss of that step is the first that is not finite: they went "
        "in with the data, the compiled code did not make them.",
        step=bad.step,
        where=where_of(bad.site),
        evidence={key: value for key, value in details(bad).items() if key in _SHOWN | {"argument", "largest"}},
    )


def _counted(bad: NonFiniteLoss) -> str:
    """How many values are not finite, and in which rows."""
    nan, inf, rows, shape = bad.nan or 0, bad.inf or 0, bad.rows or [], tuple(bad.shape or ())
    count = f"{nan} NaN" if not inf else f"{inf} Inf" if not nan else f"{nan} NaN and {inf} Inf"
    if not rows or not shape:
        return count
    return f"{count} in {len(rows) if bad.bad_rows is None else bad.bad_rows} of {shape[0]} rows (first: row {rows[0]})"


def _claim_autopsy(bad: NonFiniteLoss) -> Claim:
    tensor = {"target": "The target", "the other operand": "A data tensor"}.get(bad.tensor or "", "The input")
    shape = tuple(bad.shape or ())
    place = f" at {bad.site}" if bad.site else ""
    passed = bad.passed or []
    end = ": no operation of the step made them, they came with the data."
    if passed:  # whether it was finite before is not known
        end = f". Whether they came with the data was not seen; on the way: {', '.join(passed[:3])}."
    return Claim(
        0.6 if passed else 0.97,
        f"{tensor} of shape {shape} that reaches `{bad.call or bad.op}`{place} at step "
        f"{bad.step or 0} already holds {_counted(bad)}{end}",
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
                    f"The {name} of the batch at step {note.step} holds a value of {value}, and the loss of that "
                    "very step is the first that is not finite.",
                    step=note.step,
                    evidence={key: str(value), "step": note.step},
                )
    return None


# ── labels and ids that do not fit ───────────────────────────────────────────────────────────────────────────────────

_BOUNDS = re.compile(r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)")


def label_crash(run: RecordedRun) -> Claim | None:
    """Labels that name a class there is no output for."""
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
            f"`one_hot` at {crash.site or ''} was given a label outside its classes"
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
        fixes.append(f"{outside} is the usual mark for unlabelled: pass `ignore_index={outside}` to the loss.")
    return Claim(
        0.97,
        f"Labels run from {low} to {high} at {site}, but the model has {classes} outputs (labels 0 to {classes - 1}) "
        f"and the ignore index is {ignored}.",
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
        f"`{labels[0]}` holds the label {index} at {crash.site or ''}, but `{outputs[0]}` has {size} columns "
        f"(labels 0 to {size - 1}).",
        where=where_of(crash.site, labels[0]),
        evidence={"label": index, "classes": size, "labels": labels[0], "outputs": outputs[0]},
    )


def _is_within(tensor: TensorSummary, low: int, size: int) -> bool:
    """Whether all values index something of this size; what could not be read is taken to."""
    return tensor.min is None or tensor.max is None or low <= tensor.min <= tensor.max < size


def _beyond_unit(target: TensorSummary) -> bool:
    low, high = target.min, target.max
    return low is not None and high is not None and (low < -1e-3 or high > 1 + 1e-3)


def label_beyond(run: RecordedRun) -> Claim | None:
    """A binary loss whose targets are no probabilities, or labels beyond the outputs in a batch that did not run."""
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
        f"The targets of `{op}` at {site} run from {target.min:g} to {target.max:g}; it is only defined for "
        "labels of 0 and 1 (or probabilities between).",
        step=step,
        where=where_of(site),
        evidence={"lowest": target.min, "highest": target.max},
    )


def token_crash(run: RecordedRun) -> Claim | None:
    """Ids the embedding table has no row for."""
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
        f"Ids run from {low} to {high} at {site}, but the embedding has {rows} rows (ids 0 to {rows - 1}).",
        where=where_of(site),
        evidence={"lowest": low, "highest": high, "rows": rows},
        fixes=(f"Build the table for the ids there are: at least {high + 1} rows.",) if low >= 0 else (),
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
    """Ids from the data that were clamped, or folded, to the rows of a table, or lie beyond it in a later batch."""
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
        f"{note.highest}) and are forced into it by `{note.op}` at {note.site}: different tokens become one.",
        step=note.step,
        where=where_of(note.site),
        evidence={"changed": note.changed, "highest": note.highest, "rows": note.kept + 1},
        severity="error" if clamped else "warning",
    )


# ── scale ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def unscaled_input(run: RecordedRun) -> Claim | None:
    """Inputs far from unit scale before the first update, in a run that goes wrong."""
    note = next((n for n in run.sampled.trained_model_calls if n.features is not None and n.step <= 1), None)
    if note is None or note.features is None or note.inputs[0].nonfinite or _normalised_first(run):
        return None
    features = note.features
    sizes = [math.hypot(m, s) for m, s in zip(features.mean, features.std, strict=True)]
    size = math.sqrt(mean([v * v for v in sizes])) if sizes else 0.0
    if size == 0 or not math.isfinite(size) or 0.02 < size < 15:
        return None
    small = size < 1
    stuck = at_chance(run)
    curve = run.curve
    bad = run.failing or stuck is not None or _blown_start(run)
    if small and not (curve.flat or stuck is not None):
        bad = False
    if not bad or run.adversarial:
        return None
    worst = max(range(len(sizes)), key=lambda i: sizes[i])
    reach = abs(math.log10(size))
    end = f"the loss went from {curve.start:.3g} to {curve.end:.3g}" if curve.finite else "no loss was finite"
    if stuck is not None:
        end += f" (always giving the same answer would cost {stuck.level:.3g})"
    return Claim(
        min(0.92, 0.55 + 0.15 * reach),
        f"The input of `{note.model}` has a typical size of {size:.3g} at step {note.step}, before any update "
        f"(feature {worst}: mean {features.mean[worst]:.3g}, spread {features.std[worst]:.3g}), and {end}.",
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
        severity="warning" if run.facts.preflight is not None and size < 100 else "error",
    )


def _blown_start(run: RecordedRun) -> bool:
    """Whether the first losses lie many times above what an untrained model should lose."""
    level = chance(run)
    return level is not None and level.kind != "variance" and max(run.curve.finite[:20], default=0) > 8 * level.level


def _normalised_first(run: RecordedRun) -> bool:
    """Whether the first layer normalises, so that the scale of the input does not matter."""
    for look in run.sampled.steps[:1]:
        norms = [call.index for call in look.calls.normalizations]
        layers = [call.index for call in look.calls.layers]
        tables = look.calls.embeddings
        if norms and min(norms) < min(layers, default=math.inf) and not tables:
            return True
        # A convolution or linear layer followed at once by batch norm does not care for the scale either.
        if layers and any(n.op == "batch_norm" and n.index <= min(layers) + 2 for n in look.calls.normalizations):
            return True
    return False


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def class_collapse(run: RecordedRun) -> Claim | None:
    """Rare classes that are never predicted, to the end of the run."""
    notes = run.sampled.training_losses(*CLASS_LOSSES, *BINARY_LOSSES)
    late = [n for n in notes if n.step >= 0.4 * run.steps]
    late = late if len({n.step for n in late}) >= 2 else notes[-4:]
    if run.steps < 30 or run.adversarial or run.nonfinite.seen or len(late) < 2:
        return None
    labels: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    for note in late:
        if not note.labels:
            return None
        labels.update({str(int(float(label))): count for label, count in note.labels.items()})
        predicted.update(_predictions(note))
    total = sum(labels.values())
    if not predicted:
        return None
    trained: Counter[str] = Counter(labels)
    for batch in label_batches(run):
        trained.update(batch)
    common = trained.most_common(1)[0][0]
    share = trained[common] / sum(trained.values())
    rows = sum(predicted.values())
    shown, rare = predicted.get(common, 0) / rows, total - labels[common]
    expected = (1 - share) * rows  # how often the other classes should be predicted
    if share < 0.7 or expected < 4 or 1 - shown > 0.2 * (1 - share):
        return None
    return Claim(
        0.85,
        f"Since step {late[0].step} class {common} is predicted for {shown:.1%} of the rows at {late[0].site}, "
        f"although {rare} of {total} rows have another label; in training {share:.1%} of the labels are {common}.",
        step=late[0].step,
        where=where_of(late[0].site),
        evidence={
            "predicted": dict(predicted),
            "labels": dict(labels),
            "prediction_entropy": entropy(predicted),
            "label_entropy": entropy(labels),
        },
        severity="error" if shown > 0.998 else "warning",
        fixes=(f"Weight the rare class about {share / max(1e-9, 1 - share):.0f} times as high in the loss.",),
    )


def _predictions(note: LossCall) -> dict[str, int]:
    if note.predicted:
        return {str(label): count for label, count in note.predicted.items()}
    if note.predicted_share is None:
        return {}
    count = sum((note.labels or {}).values())
    ones = round(note.predicted_share * count)
    return {"1": ones, "0": count - ones}


def labels_uninformative(run: RecordedRun) -> Claim | None:
    """Stuck at chance although the weights move, and no label can be told from its input by other means either."""
    if run.facts.preflight is not None:
        return _no_better_than_shuffled(run.facts.preflight.label_control)
    stuck = at_chance(run, 0.8)
    if stuck is None or run.nonfinite.seen or run.adversarial or run.steps < 30:
        return None
    moved = weights_moved(run)
    if moved < 0.2 or _never_spread(run):
        return None
    pairs = known_pairs(run)
    if len(pairs) < 60:
        return None
    verdict = predictability(pairs, stuck.kind == "variance")
    if verdict is None or verdict.score > 3.0:
        return None
    curve = run.curve
    what = "variance of the targets" if stuck.kind == "variance" else "entropy of the labels"
    return Claim(
        0.8 if run.curve.end > 0.9 * stuck.level else 0.65,
        f"The loss ends at {curve.end:.3g}, where chance is {stuck.level:.3g} (the {what}), although the weights moved "
        f"by about {moved:.1f} times their size; among {len(pairs)} rows the nearest neighbours share a label no more "
        f"often than after shuffling the labels ({verdict.found:.3f} against {verdict.shuffled:.3f}).",
        step=0,
        where=where_of(stuck.site),
        evidence={
            "last_loss": curve.end,
            "chance": stuck.level,
            "weights_moved": moved,
            "rows": len(pairs),
            "neighbours": verdict._asdict(),
        },
    )


def _no_better_than_shuffled(control: LabelControl | None) -> Claim | None:
    """The true labels were of no use for other rows, although both copies learned theirs by heart.

    The same holds where the true labels were as hard to learn as shuffled ones, and other rows do not foretell them.
    """
    if control is None or not control.gain <= 0.02:
        return None
    by_heart = min(control.true_fall, control.shuffled_fall) >= 0.3
    as_hard = control.passes >= 10 and control.true_fall <= 1.5 * control.shuffled_fall
    unforetold = control.neighbour_score is not None and control.neighbour_score <= 2.0
    if not by_heart and not (as_hard and unforetold):
        return None
    return Claim(
        0.7,
        f"After {control.steps} steps on {control.rows} rows the held-out loss is {control.true_held_out:.3g}, and "
        f"{control.shuffled_held_out:.3g} with the labels shuffled.",
        step=0,
        evidence={"gain": control.gain, "rows": control.rows},
        severity="warning",
    )


def _never_spread(run: RecordedRun) -> bool:
    """Whether the outputs are the same for every row: then the model, not the labels, is to blame."""
    spreads = [n.unit_spread for n in run.sampled.training_losses() if n.unit_spread is not None]
    return bool(spreads) and median(spreads[-5:]) < 1e-4


def known_pairs(run: RecordedRun) -> list[tuple[list[float], float]]:
    """A sample of the rows that were trained on, with their labels, at most 600."""
    seen: dict[tuple[float, ...], float] = {}
    for root in run.sampled.backward_calls:
        held = root.pairs
        if held:
            for row, label in zip(held.inputs, held.targets, strict=True):
                seen.setdefault(tuple(row), float(label))
    return [(list(row), label) for row, label in list(seen.items())[:600]]


class Predictability(NamedTuple):
    """How well the nearest neighbours of a row foretell its label."""

    found: float
    shuffled: float
    """With the labels shuffled."""
    score: float
    """The difference, in spreads of the shuffled ones; the better of two ways to foretell."""


def predictability(pairs: list[tuple[list[float], float]], continuous: bool) -> Predictability | None:
    """How much better the nearest neighbours of a row foretell its label than with the labels shuffled."""
    import numpy as np

    x = np.array([row for row, _ in pairs])
    y = np.array([label for _, label in pairs])
    spread = x.std(0)
    x = (x[:, spread > 0] - x[:, spread > 0].mean(0)) / spread[spread > 0]
    if x.shape[1] == 0 or len(set(y.tolist())) < 2:
        return None
    squares = (x * x).sum(1)
    distances = squares[:, None] + squares[None] - 2 * x @ x.T
    np.fill_diagonal(distances, np.inf)
    near = np.argsort(distances, 1)[:, :5]
    ridge = x.T @ x + len(x) * 0.1 * np.eye(x.shape[1])
    hat = x @ np.linalg.solve(ridge, x.T)
    leverage = np.clip(np.diag(hat), 0, 0.99)

    def score(labels: Any) -> tuple[float, float]:
        if continuous:
            local = -float(((labels[near].mean(1) - labels) ** 2).mean() / labels.var())
        else:
            local = float((labels[near] == labels[:, None]).mean())
        targets = (labels - labels.mean())[:, None]
        if not continuous:
            kinds = np.unique(labels)
            targets = (labels[:, None] == kinds[None]).astype(float)
            targets = targets - targets.mean(0)
        left_out = (hat @ targets - leverage[:, None] * targets) / (1 - leverage[:, None])
        straight = float((left_out * targets).sum() / (np.abs(left_out).sum() + 1e-12))
        return local, straight

    found = score(y)
    shuffler = random.Random(0)
    order = list(range(len(y)))
    others = []
    for _ in range(20):
        shuffler.shuffle(order)
        others.append(score(y[order]))
    scores = []
    for position in (0, 1):
        values = [other[position] for other in others]
        scores.append((found[position] - mean(values)) / (float(np.std(values)) + 1e-9))
    return Predictability(found[0], mean(other[0] for other in others), max(scores))


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
    Rule("data.class-collapse", "dynamics", class_collapse),
    Rule("data.labels-uninformative", "dynamics", labels_uninformative, explains=("lr.too-low", "data.class-collapse")),
)
