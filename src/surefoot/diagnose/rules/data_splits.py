"""Training against evaluation data: rows that are in both, and inputs that went through different pipelines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.engine import Claim, Rule
from surefoot.diagnose.readings import where_of

if TYPE_CHECKING:
    from surefoot.diagnose.run import Run


@dataclass
class Held:
    """The rows of one evaluation, gathered from its passes."""

    model: str
    site: str
    step: int
    rows: set[int] = field(default_factory=set)
    whole: bool = True
    """Whether all of its passes, and all of their rows, are known."""


def evaluations(run: Run) -> list[Held]:
    """What the model was evaluated on: one entry for each line of the script and first row."""
    blocks: dict[Any, Held] = {}
    for note in run.evaluations():
        rows = note.get("rows")
        if not rows or len(rows) < 8 or note.get("grad_mode"):
            continue
        key = (note["model"], note["site"], note.get("block", ("look", note["step"])))
        held = blocks.setdefault(key, Held(note["model"], note["site"], note["step"]))
        held.rows.update(rows)
        total = note["inputs"][0]["shape"][0] if note["inputs"] else len(rows)
        if total > len(rows) or note.get("block_passes", 1) > 16:
            held.whole = False
    return list(blocks.values())


# ── leakage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def leakage(run: Run) -> Claim | None:
    """Some rows of the evaluation were trained on, and it is not the training set that is evaluated."""
    trained = training_rows(run)
    if len(trained) < 16 or run.adversarial:
        return None
    found = [(len(held.rows & trained) / len(held.rows), held) for held in evaluations(run) if len(held.rows) >= 8]
    found = [(share, held) for share, held in found if held.step > 0]
    if not found or not _rows_are_telling(run, trained):
        return None
    coverage = recapture(run)
    parts = [(share, held) for share, held in found if share > 0.02 and len(held.rows & trained) >= 4]
    if not parts:
        return None
    clean = any(share < 0.01 for share, _ in found)
    mixed = [(s, h) for s, h in parts if s < 0.9 * coverage and s < 0.9]
    if mixed and coverage > 0.3:
        share, held = max(mixed, key=lambda item: (item[1].step, item[0]))
        return _claim_leak(share, held, trained, coverage, 0.9 if share > 0.1 else 0.75)
    if clean or any(_is_training_set(run, held, trained) for _, held in parts):
        return None
    share, held = max(parts, key=lambda item: item[1].step)
    if share > 0.9 and held.whole and len(trained) > 1.3 * len(held.rows) and not _same_loader(run):
        return _claim_leak(share, held, trained, coverage, 0.8)
    return None


def _claim_leak(share: float, held: Held, trained: set[int], coverage: float, confidence: float) -> Claim:
    both = len(held.rows & trained)
    return Claim(
        confidence,
        f"{both} of the {len(held.rows)} rows that `{held.model}` is evaluated on at {held.site} ({share:.0%}) were, "
        f"value for value, among the {len(trained):,} rows seen in training.",
        step=held.step,
        where=where_of(held.site, held.model),
        evidence={"shared": both, "evaluated": len(held.rows), "trained": len(trained), "coverage": coverage},
    )


def training_rows(run: Run) -> set[int]:
    """Fingerprints of the rows that were trained on."""
    rows = set(run.facts.get("stream", {}).get("rows", []))
    for note in run.passes(grad=True):
        rows.update(note.get("rows") or ())
    return rows


def recapture(run: Run) -> float:
    """Which share of a late training batch had been seen in earlier ones: how much of the set is known."""
    seen: set[int] = set(run.facts.get("stream", {}).get("rows", []))
    steps = dict(zip(run.facts["stream"]["rows"], run.facts["stream"]["row_steps"], strict=True)) if seen else {}
    passes = [note for note in run.passes(grad=True) if note.get("rows") and note["step"] > 0]
    shares = []
    for note in passes[-6:]:
        known = sum(steps.get(row, math.inf) < note["step"] for row in note["rows"])
        shares.append(known / len(note["rows"]))
    return median(shares) if shares else 0.0


def _rows_are_telling(run: Run, trained: set[int]) -> bool:
    """Whether two different rows would look different: not so for a few kinds of tokens or discrete states."""
    batches = [note for note in run.passes(grad=True) if note.get("rows") and len(note["rows"]) > 7]
    if not batches:
        return False
    alike = [len(set(note["rows"])) / len(note["rows"]) for note in batches]
    return median(alike) > 0.9


def _is_training_set(run: Run, held: Held, trained: set[int]) -> bool:
    return not held.whole or len(held.rows) > 0.75 * len(trained)


def _same_loader(run: Run) -> bool:
    """Whether the loader that training draws from is also drawn from without gradients."""
    with_grad = {b["loader"] for b in run.facts.get("batches", []) if b.get("grad")}
    without = {b["loader"] for b in run.facts.get("batches", []) if not b.get("grad")}
    return bool(without) and without <= with_grad


# ── two pipelines ────────────────────────────────────────────────────────────────────────────────────────────────────


def split_mismatch(run: Run) -> Claim | None:
    """Inputs of the evaluation with another mean or spread than those of training, in most features."""
    if run.adversarial:
        return None
    best: Claim | None = None
    for model in {note["model"] for note in run.evaluations()}:
        train = [n for n in run.passes(grad=True) if n["model"] == model and n.get("features")]
        others = [n for n in run.evaluations() if n["model"] == model and n.get("features") and not n["grad_mode"]]
        if len(train) < 3:
            continue
        for place in dict.fromkeys((n["site"], n["inputs"][0]["shape"][0]) for n in others):
            group = [n for n in others if (n["site"], n["inputs"][0]["shape"][0]) == place]
            claim = _compare(model, train, group)
            if claim is not None and (best is None or claim.confidence > best.confidence):
                best = claim
    return best


def _pool(notes: list[dict[str, Any]], width: int) -> tuple[list[float], list[float], int]:
    """Mean and spread of each feature over all passes."""
    held = [note["features"] for note in notes if len(note["features"]["mean"]) == width]
    count = sum(f["count"] for f in held)
    means = [sum(f["mean"][i] * f["count"] for f in held) / count for i in range(width)]
    squares = [sum((f["std"][i] ** 2 + f["mean"][i] ** 2) * f["count"] for f in held) / count for i in range(width)]
    return means, [math.sqrt(max(0.0, s - m * m)) for s, m in zip(squares, means, strict=True)], count


def _compare(model: str, train: list[dict[str, Any]], held: list[dict[str, Any]]) -> Claim | None:
    width = len(train[0]["features"]["mean"])
    held = [n for n in held if len(n["features"]["mean"]) == width]
    if not held:
        return None
    means, spreads, count = _pool(train, width)
    other_means, other_spreads, other_count = _pool(held, width)
    if count < 32 or other_count < 16:
        return None
    floor = 0.05 * (median(spreads) or 1e-6) + 1e-9
    shifts, scales = [], []
    for m, s, om, os in zip(means, spreads, other_means, other_spreads, strict=True):
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
    worst = max(range(width), key=lambda i: abs(other_means[i] - means[i]) / max(spreads[i], floor))
    confidence = 0.9 if shift > 3 or scale > math.log(4) or max(shifts) > 6 else 0.75
    return Claim(
        confidence,
        f"`{model}` is evaluated at {held[0]['site']} on inputs unlike those it is trained on: {far:.0%} of the "
        f"features differ in mean by over 2 spreads or in spread by over 3 times; feature {worst} has mean "
        f"{other_means[worst]:.3g} and spread {other_spreads[worst]:.3g} there, {means[worst]:.3g} and "
        f"{spreads[worst]:.3g} in training.",
        step=held[0]["step"],
        where=where_of(held[0]["site"], model),
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
    Rule("data.split-mismatch", "value", split_mismatch, explains=("model.batchnorm-tiny-batch",)),
)
