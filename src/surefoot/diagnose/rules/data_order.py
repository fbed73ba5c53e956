"""The order of the data: sorted rows and repeated batches."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING, NamedTuple

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import (
    class_count,
    entropy,
    has_print,
    label_batches,
    main_line,
    training_loader,
    where_of,
)
from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.diagnose.findings import Evidence
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LoaderFacts


# ── sorted rows ──────────────────────────────────────────────────────────────────────────────────────────────────────


def unshuffled(run: RecordedRun) -> Claim | None:
    """Batches with few labels each, in an order: similar to the next one, or with rising labels."""
    batches = [batch for batch in label_batches(run) if sum(batch.values()) > 1]
    if run.adversarial:
        return None
    if len(batches) < 10:
        return _sorted_targets(run)
    everything: Counter[str] = Counter()
    for batch in batches:
        everything.update(batch)
    if len(everything) < 2:
        return _one_label(run, everything) if run.facts.preflight is not None else None
    found = mean(entropy(batch) for batch in batches)
    mixed = _mixed_entropy(batches)
    near, far = _neighbour_overlap(batches), _far_overlap(batches)
    if mixed < 0.05 or found > 0.6 * mixed or not (_are_alike(batches, near) or _rise(batches, found / mixed)):
        return None
    curve = run.curve
    loader = training_loader(run)
    where = where_of(loader.site if loader is not None and loader.sampler == "SequentialSampler" else None)
    kinds = mean(len(batch) for batch in batches)
    return Claim(
        0.93,
        f"Rows arrive sorted by label: a batch of {median(sum(b.values()) for b in batches):g} holds {kinds:.1f} of "
        f"{len(everything)} labels on average (label entropy {found:.2f}; mixed batches would have {mixed:.2f}), "
        f"neighbouring batches share {near:.0%} of their labels and distant ones {far:.0%}.",
        step=0,
        where=where,
        evidence={
            "batch_entropy": found,
            "mixed_entropy": mixed,
            "neighbour_overlap": near,
            "distant_overlap": far,
            "batches": len(batches),
            "labels": len(everything),
            "loss_swing": [min(curve.finite[-50:], default=None), max(curve.finite[-50:], default=None)],
        },
        fixes=("Pass `shuffle=True` to the DataLoader.",) if where else (),
    )


def _one_label(run: RecordedRun, labels: Counter[str]) -> Claim | None:
    """Before training: the first batches hold a single label, and the model has outputs for more."""
    classes = max(map(class_count, run.sampled.training_losses()), default=0)
    if classes < 2:
        return None
    (label, count), *_ = labels.items()
    return Claim(
        0.7,
        f"All {count:,} labels seen are {label}, and the model has {classes} outputs.",
        step=0,
        evidence={"labels": count, "classes": classes},
        severity="warning",
    )


def _overlap(a: Counter[str], b: Counter[str]) -> float:
    whole_a, whole_b = sum(a.values()), sum(b.values())
    return sum(min(a[label] / whole_a, b[label] / whole_b) for label in a)


def _neighbour_overlap(batches: list[Counter[str]]) -> float:
    return mean(_overlap(a, b) for a, b in pairwise(batches))


def _are_alike(batches: list[Counter[str]], near: float) -> bool:
    """Whether neighbouring batches share clearly more labels than after shuffling the order of the batches.

    They share few if a batch is as large as a class.
    """
    chooser, drawn = random.Random(0), []
    for _ in range(20):
        drawn.append(_neighbour_overlap(chooser.sample(batches, len(batches))))
    return near > mean(drawn) + max(0.1, 5 * pstdev(drawn))


def _rise(batches: list[Counter[str]], share: float) -> bool:
    """Whether nearly every batch is one class, and the classes come in order: 0, 1, 2, and again from 0."""
    labels = [batch.most_common(1)[0][0] for batch in batches]
    if share > 0.35 or len(set(labels)) < 3 or not all(label.removeprefix("-").isdecimal() for label in labels):
        return False
    return mean(float(int(b) >= int(a)) for a, b in pairwise(labels)) > 0.8 - 1 / len(labels)


def _far_overlap(batches: list[Counter[str]]) -> float:
    chooser = random.Random(0)
    pairs = [(chooser.randrange(len(batches)), chooser.randrange(len(batches))) for _ in range(400)]
    distant = [(a, b) for a, b in pairs if abs(a - b) > 1]
    return mean(_overlap(batches[a], batches[b]) for a, b in distant)


def _mixed_entropy(batches: list[Counter[str]]) -> float:
    """The mean label entropy that the same batches would have if their rows were mixed."""
    rows = [label for batch in batches for label in batch.elements()]
    random.Random(0).shuffle(rows)
    found, start = [], 0
    for batch in batches:
        size = sum(batch.values())
        found.append(entropy(Counter(rows[start : start + size])))
        start += size
    return mean(found)


class BatchTargets(NamedTuple):
    """The targets of one batch."""

    fingerprint: int | None
    mean: float
    std: float


def _sorted_targets(run: RecordedRun) -> Claim | None:
    """Targets of a regression that rise (or fall) from batch to batch through the whole epoch."""
    notes = [
        BatchTargets(note.input_print or note.target_print, note.target_mean, note.target_std or 0.0)
        for note in main_line(run)
        if note.target_mean is not None
    ]
    loader = training_loader(run)
    if len(notes) < 10 and loader is not None:
        notes = [
            BatchTargets(b.fingerprint, b.target_mean, b.target_std or 0.0)
            for b in run.facts.batches
            if b.loader == loader.number and b.target_mean is not None and b.grad_mode
        ]
    period = _period([note.fingerprint for note in notes]) or len(notes)
    epoch = notes[:period]
    if len(epoch) < 8:
        return None
    means, spreads = [note.mean for note in epoch], [note.std for note in epoch]
    between = mean([(m - mean(means)) ** 2 for m in means])
    share = between / (between + mean([s * s for s in spreads]) + 1e-12)
    rising = mean([float(b > a) for a, b in pairwise(means)])
    if share < 0.7 or 0.1 < rising < 0.9:
        return None
    return Claim(
        0.85,
        f"Rows arrive sorted by target: over {len(epoch)} batches the mean target goes from {means[0]:.3g} to "
        f"{means[-1]:.3g}, {'rising' if rising > 0.5 else 'falling'} in {max(rising, 1 - rising):.0%} of the steps, "
        f"and {share:.0%} of the variance lies between batches instead of within them.",
        step=0,
        where=where_of(loader.site if loader is not None else None),
        evidence={"first_mean": means[0], "last_mean": means[-1], "share_between": share, "batches": len(epoch)},
    )


# ── batches that come again ──────────────────────────────────────────────────────────────────────────────────────────


def repeated_batches(run: RecordedRun) -> Claim | None:
    """Exactly the same batches again, although the script draws them again."""
    if run.steps < 6 and run.facts.preflight is None:
        return None
    found = _always_first_batch(run) or _one_batch_held(run) or _one_batch_varied(run) or _weights_of_classes(run)
    return found or _same_within_epoch(run) or _same_shuffle(run)


def _always_first_batch(run: RecordedRun) -> Claim | None:
    """`next(iter(loader))`: every step opens the loader again and takes its first batch."""
    for loader in run.facts.loaders:
        notes = [b for b in run.facts.batches if b.loader == loader.number and b.grad_mode]
        opened = {b.iteration for b in notes}
        if loader.batches == 1 or len(notes) < 6 or len(notes) > 1.2 * len(opened):
            continue
        kinds = Counter(b.fingerprint for b in notes)
        if len(opened) < 0.5 * run.steps or len(kinds) > max(1, 0.1 * len(notes)):
            continue
        size = notes[0].size
        known = loader.rows
        rows = f"{size * len(kinds)} of {known:,} rows" if known else f"{len(kinds)} batch{'es' * (len(kinds) > 1)}"
        return Claim(
            0.96,
            f"The loader{at_place(loader.site)} was opened {loader.iterations} times and returned {loader.drawn} "
            f"batches, {len(kinds)} of them different: every step uses the first batch again, and only {rows} are ever "
            f"trained on.",
            step=1,
            where=where_of(loader.site),
            evidence={"opened": loader.iterations, "drawn": loader.drawn, "different": len(kinds)},
            fixes=("Create the iterator once, before the loop, and call `next` on it; create a new one when it ends.",),
        )
    return None


def _weights_of_classes(run: RecordedRun) -> Claim | None:
    """A `WeightedRandomSampler` that got one weight per class: it draws the first rows of the data set only.

    One weight less or more, or the weights of a part of the rows that was split off, do not look like this: here each
    of the rows comes many times within a pass.
    """
    for loader in run.facts.loaders:
        rows, weights = loader.rows, loader.weights
        drawn = (loader.batches or 0) * (loader.batch_size or 0)
        if not rows or not weights or weights > 0.1 * rows or drawn < 10 * weights:
            continue
        if not any(b.loader == loader.number and b.grad_mode for b in run.facts.batches):
            continue
        seen = max((len(held.prints) for held in run.facts.step_data.rows.values()), default=0)
        if not 0 < seen <= weights:
            continue  # each index may stand for many rows, such as those of one source of a mixture
        return Claim(
            0.95,
            f"The `WeightedRandomSampler` of the loader{at_place(loader.site)} has {weights} weights for a data set of "
            f"{rows:,} rows: only the first {weights} rows are ever trained on, each about {drawn / weights:.0f} times "
            "in a pass.",
            step=0,
            where=where_of(loader.site),
            evidence={"weights": weights, "rows": rows, "drawn_in_a_pass": drawn},
            fixes=("Give the sampler one weight for each row, not for each class: `class_weights[labels]`.",),
        )
    return None


def _one_batch_held(run: RecordedRun) -> Claim | None:
    """One batch is drawn from a loader before the loop, and every step trains on it; other rows are evaluated.

    A script that only checks whether a model can learn one batch does not evaluate it on other rows.
    """
    batches = run.facts.step_data.batches
    prints = {note.input_print for note in batches}
    sources = [held for held in run.facts.loaders if held.drawn == 1 and (held.batches or 0) > 1]
    if len(sources) != 1 or len(batches) < 20 or len(prints) != 1 or None in prints:
        return None
    known = {row for held in run.facts.step_data.rows.values() for row in held.prints}
    others = [call for call in run.evaluations() if call.rows and not known & set(call.rows)]
    loader, size = sources[0], batches[0].size
    if not others or not known:
        return None
    rows = f"{size} of {loader.rows:,} rows" if loader.rows and size else f"1 of {loader.batches} batches"
    return Claim(
        0.9,
        f"One batch was drawn from the loader{at_place(loader.site)}, and all {len(batches)} observed steps train on "
        f"it: only {rows} are ever trained on, and other rows are evaluated{at_place(others[0].site)}.",
        step=batches[1].step,
        where=where_of(loader.site, others[0].site),
        evidence={"drawn": 1, "batches": loader.batches, "steps": len(batches)},
        fixes=("Iterate over the loader in the loop: `for inputs, targets in loader`.",),
    )


def _one_batch_varied(run: RecordedRun) -> Claim | None:
    """One batch is drawn from a loader, and every step trains on it with other noise, as a diffusion model does.

    The inputs differ from step to step. That the batch is meant is concluded from its size and from the lack of any
    other source of rows: a script that draws one batch to look at it takes its rows from somewhere else.
    """
    batches = run.facts.step_data.batches
    drawn = [held for held in run.facts.loaders if held.drawn]
    if len(drawn) != 1 or drawn[0].drawn != 1 or (drawn[0].batches or 0) < 4 or len(batches) < 100:
        return None
    loader = drawn[0]
    sizes = {note.size for note in batches}
    held = {batch.size for batch in run.facts.batches if batch.loader == loader.number}
    prints = {note.input_print for note in batches}
    picked = any(look.calls.orders for look in run.sampled.steps) or bool(run.facts.permutations)
    if sizes != held or len(sizes) != 1 or len(prints) < 0.9 * len(batches) or picked or run.adversarial:
        return None
    rows = f"{next(iter(sizes))} of {loader.rows:,} rows" if loader.rows else f"1 of {loader.batches} batches"
    return Claim(
        0.75,
        f"One batch was drawn from the loader{at_place(loader.site)}, and no other data has its size: all "
        f"{len(batches)} observed steps train on variations of it, that is on {rows}.",
        step=batches[1].step,
        where=where_of(loader.site),
        evidence={"drawn": 1, "batches": loader.batches, "steps": len(batches)},
        severity="warning",
        fixes=("Draw a new batch at every step: `for batch in loader`.",),
    )


def _same_within_epoch(run: RecordedRun) -> Claim | None:
    """Batches that come several times within one pass over a loader, as when each worker reads the whole stream."""
    for loader in run.facts.loaders:
        first = [b for b in run.facts.batches if b.loader == loader.number and b.iteration == 1]
        if len(first) < 6 or not any(b.grad_mode for b in first):
            continue
        counts = Counter(b.fingerprint for b in first)
        again = sum(count for count in counts.values() if count > 1)
        # A sampler that gives each row once can only repeat what the data repeat, or a dataset that ignores its index.
        each_once = loader.rows is not None and loader.sampler in ("RandomSampler", "SequentialSampler")
        most = max(1, 0.02 * len(first)) if each_once else 0.6 * len(first)
        if again < 0.6 * len(first) or len(counts) > most:
            continue
        workers = f" by {loader.workers} workers" if loader.workers > 1 else ""
        return Claim(
            0.9,
            f"Within one pass over the loader{at_place(loader.site)}, {len(first)} batches were drawn{workers} and "
            f"only {len(counts)} of them differ.",
            step=first[0].step,
            where=where_of(loader.site),
            evidence={"drawn": len(first), "different": len(counts), "workers": loader.workers},
            fixes=("Give each worker its own share with `torch.utils.data.get_worker_info()`.",) if workers else (),
        )
    return None


def worker_seeds(run: RecordedRun) -> Claim | None:
    """Workers that return the same batch, one after another, although each got its own indices.

    A stream that is not split between workers repeats its batches too, but has no indices.
    """
    for loader in run.facts.loaders:
        first = [b for b in run.facts.batches if b.loader == loader.number and b.iteration == 1]
        count = loader.workers
        groups = [first[i : i + count] for i in range(0, len(first) - count + 1, count)] if count > 1 else []
        if len(groups) < 3 or loader.rows is None or loader.sampler == "_InfiniteConstantSampler":
            continue
        same = [group for group in groups if len({batch.fingerprint for batch in group}) == 1]
        if len(same) < 0.8 * len(groups) or len({group[0].fingerprint for group in same}) < 0.8 * len(same):
            continue
        return Claim(
            0.93,
            f"The {count} workers of the loader{at_place(loader.site)} return the same batch one after another, in "
            f"{len(same)} of {len(groups)} rounds of the first pass: they draw the same random numbers.",
            step=first[0].step,
            where=where_of(loader.site),
            evidence={"workers": count, "rounds": len(groups), "same": len(same)},
            fixes=(
                "Draw from `torch` or `numpy.random` inside `__getitem__`, which are seeded for each worker; or create "
                "a separate generator for the data set in `worker_init_fn`, from `torch.initial_seed()`.",
            ),
        )
    return None


def _same_shuffle(run: RecordedRun) -> Claim | None:
    """Every epoch has the same batches in the same order, although something should have mixed them."""
    loader = training_loader(run)
    if loader is not None:
        drawn = [b for b in run.facts.batches if b.loader == loader.number and b.grad_mode]
        prints = [b.fingerprint for b in drawn]
    else:
        prints = [hash((note.input_print, note.target_print)) for note in main_line(run) if has_print(note)]
    period = _period(prints)
    if period is None or len(prints) < 2 * period:
        return None
    cause = _reason(run, loader, period)
    if cause is None:
        return None
    epochs = len(prints) // period
    return Claim(
        0.92,
        f"The same {period} batches come in the same order {epochs} times over: {cause.text}.",
        step=period,
        where=where_of(cause.where),
        evidence={"period": period, "epochs": epochs} | cause.evidence,
        fixes=cause.fixes,
    )


def _period(prints: Sequence[int | None]) -> int | None:
    """The number of batches after which the sequence repeats exactly; `None` if it does not."""
    if len(prints) < 4:
        return None
    first = prints[0]
    for position in range(1, len(prints) // 2 + 1):
        if prints[position] == first:
            again = [a == b for a, b in zip(prints, prints[position:], strict=False)]
            if len(again) >= position and mean(again) > 0.95:
                return position
    return None


class Unmixed(NamedTuple):
    """What should have mixed the batches and did not."""

    text: str
    where: str | None
    evidence: Evidence
    fixes: tuple[str, ...]


_SET_EPOCH = ("Call `sampler.set_epoch(epoch)` on a distributed sampler, and do not reseed its generator.",)


def _reason(run: RecordedRun, loader: LoaderFacts | None, period: int) -> Unmixed | None:
    """What should have mixed the batches: a shuffle that was drawn again, or a seed that was set again."""
    for key, steps in run.facts.reseeds.items():
        times = len(set(steps))
        own = key.startswith(("random.Random", "numpy.random.default_rng"))
        ordered = loader is not None and loader.sampler == "SequentialSampler" and loader.rows is not None
        if times >= 3 and (own or not ordered) and (period > 1 or times > 0.5 * run.steps):
            call, _, site = key.partition(" at ")
            return Unmixed(
                f"{call}{at_place(site)} resets the random numbers {len(steps)} times during training",
                site,
                {"reseeded_at": sorted(set(steps))[:8], "call": call},
                ("Seed once, before the first epoch, or add the epoch to the seed.",),
            )
    if period < 2:
        return None
    if loader is not None and loader.shuffles:
        times = loader.iterations
        return Unmixed(
            f"the {loader.sampler} of the loader drew the same order {times} times",
            loader.site,
            {"same_order": times, "sampler": loader.sampler},
            _SET_EPOCH,
        )
    drawn = [
        p for p in run.facts.permutations if p.fingerprint != hash(tuple(range(min(p.length, 32))))
    ]  # not in order
    shuffles = Counter((p.length, p.fingerprint) for p in drawn)
    for (length, print_), times in shuffles.most_common(3):
        steps = sorted({p.step for p in run.facts.permutations if p.fingerprint == print_})
        if times >= 3 and len(steps) >= 2:
            return Unmixed(
                f"the same permutation of {length:,} rows was drawn at least {times} times (in use at steps "
                f"{', '.join(map(str, steps[:4]))})",
                loader.site if loader is not None else None,
                {"same_permutation": times, "steps": steps[:8]},
                _SET_EPOCH,
            )
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "data.unshuffled",
        "value",
        unshuffled,
        # Rows sorted by label come in the same order every time: no shuffle was drawn, rather than the same one.
        explains=(
            "data.class-collapse",
            "lr.too-high",
            "data.labels-uninformative",
            "data.bad-batch",
            "data.repeated-batches",
        ),
    ),
    Rule("data.worker-seeds", "wiring", worker_seeds, explains=("data.repeated-batches", "data.leakage")),
    Rule("data.repeated-batches", "wiring", repeated_batches, explains=("data.leakage", "resume.data-replayed")),
)
