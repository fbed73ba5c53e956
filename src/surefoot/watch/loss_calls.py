"""The facts that a sampled step records about losses: loss functions, and losses and ratios written by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from surefoot.observe.readable import is_readable
from surefoot.record.facts import DifferenceCall, LossCall, OverlapCall, ProductCall, RatioCall
from surefoot.watch.deferred import later, number, own, reads_at_once
from surefoot.watch.operation_names import BINARY_LOSSES, CHOICES, CLASS_LOSSES, DISTANCE_LOSSES, VIEWS
from surefoot.watch.tensor_summary import (
    as_distribution,
    columns_of,
    distance_of_rows,
    label_counts,
    rows_of,
    sampled,
    summary_of,
)
from surefoot.watch.token_alignment import alignments

if TYPE_CHECKING:
    from surefoot.watch.call_history import CallHistory
    from surefoot.watch.function_recorder import RecordedCall

MOST_DIFFERENCES = 50
"""The maximum number of differences, products and ratios recorded in one step, for each kind."""
MOST_SINGLE = 8
"""The maximum number of log-probabilities recorded in one step that are weighted by a single number each."""
_LOG_PROBABILITIES = {"log_softmax", "log_prob", "gather", "logsumexp", "log", "logsigmoid"}
TARGETS_KEPT = 4
"""The number of losses at the end of a step whose targets are kept for later measurements."""
MOST_SPREAD = 1 << 16
"""The approximate number of values on a device from which the spread of the units is computed."""
MOST_LABELS = 1 << 20
"""The maximum number of labels of one loss that are counted; of more, a sample is used."""


class KeptTarget(NamedTuple):
    """The part of a loss's target that later measurements may need."""

    shape: torch.Size
    few: Tensor
    """The first values; a copy."""
    labels: Tensor | None
    """The whole target, if it consists of labels; kept until the backward, as the graph of the loss keeps it."""


class _WeightedProbability(NamedTuple):
    """A target that probabilities were multiplied by."""

    values: tuple[int, int]
    """Where its values are, and how many."""
    binary: bool
    """Whether all are 0 or 1."""


