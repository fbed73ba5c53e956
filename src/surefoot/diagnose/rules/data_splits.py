"""Training against evaluation data: rows that are in both, and inputs that went through different pipelines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import main_line, where_of
from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import FeatureScales, ModelCall, SplitComparison


@dataclass(frozen=True)
class Known:
    """What is known about the rows that a model was trained on."""

    rows: set[int]
    coverage: float
    """The approximate share of all training rows; 0 if it is not known."""


def _rows(call: ModelCall) -> list[int]:
    """Fingerprints of the rows of a model call; none if they were not taken."""
    return call.rows or []


def trained_rows(run: RecordedRun, model: str) -> Known:
    """The rows that a model was trained on: those of the lines of its optimizer, and of sampled steps."""
    optimizers = {n for p in run.parameters.values() if p.model == model for n in p.trained_by}
    lines = {str(line) for held in run.optimizers if held.number in optimizers for line in held.backward_lines}
    lines -= _lines_of_others(run, optimizers)
    held = [entry for line, entry in run.facts.step_data.rows.items() if line in lines]
    first = {row: at for entry in held for row, at in zip(entry.prints, entry.first, strict=True)}
    passes = [n for n in run.sampled.trained_model_calls if n.model == model and _rows(n)]
    alike = [sum(row in first for row in _rows(note)) / len(_rows(note)) for note in passes]
    if held and alike and median(alike) > 0.95:
        whole = all(entry.whole for entry in held)
        return Known(set(first), _pool_share(run, first) if whole else _recapture(passes, first) * _read_share(passes))
    rows: dict[int, int] = {}
    shares = []
    for position, note in enumerate(passes):
        shares.append(sum(row in rows for row in _rows(note)) / len(_rows(note)))
        for row in _rows(note):
            rows.setdefault(row, position)
    return Known(set(rows), median(shares[-4:]) * _read_share(passes) if len(shares) > 6 else 0.0)


def _read_share(passes: list[ModelCall]) -> float:
    """Which share of the rows of a batch has a fingerprint: of a large batch, only the first rows have one.

    Without it, a graph or a data set that is passed to the model as a whole would seem to be known completely.
    """
    return median(min(1.0, len(_rows(note)) / note.inputs[0].shape[0]) for note in passes if note.inputs)


def _pool_share(run: RecordedRun, first: dict[int, int]) -> float:
    """The share of the rows that training draws from which have been drawn, if every drawn row is known.

    Rows drawn at random from a larger pool, like windows of a text, come again in late batches with this probability:
    an evaluation of the training pool then shares only this part of its rows. Other data are known completely: within
    one pass over them no row comes again, and from the second pass on every row does.
    """
    sizes = [note.size for note in main_line(run) if note.size]
    last = max(first.values(), default=0)
    late = 0.75 * run.facts.backwards
    if not sizes or last <= late:
        return 1.0
    fresh = sum(at > late for at in first.values()) / (median(sizes) * (run.facts.backwards - late))
    return 1.0 - fresh if 0.1 < fresh < 0.98 else 1.0


def _lines_of_others(run: RecordedRun, optimizers: set[int]) -> set[str]:
    """Lines that also train another model, made later in the same place, as in a cross-validation."""
    made = {held.site for held in run.optimizers if held.number in optimizers and held.site}
    others = [held for held in run.optimizers if held.number not in optimizers and held.site in made]
    return {str(line) for held in others for line in held.backward_lines}


def _recapture(passes: list[ModelCall], first: dict[int, int]) -> float:
    """The share of the rows of late batches that had occurred before: how much of the set is known."""
    last = max(first.values(), default=0)
    later = [note for note in passes if note.step > last] or passes[-4:]
    return median(sum(first.get(r, math.inf) <= last for r in _rows(n)) / len(_rows(n)) for n in later)


# ── leakage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def leakage(run: RecordedRun) -> Claim | None:
    """Some rows of an evaluation batch were trained on and others not, or a held-out set lies within the training set.

    An evaluation of the training set itself, for its accuracy, shares all of its rows: that is not a leak.
    """
    if run.facts.preflight is not None:
        return _named_splits_share_rows(run.facts.preflight.splits)
    if run.adversarial:
        return None
    if (claim := _evaluates_trained_part(run)) is not None:
        return claim
    for model in dict.fromkeys(note.model for note in run.evaluations()):
        known = trained_rows(run, model)
        passes = _distinct([n for n in run.evaluations() if n.model == model and not n.grad_mode])
        if len(known.rows) < 16 or known.coverage < 0.3 or not passes or not _rows_differ(run, model):
            continue
        claim = _part_known(model, passes, known) or _held_within(run, model, passes, known)
        if claim is not None:
            return claim
    return None


def _evaluates_trained_part(run: RecordedRun) -> Claim | None:
    """A model is given all rows at once, as a graph network is: training uses every row, and evaluation a part of them.

    With a mask for training, the loss has fewer targets than the model has rows.
    """
    calls = [call for call in run.sampled.trained_model_calls if call.inputs and call.outputs]
    given = {(tuple(call.inputs[0].shape), call.inputs[0].mean, call.inputs[0].std) for call in calls}
    if len(given) != 1 or len(calls) < 6 or not calls[0].outputs[0].shape:
        return None
    again = [call for call in run.facts.evaluations if call.inputs and call.model == calls[0].model]
    same = [call for call in again if (tuple(call.inputs[0].shape), call.inputs[0].mean, call.inputs[0].std) in given]
    rows = calls[0].outputs[0].shape[0]
    losses, held = (
        run.sampled.training_losses(),
        [loss for block in run.facts.evaluation_calls for loss in block.losses],
    )
    if not same or len(same) != len(again) or not held or not losses or len({loss.site for loss in losses}) != 1:
        return None
    if any(loss.targets != rows for loss in losses) or any(not 8 <= (loss.targets or 0) < rows for loss in held):
        return None
    return Claim(
        0.8,
        f"`{calls[0].model}` is given the same {rows:,} rows in every step, and the loss{at_place(losses[0].site)} "
        f"uses all {rows:,} of them; {held[0].targets:,} of the same rows are evaluated{at_place(held[0].site)}.",
        step=calls[0].step,
        where=where_of(losses[0].site, held[0].site),
        evidence={"rows": rows, "trained": losses[0].targets, "evaluated": held[0].targets},
        fixes=(f"Apply the training mask to outputs and labels of the loss{at_place(losses[0].site)}.",),
    )


def _named_splits_share_rows(splits: SplitComparison | None) -> Claim | None:
    """The doctor got the held-out rows: none of them should be trained on."""
    if splits is None or splits.different < 0.95 * splits.trained or splits.shared <= 0.01 * splits.evaluated:
        return None  # equal rows prove nothing if most are equal
    return Claim(
        0.9,
        f"{splits.shared} of {splits.evaluated:,} evaluation rows are, value for value, among {splits.trained:,} "
        "training rows.",
        evidence={"shared": splits.shared / splits.evaluated, "evaluated": splits.evaluated, "trained": splits.trained},
    )


def _distinct(notes: list[ModelCall]) -> list[ModelCall]:
    """Passes with enough rows, each set of rows once."""
    found = {}
    for note in notes:
        rows = _rows(note)
        if len(rows) >= 8 and note.step > 0:
            found[(note.site, tuple(rows[:8]))] = note
    return list(found.values())


def _shared(note: ModelCall, known: Known) -> float:
    return sum(row in known.rows for row in _rows(note)) / len(_rows(note))


def _part_known(model: str, passes: list[ModelCall], known: Known) -> Claim | None:
    # A few rows in a hundred coincide if inputs are short sequences, or if a pool is used up gradually.
    touched = [(note, share) for note in passes if (share := _shared(note, known)) > 0.1]
    mixed = []
    for note, share in touched:
        count, cover = len(_rows(note)), known.coverage
        chance = 3 * math.sqrt(cover * (1 - cover) / count)
        if share * count >= 4 and share < min(0.9, 0.85 * cover) and share < cover - chance:
            mixed.append((note, share))
    if not mixed or sum(len(_rows(n)) for n, _ in mixed) < 0.5 * sum(len(_rows(n)) for n, _ in touched):
        return None
    note, share = max(mixed, key=lambda item: len(_rows(item[0])))
    return _claim_leak(model, note, share, known, 0.92 if share > 0.1 else 0.8)


def _held_within(run: RecordedRun, model: str, passes: list[ModelCall], known: Known) -> Claim | None:
    """All evaluated rows were trained on, and are only a part of the training set, from a separate source.

    A held-out set has the same rows each time. Other rows each time are training batches that are shown once more.
    """
    if _differ_each_time(run, model):
        return None
    shares = [_shared(note, known) for note in passes]
    if min(shares) < 0.97 or known.coverage < 0.9 or _same_loader(run):
        return None
    cut = any(note.inputs[0].shape[0] > len(_rows(note)) for note in passes)
    many = any((note.block_calls or 1) > 16 for note in passes)
    rows = {row for note in passes for row in _rows(note)}
    if cut or many or len(rows) > 0.7 * len(known.rows) or len(rows) < 16:
        return None
    note = max(passes, key=lambda item: len(_rows(item)))
    return _claim_leak(model, note, 1.0, known, 0.8)


def _differ_each_time(run: RecordedRun, model: str) -> bool:
    """Whether the evaluations of a model have few rows in common with the one before."""
    groups: dict[tuple[int | None, int], set[int]] = {}
    for call in run.evaluations():
        if call.model == model and not call.grad_mode and call.step > 0:
            groups.setdefault((call.block, call.step), set()).update(_rows(call))
    sets = [groups[key] for key in sorted(groups, key=lambda key: key[1]) if groups[key]]
    common = [len(a & b) / min(len(a), len(b)) for a, b in pairwise(sets)]
    return len(common) >= 2 and median(common) < 0.5


def _claim_leak(model: str, note: ModelCall, share: float, known: Known, confidence: float) -> Claim:
    both = round(share * len(_rows(note)))
    return Claim(
        confidence,
        f"{both} of {len(_rows(note))} rows that `{model}` is evaluated on{at_place(note.site)} ({share:.0%}) are, "
        f"value for value, among the {len(known.rows):,} rows it is trained on.",
        step=note.step,
        where=where_of(note.site, model),
        evidence={"shared": both, "evaluated": len(_rows(note)), "trained": len(known.rows)}
        | {"training_rows_known": known.coverage},
    )


def _rows_differ(run: RecordedRun, model: str) -> bool:
    """Whether two different rows would look different: not with a few kinds of tokens or discrete states."""
    batches = [_rows(n) for n in run.sampled.trained_model_calls if n.model == model and len(_rows(n)) > 7]
    sizes = [math.prod(n.inputs[0].shape[1:]) for n in run.sampled.trained_model_calls if n.model == model and n.inputs]
    if not sizes or median(sizes) < 4:
        return False  # points of a grid coincide
    return bool(batches) and median(len(set(rows)) / len(rows) for rows in batches) > 0.9


def _same_loader(run: RecordedRun) -> bool:
    """Whether the training loader is also iterated without gradients."""
    with_grad = {b.loader for b in run.facts.batches if b.grad_mode}
    without = {b.loader for b in run.facts.batches if not b.grad_mode}
    return bool(without) and without <= with_grad


# ── two pipelines ────────────────────────────────────────────────────────────────────────────────────────────────────


def split_mismatch(run: RecordedRun) -> Claim | None:
    """Inputs of the evaluation with another mean or spread than those of training, in most features."""
    if run.facts.preflight is not None:
        return _named_splits_differ(run.facts.preflight.splits)
    if run.adversarial:
        return None
    best: Claim | None = None
    for model in dict.fromkeys(note.model for note in run.evaluations()):
        seen = [n for n in run.sampled.trained_model_calls if n.model == model]
        train = [n.features for n in seen if n.features is not None]
        others = [n for n in run.evaluations() if n.model == model and n.features is not None and not n.grad_mode]
        if len(train) < 3 or any(n.inputs[0].requires_grad for n in seen if n.features is not None):
            continue  # too little data, or the inputs themselves are being optimised
        for place in dict.fromkeys((n.site, n.inputs[0].shape[0]) for n in others):
            group = [n for n in others if (n.site, n.inputs[0].shape[0]) == place]
            claim = _compare(model, train, group)
            if claim is not None and (best is None or claim.confidence > best.confidence):
                best = claim
    return best


def _named_splits_differ(splits: SplitComparison | None) -> Claim | None:
    """The mean or the spread of all values together; single features are not compared."""
    if splits is None or splits.shift is None or splits.stretch is None:
        return None
    if splits.shift <= 0.5 and 0.5 < splits.stretch < 2.0:
        return None
    return Claim(
        0.75,
        f"The mean of the evaluation data is {splits.shift:.2g} standard deviations away from that of the training "
        f"data, and its spread is {splits.stretch:.2g} times as large.",
        evidence={"shift_in_spreads": splits.shift, "spread_ratio": splits.stretch},
        severity="warning",
    )


def _pool(held: list[FeatureScales], width: int) -> tuple[list[float], list[float], int]:
    """Mean and spread of each feature over all passes."""
    held = [features for features in held if len(features.mean) == width]
    count = sum(f.count for f in held)
    means = [sum(f.mean[i] * f.count for f in held) / count for i in range(width)]
    squares = [sum((f.std[i] ** 2 + f.mean[i] ** 2) * f.count for f in held) / count for i in range(width)]
    return means, [math.sqrt(max(0.0, s - m * m)) for s, m in zip(squares, means, strict=True)], count


def _usual(held: list[FeatureScales]) -> list[FeatureScales]:
    """The passes without a minority whose spread is another one: a few huge rows are in some batches only."""
    spreads = [median(features.std) for features in held]
    usual = median(spreads)
    kept = [features for features, spread in zip(held, spreads, strict=True) if usual / 3 <= spread <= 3 * usual]
    return kept if len(kept) > 0.5 * len(held) else held


def _is_finite(*values: float) -> bool:
    """Older facts contain the largest float32 for an infinity."""
    return all(abs(value) < 1e38 for value in values)


def _compare(model: str, train: list[FeatureScales], calls: list[ModelCall]) -> Claim | None:
    width = len(train[0].mean)
    held = [call for call in calls if call.features is not None and len(call.features.mean) == width]
    if not held:
        return None
    means, spreads, count = _pool(_usual([features for features in train if len(features.mean) == width]), width)
    other_means, other_spreads, other_count = _pool(
        [call.features for call in held if call.features is not None], width
    )
    if count < 32 or other_count < 16:
        return None
    known = [i for i in range(width) if _is_finite(means[i], spreads[i], other_means[i], other_spreads[i])]
    if not known:
        return None
    floor = 0.05 * (median(spreads[i] for i in known) or 1e-6) + 1e-9
    shifts, scales = [], []
    for i in known:
        m, s, om, os = means[i], spreads[i], other_means[i], other_spreads[i]
        if s < floor and os < floor and abs(om - m) < floor:
            continue  # constant in both
        shifts.append(abs(om - m) / max(s, floor))
        scales.append(abs(math.log(max(os, floor) / max(s, floor))))
    if not shifts:
        return None
    shift, scale = median(shifts), median(scales)
    far = sum(a > 2.0 or b > math.log(3) for a, b in zip(shifts, scales, strict=True)) / len(shifts)
    if far < 0.5 and not (width <= 16 and max(shifts) > 6 and far > 0):
        return None
    worst = max(known, key=lambda i: abs(other_means[i] - means[i]) / max(spreads[i], floor))
    confidence = 0.9 if shift > 3 or scale > math.log(4) or max(shifts) > 6 else 0.75
    return Claim(
        confidence,
        f"`{model}` is evaluated{at_place(held[0].site)} on inputs unlike those it is trained on: {far:.0%} of the "
        f"features differ in mean by over 2 spreads or in spread by over 3 times; feature {worst} has mean "
        f"{other_means[worst]:.3g} and spread {other_spreads[worst]:.3g} there, {means[worst]:.3g} and "
        f"{spreads[worst]:.3g} in training.",
        step=held[0].step,
        where=where_of(held[0].site, model),
        evidence={
            "shift_in_spreads": shift,
            "largest_shift": max(shifts),
            "spread_ratio": math.exp(scale),
            "features_off": far,
            "trained_rows": count,
            "evaluated_rows": other_count,
        },
    )


RULES: tuple[Rule, ...] = (
    Rule("data.leakage", "value", leakage),
    Rule(
        "data.split-mismatch",
        "value",
        split_mismatch,
        explains=("model.batchnorm-tiny-batch", "data.labels-uninformative"),
    ),
)
