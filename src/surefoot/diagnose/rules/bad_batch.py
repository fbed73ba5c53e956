"""One batch unlike all others: spikes of the loss with outlying data, or with one batch again and again."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from surefoot.diagnose.data_summary import has_print, main_line, stream
from surefoot.diagnose.rule import Claim, Rule
from surefoot.record.facts import SpikeEvent

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import PreflightFacts


_FAR = 30.0
"""Batches that reach this many times as far as all others hold rows of another kind, not the tail of one."""
_STEEP = 10.0
"""The factor by which their gradients are larger if such rows decide on the updates."""
_LITTLE = 0.15
"""If less than this share is left to learn, they did no harm."""


def bad_batch(run: RecordedRun) -> Claim | None:
    """Losses that stand out together with their data."""
    if run.facts.preflight is not None:
        return _largest_batch(run.facts.preflight)
    spikes = run.events(SpikeEvent)
    if run.adversarial:
        return None
    found = (_outlying_data(run, spikes) or _recurring_batch(run, spikes)) if spikes else None
    if found is not None and run.curve.learned and 0 < run.curve.left < _LITTLE:
        return replace(found, severity="info")
    return found or _outlying_gradients(run)


def _largest_batch(preflight: PreflightFacts) -> Claim | None:
    """Before training there is no loss: only an extreme outlier counts."""
    worst = max(preflight.largest_batches, key=lambda seen: seen.ratio, default=None)
    if worst is None or worst.ratio <= 50:
        return None
    return Claim(
        0.7,
        f"`{worst.path}` of batch {worst.batch} has {worst.ratio:.3g} times the usual scale.",
        step=worst.batch,
        evidence={"ratio": worst.ratio},
        severity="warning",
    )


def _outlying_data(run: RecordedRun, spikes: list[SpikeEvent]) -> Claim | None:
    at = {spike.backward for spike in spikes}
    line = main_line(run)
    targets, inputs = [(n.backward, n.target_largest) for n in line], [(n.backward, n.input_largest) for n in line]
    for name, known in (("target", targets), ("input", inputs)):
        sizes = [(at_backward, size) for at_backward, size in known if size is not None and size < 1e30]
        if len(sizes) < 20:
            continue
        usual = median(v for _, v in sizes)
        outliers = [(s, v) for s, v in sizes if v > 8 * usual]
        rest = [v for s, v in sizes if v <= 8 * usual]
        if not outliers or len(outliers) > 0.25 * len(sizes) or min(v for _, v in outliers) < 3 * max(rest):
            continue
        spiked = [s for s, _ in outliers if s in at]
        early = [s for s, _ in outliers if s <= 20]  # no level to judge by yet
        if not spiked or len(spiked) < 0.6 * (len(outliers) - len(early)):
            continue
        return _claim_outlier(name, spikes, spiked, usual, max(v for _, v in outliers), max(rest))
    return _outlying_row(run, spikes)


def _outlying_gradients(run: RecordedRun) -> Claim | None:
    """Some batches hold values far beyond all others, and the first of them has a far larger gradient, too.

    Later ones need not: that gradient has killed units or changed all weights, and the loss has no level yet from which
    a spike stands out.
    """
    series = run.series
    measured = zip(series.at or series.step, series.grad_norm, strict=False)
    norms = {at: norm for at, norm in measured if norm is not None and math.isfinite(norm)}
    known = [(note.step, note.input_largest) for note in main_line(run) if note.step in norms]
    sizes = [(step, size) for step, size in known if size is not None and math.isfinite(size)]
    if len(sizes) < 20 or run.curve.left < _LITTLE:
        return None
    usual = median(size for _, size in sizes)
    outliers = [step for step, size in sizes if size > _FAR * usual]
    rest = {step: size for step, size in sizes if size <= _FAR * usual}
    largest = max(size for _, size in sizes)
    if not 2 <= len(outliers) <= 0.3 * len(sizes) or usual <= 0 or largest < _FAR * max(rest.values()):
        return None
    level, first = median(norms[step] for step in rest), outliers[0]
    if level <= 0 or norms[first] < _STEEP * level:
        return None
    return Claim(
        0.8,
        f"The input of {len(outliers)} of {len(sizes)} batches reaches {largest:.3g}, where the others reach "
        f"{usual:.3g} and at most {max(rest.values()):.3g}. The first of them, at step {first}, has a gradient of "
        f"{norms[first]:.3g} (usual is {level:.3g}): a few rows decide on the updates. The loss ends at "
        f"{run.curve.end:.3g}.",
        step=first,
        evidence={"steps": outliers[:20], "largest": largest, "usual": usual, "next_largest": max(rest.values())}
        | {"gradient": norms[first], "usual_gradient": level},
        severity="error" if run.failing else "warning",
    )


def _claim_outlier(
    name: str,
    spikes: list[SpikeEvent],
    hits: list[int],
    usual: float,
    worst: float,
    next_largest: float,
) -> Claim:
    first = next(spike for spike in spikes if spike.backward == hits[0])
    steps = [spike.step for spike in spikes if spike.backward in hits]
    row = next((d.worst_row for d in first.data if (d.row_ratio or 0) > 8), None)
    times = f"{len(steps)} times, always with such a batch" if len(steps) > 1 else "once"
    return Claim(
        0.92 if len(steps) > 1 else 0.85,
        f"At step {first.step} the loss jumps from {first.level:.3g} to {first.value:.3g} ({times}): the "
        f"{name} of that batch reaches {worst:.3g}, where batches usually reach {usual:.3g} and no other more than "
        f"{next_largest:.3g}" + (f"; row {row} of the batch is the outlier." if row is not None else "."),
        step=first.step,
        evidence={"loss": first.value, "level": first.level, "steps": steps[:20], "largest": worst}
        | {"usual": usual, "next_largest": next_largest, "tensor": name, "row": row},
    )


def _outlying_row(run: RecordedRun, spikes: list[SpikeEvent]) -> Claim | None:
    """For data that is not in the stream: a row far from its own batch, at most of the spikes."""
    usual = [
        abs(v)
        for note in run.sampled.trained_model_calls
        for given in note.inputs[:1]
        for v in (given.min, given.max)
        if v is not None and "float" in given.dtype
    ]
    hits = []
    for spike in spikes:
        for data in spike.data:
            reach = max(abs(data.min or 0.0), abs(data.max or 0.0))
            if (data.row_ratio or 0) > 20 and (not usual or reach > 8 * median(usual)):
                hits.append((spike, data, reach))
                break
    if len(hits) < 0.6 * len(spikes):
        return None
    spike, data, reach = hits[0]
    return Claim(
        0.8,
        f"At step {spike.step} the loss jumps from {spike.level:.3g} to {spike.value:.3g}: row "
        f"{data.worst_row} of the data for `{data.op}` reaches {reach:.3g}, {data.row_ratio:.0f} "
        "times as far as the rows around it.",
        step=spike.step,
        evidence={"loss": spike.value, "level": spike.level, "row": data.worst_row, "largest": reach},
    )


def _recurring_batch(run: RecordedRun, spikes: list[SpikeEvent]) -> Claim | None:
    """The same batch at each spike, and a spike whenever it occurs."""
    printed = [note for note in stream(run) if has_print(note)]
    prints = {note.backward: hash((note.input_print, note.target_print)) for note in printed}
    if len(set(prints.values())) < 4:
        return None
    at = Counter(prints[spike.backward] for spike in spikes if spike.backward in prints)
    if not at:
        return None
    print_, times = at.most_common(1)[0]
    came = sorted(n.step for n in printed if prints[n.backward] == print_ and n.backward > 20)
    if times < 2 or times < 0.6 * len(came) or sum(at.values()) > 2 * times:
        return None
    first = next(spike for spike in spikes if prints.get(spike.backward) == print_)
    return Claim(
        0.9,
        f"The loss jumps from {first.level:.3g} to {first.value:.3g} at step {first.step}, and {times} times "
        f"in all: each time it is the same batch (steps {', '.join(map(str, came[:5]))}).",
        step=first.step,
        evidence={"loss": first.value, "level": first.level, "spikes": times, "batch_came_at": came[:20]},
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "data.bad-batch",
        "value",
        bad_batch,
        explains=("lr.too-high", "model.exploding-gradient", "lr.no-warmup", "model.dead-units", "data.split-mismatch"),
    ),
)