class LossCalls:
    """The losses of one sampled step."""

    def __init__(self, history: CallHistory) -> None:
        self._history = history
        self.losses: list[LossCall] = []
        self.differences: list[DifferenceCall] = []
        self.products: list[ProductCall] = []
        self.single_products: list[ProductCall] = []
        self.overlaps: list[OverlapCall] = []
        self._weighted: dict[int, _WeightedProbability] = {}
        self.ratios: list[RatioCall] = []
        self.targets: dict[int, KeptTarget] = {}
        """The targets of the last loss calls during the step, by the index of the call."""

    def loss(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A call of a loss function: its inputs, its target, and whether they are consistent."""
        given = kwargs.get("input", args[0] if args else None)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if not isinstance(given, Tensor) or not isinstance(target, Tensor):
            return
        facts = LossCall(
            **self._history.place(entry),
            trained_on=entry.out_grad,
            reduction=kwargs.get("reduction", "mean") if not isinstance(out, Tensor) or out.dim() == 0 else "none",
            input=summary_of(given),
            target=summary_of(target),
            producer=self._history.producer(given),
            same_shape=list(given.shape) == list(target.shape),
            value=number(own(out)) if isinstance(out, Tensor) and out.dim() == 0 else None,
            target_from_model=self._history.is_of_model(target),
        )
        self._keep_target(entry.index, target.detach())
        if entry.name in CLASS_LOSSES and given.dim() >= 1 and given.numel():
            facts = _with_classes(facts, given, target, kwargs)
            aligned = alignments(self._history.recorder, target, facts.ignore_index or 0, given)
            facts = replace(facts, tokens=aligned)
        elif entry.name in BINARY_LOSSES and given.numel():
            facts = _with_binary(facts, given, target, kwargs)
        elif entry.name in DISTANCE_LOSSES and given.numel() and target.numel():
            facts = replace(facts, **_bounds(given, target), target_variance=_variance(target))
            facts = replace(facts, constant_loss=_constant_loss(entry.name, target, kwargs))
        elif entry.name in ("kl_div", "ctc_loss") and given.dim() > 1:
            facts = replace(facts, distribution=as_distribution(given, -1))
        self.losses.append(facts)

    def comparison(self, entry: RecordedCall, args: tuple[Any, ...]) -> None:
        """Chosen classes compared with labels, as where an evaluation counts right answers without a loss."""
        if len(args) < 2 or not all(isinstance(each, Tensor) and not each.is_floating_point() for each in args[:2]):
            return
        made = [self._history.producer(each) for each in args[:2]]
        chooses = [call is not None and call.op in CHOICES for call in made]
        if chooses[0] == chooses[1] or args[0].shape != args[1].shape or not args[0].numel():
            return
        chosen, target = (args[0], args[1]) if chooses[0] else (args[1], args[0])
        facts = LossCall(
            **self._history.place(entry),
            trained_on=False,
            reduction="none",
            input=summary_of(chosen),
            target=summary_of(target),
            producer=made[chooses.index(True)],
            same_shape=True,
            value=None,
            target_from_model=self._history.is_of_model(target),
        )
        self._keep_target(entry.index, target.reshape(-1))
        self.losses.append(_with_labels(facts, target, chosen, -100, torch.full((), float("nan"))))

    def _keep_target(self, index: int, target: Tensor) -> None:
        if target.numel() > MOST_LABELS:
            return
        is_label = not target.is_floating_point()
        self.targets[index] = KeptTarget(target.shape, target.reshape(-1)[:64].clone(), target if is_label else None)
        if len(self.targets) > TARGETS_KEPT:
            del self.targets[next(iter(self.targets))]

    def drop_labels(self) -> None:
        """Drop the labels: a backward begins, which frees the tensors of the graph."""
        self.targets = {index: target._replace(labels=None) for index, target in self.targets.items()}

    def difference(self, entry: RecordedCall, args: tuple[Any, ...], out: Any) -> None:
        """A prediction minus a target, as in a loss written by hand."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return
        given, target = (args[0], args[1]) if args[0].requires_grad else (args[1], args[0])
        if not given.requires_grad or target.requires_grad or not isinstance(out, Tensor) or given.numel() == 0:
            return
        if len(self.differences) >= MOST_DIFFERENCES or target.numel() == 0:
            return
        self._keep_target(entry.index, target.detach())
        self.differences.append(
            DifferenceCall(
                **self._history.place(entry),
                input=summary_of(given),
                target=summary_of(target),
                grown=out.numel() > max(given.numel(), target.numel()),
                producer=self._history.producer(given),
                target_history=sorted(self._history.names(target, 12))[:12],
                **_bounds(given, target),
            )
        )

    def product(self, entry: RecordedCall, args: tuple[Any, ...]) -> None:
        """A log-probability times something without a gradient: an advantage, or a target."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return
        given, other = (args[0], args[1]) if args[0].requires_grad else (args[1], args[0])
        if not given.requires_grad or other.requires_grad or not other.numel():
            return
        self._probability_weighted(entry, given, other)
        products = self.products if other.numel() > 1 else self.single_products
        if len(products) >= (MOST_DIFFERENCES if other.numel() > 1 else MOST_SINGLE):
            return
        names = self._history.names(given, 40)
        if not names & {"log_softmax", "logsumexp", "log_prob", "log", "logsigmoid", "exp", "cross_entropy"}:
            return
        values = sampled(other).float()
        products.append(
            ProductCall(
                **self._history.place(entry),
                history=sorted(names & {"log_softmax", "log_prob", "exp", "log", "logsumexp", "cross_entropy"}),
                other=summary_of(other),
                other_binary=number(((values == 0) | (values == 1)).all()),
                negated=self._is_negated(given),
                uncentred=summary_of(raw) if (raw := self._before_centring(other)) is not None else None,
            )
        )

    def _before_centring(self, values: Tensor) -> Tensor | None:
        """What values were before their mean was subtracted, as with rewards that became advantages."""
        recorder = self._history.recorder
        index = recorder.maker(values) if recorder is not None else None
        is_centred = False
        for _ in range(12):
            if recorder is None or index is None:
                return None
            entry = recorder.entries[index]
            is_centred = is_centred or (
                entry.name == "sub" and any(recorder.entries[made].name == "mean" for made in entry.inputs[1:])
            )
            given = entry.taken[0]() if entry.taken else None
            if is_centred and given is not None:
                return given if given.numel() == values.numel() else None
            if not is_centred and entry.name not in VIEWS | {"div", "mul", "clamp"}:
                return None
            index = next(iter(entry.inputs), None)  # of a temporary tensor, what it was a view of
            if is_centred and entry.name != "sub" and entry.name not in VIEWS:
                return None
        return None

    def bounded(self, entry: RecordedCall) -> None:
        """The smaller, or larger, of two results: of a product and the same with a clipped ratio, as PPO has."""
        name = {"min": "minimum", "max": "maximum"}.get(entry.name, entry.name)
        mine = [at for at, product in enumerate(self.products) if product.index in entry.inputs]
        if len(mine) == len(entry.inputs) == 2:
            for at in mine:
                self.products[at] = replace(self.products[at], bounded_by=name)

    def _is_negated(self, given: Tensor) -> bool | None:
        """Whether the sign of a log-probability was changed since it was computed; `None` if it cannot be followed."""
        recorder = self._history.recorder
        index = recorder.maker(given) if recorder is not None else None
        is_negated = False
        for _ in range(12):
            if recorder is None or index is None:
                return None
            entry = recorder.entries[index]
            if entry.name in _LOG_PROBABILITIES:
                return is_negated
            if entry.name == "neg" or (entry.name == "mul" and (entry.notes.constant or 0.0) < 0):
                is_negated = not is_negated
            elif entry.name not in VIEWS and not (entry.name == "mul" and entry.notes.constant is not None):
                return None
            ahead = [made for made in entry.inputs if recorder.entries[made].out_grad]
            index = ahead[0] if ahead else None
        return None

    def overlap(self, entry: RecordedCall, args: tuple[Any, ...]) -> None:
        """A sum of probabilities times targets, divided by the sums of both."""
        recorder = self._history.recorder
        if recorder is None or len(self.overlaps) >= MOST_DIFFERENCES or len(args) < 2 or not self._weighted:
            return
        above, below = [recorder.maker(each) if isinstance(each, Tensor) else None for each in args[:2]]
        if above is None or below is None or not recorder.entries[below].out_grad:
            return
        sums = [past for past in recorder.history(below, 12) if past.name != "mul" or not any(past.grads)]
        summed = {_values_of(tensor) for past in sums for ref in past.taken if (tensor := ref()) is not None}
        for past in recorder.history(above, 12):
            known = self._weighted.get(past.index)
            if known is not None and known.values in summed:
                place = self._history.place(past)
                self.overlaps.append(OverlapCall(**place, ratio_site=entry.site, binary=known.binary))

    def _probability_weighted(self, entry: RecordedCall, given: Tensor, target: Tensor) -> None:
        """A probability times a target. The graph keeps the target's memory until the backward."""
        made = self._history.producer(given)
        if made is None or made.op not in ("sigmoid", "softmax") or self._history.is_of_model(target):
            return
        if len(self._weighted) < MOST_DIFFERENCES:
            some = sampled(target)
            binary = number(((some == 0) | (some == 1)).all())
            self._weighted[entry.index] = _WeightedProbability(_values_of(target), binary)

    def ratio(self, entry: RecordedCall, out: Any) -> None:
        """exp of a difference of log-probabilities: an importance ratio."""
        recorder = self._history.recorder
        if recorder is None or not entry.inputs or not isinstance(out, Tensor) or len(self.ratios) >= MOST_DIFFERENCES:
            return
        before = recorder.entries[entry.inputs[0]]
        nearest = [past.name for past in recorder.history(before.index, 4)]
        passed = before.name in ("sub", "clamp", "cumsum", "sum", "mean") or before.name in VIEWS
        if not passed or "sub" not in nearest or not entry.out_grad:
            return
        names = {past.name for past in recorder.history(before.index, 60)}
        if not names & {"log_softmax", "log_prob", "logsumexp", "gather", "log"}:
            return
        values = sampled(out).float()
        self.ratios.append(
            RatioCall(
                **self._history.place(entry),
                largest=number(values.max()),
                mean=number(values.mean()),
                kl=number((values - 1 - values.log()).mean()),
                count=values.numel(),
            )
        )


def _values_of(tensor: Tensor) -> tuple[int, int]:
    """The place and the number of a tensor's values, which its views share."""
    has_place = tensor.layout is torch.strided and is_readable(tensor)
    return tensor.data_ptr() if has_place else id(tensor), tensor.numel()


def _with_classes(facts: LossCall, given: Tensor, target: Tensor, kwargs: dict[str, Any]) -> LossCall:
    """Add the facts of a classification loss: the distribution of its input, its labels and its predictions."""
    dim = 1 if given.dim() > 1 else 0
    ignore = int(kwargs.get("ignore_index", -100))
    facts = replace(
        facts,
        distribution=as_distribution(given, dim),
        ignore_index=ignore,
        weighted=kwargs.get("weight") is not None,
        smoothing=float(kwargs.get("label_smoothing", 0.0)),
    )
    if target.is_floating_point():
        return facts
    chosen = given.detach().argmax(dim)
    if chosen.shape != target.shape:
        return facts
    return _with_labels(facts, target, chosen, ignore, _unit_spread(given, target, dim, ignore))


def _with_labels(facts: LossCall, target: Tensor, chosen: Tensor, ignore: int, spread: Tensor) -> LossCall:
    """Add what is known about labels and the classes that were chosen instead."""
    found = later(
        partial(_label_facts, target.numel(), ignore),
        own(sampled(target, MOST_LABELS)),
        sampled(chosen, MOST_LABELS),
        *_valid_labels(target, ignore),
        spread,
    )
    names = _LabelFacts.__annotations__
    return replace(facts, **{name: later(itemgetter(name), found) for name in names})


def _valid_labels(target: Tensor, ignore: int) -> tuple[Tensor, Tensor, Tensor]:
    """The number of labels that are not ignored, the lowest and the highest of them; undefined if there are none."""
    if not target.numel():
        return (torch.zeros((), dtype=torch.int64),) * 3
    valid = target != ignore
    ends = torch.iinfo(target.dtype) if target.dtype is not torch.bool else torch.iinfo(torch.uint8)
    labels = target if target.dtype is not torch.bool else target.to(torch.uint8)
    low, high = torch.where(valid, labels, ends.max).min(), torch.where(valid, labels, ends.min).max()
    return valid.sum(), low, high


def _unit_spread(given: Tensor, target: Tensor, dim: int, ignore: int) -> Tensor:
    """The mean standard deviation of a unit over the rows whose label counts; of large tensors, over a sample."""
    rows = rows_of(given, dim)
    labels = target.detach().reshape(-1)
    valid = labels[:: distance_of_rows(len(labels), rows.shape[1])] != ignore
    if not reads_at_once(rows):  # a device's memory may be nearly full: fewer units
        rows = rows[:, :: max(1, rows.numel() // MOST_SPREAD)]
    rows = rows.float()
    if reads_at_once(rows):
        kept = rows[valid]
        return kept.std(0).mean() if len(kept) > 1 else rows.new_full((), float("nan"))
    count, mask = valid.sum(), valid[:, None]
    mean = torch.where(mask, rows, 0).sum(0) / count
    spread = (torch.where(mask, rows - mean, 0).square().sum(0) / (count - 1)).sqrt()
    return torch.where(valid.all(), rows.std(0), spread).mean()  # the former is exact for identical rows


class _LabelFacts(TypedDict):
    valid: int
    targets: int
    labels: dict[str, int] | None
    label_range: tuple[int, int] | None
    predicted: dict[str, int] | None
    accuracy: float | None
    unit_spread: float | None


def _label_facts(
    targets: int, ignore: int, target: Tensor, chosen: Tensor, valid: int, low: int, high: int, spread: float
) -> _LabelFacts:
    """The facts about labels and predictions, which are on the host now."""
    kept = target != ignore
    labels = target[kept]
    has_any = bool(valid and len(labels))
    return {
        "valid": valid,
        "targets": targets,
        "labels": label_counts(labels) if valid <= MOST_LABELS else None,
        "label_range": (low, high) if has_any else None,
        "predicted": label_counts(chosen[kept]) if has_any else None,
        "accuracy": float((chosen[kept] == labels).float().mean()) if has_any else None,
        "unit_spread": spread if has_any and valid > 1 else None,
    }


def _with_binary(facts: LossCall, given: Tensor, target: Tensor, kwargs: dict[str, Any]) -> LossCall:
    """Add the facts of a binary loss: whether its inputs are probabilities, its labels and its predictions."""
    values = sampled(given)
    inside = (values >= 0) & (values <= 1)
    hard = (values > (0.5 if facts.op == "binary_cross_entropy" else 0)).float()
    return replace(
        facts,
        inside_unit=number(inside.float().mean()),
        labels=later(label_counts, own(target.reshape(-1))) if target.numel() <= MOST_LABELS else None,
        predicted_share=number(hard.mean()),
        constant_loss=_constant_entropy(target),
        weighted=any(kwargs.get(key) is not None for key in ("weight", "pos_weight")),
    )


def _variance(target: Tensor) -> float | None:
    """The variance of the targets over the batch, averaged over the units."""
    if not target.dim() or len(target) <= 1:
        return None
    variance: float = number(columns_of(target).float().var(0, correction=0).mean())
    return variance


def _constant_entropy(target: Tensor) -> float | None:
    """The binary cross-entropy of the best constant answer, one per column, if a row has several targets."""
    if target.dim() < 2 or len(target) <= 1 or target.numel() == len(target):
        return None
    share = columns_of(target).float().mean(0)
    entropy = torch.special.entr(share) + torch.special.entr(1 - share)
    constant: float = number(entropy.mean())
    return constant


def _constant_loss(op: str, target: Tensor, kwargs: dict[str, Any]) -> float | None:
    """The loss of the best constant answer, one per column, as if the constant had been chosen from other rows."""
    if op == "mse_loss" or not target.dim() or len(target) <= 1:
        return None
    columns = columns_of(target).float()
    middle = columns.sort(0).values[len(columns) // 2]  # `median` has no deterministic form on CUDA
    errors = [(columns - middle).abs()]
    if op != "l1_loss":
        bend = float(kwargs.get("beta" if op == "smooth_l1_loss" else "delta", 1.0))
        errors.append((columns - columns.mean(0)).abs())
        scale = 1.0 if op == "smooth_l1_loss" else bend
        errors = [
            scale * torch.where(each < bend, each.square() / (2 * bend or 1.0), each - bend / 2) for each in errors
        ]
    means = torch.stack([each.mean() for each in errors])
    constant: float = number(means.min() * (len(columns) / (len(columns) - 1)))
    return constant


class _Bounds(TypedDict):
    above: float
    below: float


def _bounds(given: Tensor, target: Tensor) -> _Bounds:
    """The share of the targets outside the range of the predictions."""
    low, high = torch.aminmax(given.detach())
    goals = sampled(target).float()
    return {"above": number((goals > high).float().mean()), "below": number((goals < low).float().mean())}
