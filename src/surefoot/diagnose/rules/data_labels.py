"""Labels that are independent of the inputs, and predictions that collapse to a few classes."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import (
    are_positions,
    at_chance,
    entropy,
    label_batches,
    reads_long_sequences,
    weights_moved,
    where_of,
)
from surefoot.diagnose.rule import Claim, Rule
from surefoot.watch.operation_names import BINARY_LOSSES, CLASS_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.data_summary import Chance
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LabelControl, LossCall, TokenAlignment

_FOLLOWS = 6.0
"""From this many spreads on, outputs are in the order of the ids: by chance, 3 are rarely exceeded."""


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
    expected = (1 - share) * rows  # the expected number of predictions of the other classes
    if share < 0.7 or expected < 4 or 1 - shown > 0.2 * (1 - share):
        return None
    return Claim(
        0.85,
        f"Since step {late[0].step} class {common} is predicted for {shown:.1%} of the rows{at_place(late[0].site)}, "
        f"although {rare} of {total} rows have another label; in training {share:.1%} of the labels are {common}.",
        step=late[0].step,
        where=where_of(late[0].site),
        evidence={
            "predicted": dict(predicted),
            "labels": dict(labels),
            "prediction_entropy": entropy(predicted),
            "label_entropy": entropy(labels),
        },
        severity="info" if share < 0.9 and _beat_frequencies(late) else "error" if shown > 0.998 else "warning",
        fixes=(f"Weight the rare class about {share / max(1e-9, 1 - share):.0f} times as high in the loss.",),
    )


def _beat_frequencies(notes: list[LossCall]) -> bool:
    """Whether the losses are below those of the class frequencies: rows are distinguished, but none is likely enough.

    So it is with clicks and purchases, where nothing is certain and scores are only compared with each other.
    """
    known = [
        n for n in notes if n.value is not None and n.reduction == "mean" and not n.weighted and n.smoothing is None
    ]
    ratios = [(n.value or 0.0) / level for n in known if (level := entropy(n.labels or {})) > 0]
    return bool(ratios) and median(ratios) < 0.95


def _predictions(note: LossCall) -> dict[str, int]:
    if note.predicted:
        return {str(label): count for label, count in note.predicted.items()}
    if note.predicted_share is None:
        return {}
    count = sum((note.labels or {}).values())
    ones = round(note.predicted_share * count)
    return {"1": ones, "0": count - ones}


def labels_uninformative(run: RecordedRun) -> Claim | None:
    """At chance level although the weights move, and no other method predicts the labels from the inputs either."""
    if run.facts.preflight is not None:
        return _no_better_than_shuffled(run.facts.preflight.label_control)
    stuck = at_chance(run, 0.8)
    if stuck is None or run.nonfinite.seen or run.adversarial or run.steps < 30:
        return None
    moved = weights_moved(run)
    if moved < 0.2 or _are_predicted(run) or reads_long_sequences(run) or _are_compared(run):
        return None
    if _are_positions(run):
        return _unrelated_pairs(run, stuck, moved)
    if _never_spread(run):
        return None
    if (claim := _unrelated_tokens(run, stuck, moved)) is not None:
        return claim
    pairs = known_pairs(run)
    if len(pairs) < 60 or _are_ids(run):
        return None
    verdict = predictability(pairs, stuck.kind == "variance")
    if verdict is None or verdict.score > 3.0:
        return None
    curve = run.curve
    what = "loss of the best constant answer" if stuck.kind == "variance" else "entropy of the labels"
    return Claim(
        0.8 if run.curve.end > 0.9 * stuck.level else 0.65,
        f"The loss ends at {curve.end:.3g}; the chance level is {stuck.level:.3g} (the {what}), although the weights "
        f"moved by about {moved:.1f} times their size; among {len(pairs)} rows the nearest neighbours share a label "
        f"{'hardly' if verdict.found > verdict.shuffled else 'no'} more often than after shuffling the labels "
        f"({verdict.found:.3f} against {verdict.shuffled:.3f}).",
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


def _unrelated_tokens(run: RecordedRun, stuck: Chance, moved: float) -> Claim | None:
    """Labels of sequences that the ids at and before their position say nothing about."""
    seen = [each for call in run.main_sampled.training_losses(*CLASS_LOSSES) for each in (call.tokens or [])[:1]]
    known = [each for each in seen if each.agreement is not None and each.agreement_spread]
    if len(known) < 4:
        return None
    gains = [(each.agreement or 0.0) - (each.agreement_shuffled or 0.0) for each in known]
    scores = [gain / (each.agreement_spread or 1.0) for gain, each in zip(gains, known, strict=True)]
    if median(scores) > 2.0 or max(each.following for each in known) > 0.5:
        return None
    agreement, shuffled = median(each.agreement or 0.0 for each in known), median(_shuffled(each) for each in known)
    return Claim(
        0.8,
        f"The loss ends at {run.curve.end:.3g}; the chance level is {stuck.level:.3g} (the entropy of the labels), "
        f"although the weights moved by about {moved:.1f} times their size; two labels{at_place(stuck.site)} whose own "
        f"and previous ids are the same agree in {agreement:.1%} of the cases, and in {shuffled:.1%} after shuffling: "
        f"the labels do not belong to these sequences, or are in another order.",
        step=0,
        where=where_of(stuck.site, known[0].site),
        evidence={"last_loss": run.curve.end, "chance": stuck.level, "weights_moved": moved}
        | {"agreement": agreement, "agreement_shuffled": shuffled, "calls": len(known)},
    )


def labels_transposed(run: RecordedRun) -> Claim | None:
    """The labels are the ids that follow, with rows and columns swapped, and the outputs are not.

    Outputs that are in the order of the ids depend on the id of their own row.
    """
    seen = [each for call in run.main_sampled.training_losses(*CLASS_LOSSES) for each in (call.tokens or [])[:1]]
    known = [each for each in seen if each.crossed is not None and each.outputs_follow is not None]
    if len(known) < 3 or min(each.crossed or 0.0 for each in known) < 0.8:
        return None
    follows = median(each.outputs_follow or 0.0 for each in known)
    if follows < _FOLLOWS:
        return None
    call = next(call for call in run.main_sampled.training_losses(*CLASS_LOSSES) if call.tokens)
    return Claim(
        0.9,
        f"The labels{at_place(call.site)} are the ids that follow those{at_place(known[0].site)}, but in another "
        f"order: only with rows and columns swapped. The outputs are in the order of the ids (outputs of equal ids are "
        f"more alike by {follows:.0f} spreads than after shuffling), so each is compared with the label of another "
        f"position.",
        step=call.step,
        where=where_of(call.site, known[0].site),
        evidence={"crossed": min(each.crossed or 0.0 for each in known), "outputs_follow": follows}
        | {"calls": len(known)},
        fixes=(
            "Flatten labels and outputs in the same order: remove the transpose of one of them, or add it to both.",
        ),
    )


def _shuffled(each: TokenAlignment) -> float:
    return each.agreement_shuffled or 0.0


def _unrelated_pairs(run: RecordedRun, stuck: Chance, moved: float) -> Claim | None:
    """A contrastive loss that ends where pairs are guessed, although scores could differ and the weights moved."""
    notes = run.main_sampled.training_losses(*CLASS_LOSSES)
    largest = max((max(-n.distribution.min, n.distribution.max) for n in notes if n.distribution), default=0.0)
    hits = [n.accuracy for n in notes if n.accuracy is not None]
    guessed = 1.0 / max(1, median(n.valid or 1 for n in notes))
    if run.curve.end < 0.97 * stuck.level or largest < 0.5 or not hits or median(hits) > 3 * guessed:
        return None
    return Claim(
        0.65,
        f"The loss{at_place(stuck.site)} ends at {run.curve.end:.4g}; the chance level is {stuck.level:.4g} (each row "
        f"is matched at random), although the weights moved by about {moved:.1f} times their size and scores reach "
        f"{largest:.2g}; {median(hits):.1%} of the rows are matched with their partner, and {guessed:.1%} would be by "
        "chance: the two sides of a pair do not belong together.",
        step=0,
        where=where_of(stuck.site),
        evidence={"last_loss": run.curve.end, "chance": stuck.level, "weights_moved": moved}
        | {"matched": median(hits), "matched_by_chance": guessed, "largest_score": largest},
        fixes=("Check that row i of both sides of a batch comes from the same example: shuffle both with one index.",),
    )


def _no_better_than_shuffled(control: LabelControl | None) -> Claim | None:
    """The true labels did not help on other rows, although both copies memorized theirs.

    The same holds if the true labels were as hard to learn as shuffled ones, and other rows do not predict them.
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
    """Whether the outputs are equal for every row: then the model, not the labels, is the cause."""
    spreads = [n.unit_spread for n in run.main_sampled.training_losses() if n.unit_spread is not None]
    return bool(spreads) and median(spreads[-5:]) < 1e-4


def _are_positions(run: RecordedRun) -> bool:
    """Whether each label is the position of its row in the batch, as in contrastive losses: no property of the row."""
    notes = run.main_sampled.training_losses(*CLASS_LOSSES)
    return bool(notes) and all(are_positions(note) for note in notes)


def _are_predicted(run: RecordedRun) -> bool:
    """Whether most predictions of the model are right: then the loss has another reason to be high."""
    notes = [n for n in run.main_sampled.training_losses(*CLASS_LOSSES) if n.accuracy is not None and n.labels]
    late = notes[-5:]
    frequent = [max((n.labels or {}).values()) / sum((n.labels or {}).values()) for n in late]
    return bool(late) and median(n.accuracy or 0.0 for n in late) > max(0.5, 1.5 * median(frequent))


def _are_compared(run: RecordedRun) -> bool:
    """Whether models are given two inputs of one shape: labels belong to both, and neighbours of one are not alike."""
    given = [call.inputs for call in run.main_sampled.trained_model_calls if call.inputs]
    return bool(given) and all(len(each) > 1 and each[0].shape == each[1].shape for each in given)


def _are_ids(run: RecordedRun) -> bool:
    """Whether models are given whole numbers, such as users and items: rows with similar ids are not alike."""
    given = [call.inputs[0].dtype for call in run.main_sampled.trained_model_calls if call.inputs]
    return bool(given) and all(dtype in ("int64", "int32") for dtype in given)


def known_pairs(run: RecordedRun) -> list[tuple[list[float], float]]:
    """A sample of the rows that were trained on, with their labels, at most 600.

    Of rows of different lengths, as in a curriculum, those of the most frequent one.
    """
    seen: dict[tuple[float, ...], float] = {}
    for root in run.main_sampled.backward_calls:
        held = root.pairs
        if held:
            for row, label in zip(held.inputs, held.targets, strict=True):
                seen.setdefault(tuple(row), float(label))
    lengths = Counter(map(len, seen))
    width = max(lengths, key=lambda length: lengths[length], default=0)
    return [(list(row), label) for row, label in seen.items() if len(row) == width][:600]


class Predictability(NamedTuple):
    """How well the nearest neighbours of a row predict its label."""

    found: float
    shuffled: float
    """With the labels shuffled."""
    score: float
    """The difference, in spreads of the shuffled ones; the better of two predictors."""


def predictability(pairs: list[tuple[list[float], float]], continuous: bool) -> Predictability | None:
    """How much better the nearest neighbours of a row predict its label than with the labels shuffled."""
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
    Rule("data.class-collapse", "dynamics", class_collapse),
    Rule(
        "data.labels-uninformative",
        "value",
        labels_transposed,
        explains=("lr.*", "data.class-collapse", "optim.not-learning", "model.*", "fit.*"),
    ),
    Rule("data.labels-uninformative", "dynamics", labels_uninformative, explains=("lr.too-low", "data.class-collapse")),
)
