"""The facts that a sampled step records about layers: weights, activations, embeddings, attention, normalization."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor

from surefoot.observe.histograms import take_sample
from surefoot.record.facts import (
    ActivationCall,
    DropoutCall,
    EmbeddingCall,
    KeyMaskCall,
    LayerCall,
    NormalizationCall,
    SoftmaxCall,
)
from surefoot.watch.deferred import later, number
from surefoot.watch.key_masks import key_masks
from surefoot.watch.operation_names import ADDED_PRODUCTS, PRODUCTS, RECURRENT
from surefoot.watch.tensor_summary import SAMPLE, finite_or_none, rows_of, sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from surefoot.observe.histograms import Sample
    from surefoot.watch.call_history import CallHistory
    from surefoot.watch.function_recorder import RecordedCall


MANY_CALLS = 8
"""A layer that is called this often in one step may be recurrent."""
MOST_OUTPUTS = 200
"""The maximum number of outputs of one sampled step whose samples are kept."""


def output_name(module: str, operation: str) -> str:
    """The name of the output of an operation inside a module, as used in the run log."""
    return f"{module}.{operation}"


class LayerCalls:
    """The layers of one sampled step."""

    def __init__(self, history: CallHistory, keeps_outputs: bool) -> None:
        self._history, self._keeps_outputs = history, keeps_outputs
        self.layers: list[LayerCall] = []
        self.activations: list[ActivationCall] = []
        self.embeddings: list[EmbeddingCall] = []
        self.dropouts: list[DropoutCall] = []
        self.softmaxes: list[SoftmaxCall] = []
        self.key_masks: list[KeyMaskCall] = []
        self.normalizations: list[NormalizationCall] = []
        self.outputs: list[tuple[str, Sample]] = []
        """With `keeps_outputs`, samples of the outputs of layers and activation functions, for histograms."""

    def layer(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A layer with weights: the scale of its input and of its output."""
        made = out[0] if isinstance(out, tuple) and out else out
        given = _factors(entry.name, args, kwargs)
        if not given or not isinstance(made, Tensor) or not made.is_floating_point():
            return
        parameter = next(
            (
                n
                for value in reversed(given)
                if value.dim() > 1 and (n := self._history.parameter_of(value)) is not None
            ),
            None,
        )
        if parameter is None and entry.name in PRODUCTS:
            return  # a product of activations, as in attention
        first = self._input(entry.name, given)
        is_known = first.is_floating_point() and first.layout is torch.strided
        values = sampled(first).float() if is_known else None
        results = sampled(made).float()
        self._keep_sample(entry, made)
        self.layers.append(
            LayerCall(
                **self._history.place(entry),
                parameter=parameter,
                in_std=_spread(values) if values is not None else None,
                fan_in=_fan_in(entry.name, given),
                in_mean=number(values.mean()) if values is not None else None,
                out_std=_spread(results),
                out_largest=number(results.abs().max()) if made.numel() else 0.0,
                input_requires_grad=first.requires_grad,
                dtype=entry.out_dtype,
                trained_on=entry.out_grad,
                out_mean=number(results.mean()) if made.numel() else None,
                **_recurrence(entry.name, args),
            )
        )

    def _keep_sample(self, entry: RecordedCall, made: Tensor) -> None:
        is_wanted = self._keeps_outputs and len(self.outputs) < MOST_OUTPUTS and made.numel()
        if is_wanted and (sample := take_sample(made)) is not None:
            self.outputs.append((output_name(entry.module, entry.name), sample))

    def _input(self, name: str, given: list[Tensor]) -> Tensor:
        """The input of a layer: the first operand, or the second of a product whose first operand is the weight."""
        if name not in PRODUCTS:
            return given[0]
        return next((value for value in given if self._history.parameter_of(value) is None), given[0])

    def activation(self, entry: RecordedCall, out: Tensor) -> None:
        """An activation function: the share of its units that is saturated or dead."""
        place = self._history.place(entry)
        values = sampled(out).float()
        if not values.numel():
            return
        self._keep_sample(entry, out)
        facts = ActivationCall(
            **place,
            std=_spread(values),
            trained_on=entry.out_grad,
            mean=number(values.mean()),
            largest=number(values.abs().max()),
        )
        if entry.name in ("sigmoid", "sigmoid_"):
            facts = replace(facts, saturated=number(((values < 0.01) | (values > 0.99)).float().mean()))
        elif entry.name in ("tanh", "tanh_", "hardtanh"):
            facts = replace(facts, saturated=number((values.abs() > 0.99).float().mean()))
        elif entry.name in ("relu", "relu_", "relu6", "threshold", "clamp_min") and out.dim() > 1:
            rows = rows_of(out, 1 if out.dim() >= 4 else -1)
            dead = (rows <= 0).all(0)
            facts = replace(
                facts,
                units=rows.shape[1],
                dead=number(dead.sum()),
                rows=len(rows),
                dead_units=later(_places, dead),
            )
        self.activations.append(facts)

    def embedding(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The range of the ids that an embedding looked up."""
        ids = kwargs.get("input", args[0] if args else None)
        table = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if not isinstance(ids, Tensor) or not isinstance(table, Tensor) or not ids.numel():
            return
        entry.notes.ids = ids.detach()
        self.embeddings.append(
            EmbeddingCall(
                **self._history.place(entry),
                rows=table.shape[0],
                lowest=number(ids.min()),
                highest=number(ids.max()),
            )
        )

    def dropout(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call that drops values at random; nothing is recorded if dropout is off."""
        if entry.name == "scaled_dot_product_attention":
            chance, is_on = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0), True
        else:
            chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_on = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        if is_on and isinstance(chance, (int, float)) and chance > 0:
            self.dropouts.append(DropoutCall(**self._history.place(entry), p=float(chance)))

    def softmax(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A softmax: its fully masked rows, and the entropy of the result."""
        given = kwargs.get("input", args[0] if args else None)
        if not isinstance(given, Tensor) or not isinstance(out, Tensor) or given.dim() == 0 or not given.numel():
            return
        dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
        along = dim if isinstance(dim, int) else -1
        rows = rows_of(given, along).float()
        largest = torch.where(torch.isfinite(rows), rows.abs(), -1.0).max()
        entropy = None
        if out.numel():
            chances = rows_of(out, along).float()
            chances = chances if entry.name == "softmax" else chances.exp()
            entropy = number(torch.special.entr(chances.clamp_min(0)).sum(1).nanmean())
        self.softmaxes.append(
            SoftmaxCall(
                **self._history.place(entry),
                shape=list(given.shape),
                trained_on=entry.out_grad,
                fully_masked_rows=number((rows == -math.inf).all(1).sum()),
                largest=later(lambda found: found if found >= 0 else None, largest),
                is_distribution=rows.shape[1] > 1
                and number((rows >= 0).all() & ((rows.sum(1) - 1).abs() < 1e-3).all()),
                entropy=entropy,
                producer=self._history.producer(given),
            )
        )
        if entry.name == "softmax" and along in (-1, given.dim() - 1):
            self.key_masks += key_masks(self._history, entry, given, is_kept=True)

    def attention(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Scaled dot-product attention: its largest logit, its masked rows, its entropy."""
        query, key = args[0], args[1]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        asked, known = _few_queries(query.detach()[:2], key.detach()[:2])
        logits = asked.float() @ known.float().transpose(-1, -2) / math.sqrt(query.shape[-1])
        masked = 0
        if isinstance(mask, Tensor):
            blocked = ~mask if mask.dtype is torch.bool else mask == -math.inf
            masked = number(blocked.all(-1).sum())
        chances = torch.softmax(logits, -1)
        self.softmaxes.append(
            SoftmaxCall(
                **self._history.place(entry),
                shape=list(query.shape),
                largest=number(logits.abs().max()) if logits.numel() else None,
                fully_masked_rows=masked,
                entropy=number(torch.special.entr(chances).sum(-1).mean()),
            )
        )
        if isinstance(mask, Tensor) and mask.dim() > 2:
            self.key_masks += key_masks(self._history, entry, mask, is_kept=True)

    def attention_module(self, entry: RecordedCall, kwargs: dict[str, Any]) -> None:
        """The padding mask of `nn.MultiheadAttention`."""
        self.key_masks += key_masks(self._history, entry, kwargs.get("key_padding_mask"), is_kept=False)

    def normalization(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A normalization: the number of values that each statistic is computed from."""
        given = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
        if not isinstance(given, Tensor) or given.dim() < 2:
            return
        place = self._history.place(entry)
        facts = NormalizationCall(**place, shape=list(given.shape), trained_on=entry.out_grad)
        if entry.name == "batch_norm":
            training = kwargs.get("training", args[5] if len(args) > 5 else False)
            per_statistic = given.numel() // max(1, given.shape[1])
            facts = replace(facts, training=bool(training), per_statistic=per_statistic)
        self.normalizations.append(facts)

    def mark_repeats(self, history: Callable[[int], Iterable[RecordedCall]]) -> None:
        """At the end of the step, record which of the layers that were called often run on their own results."""
        calls: dict[int | None, list[int]] = {}
        for call in self.layers:
            if call.parameter is not None:
                calls.setdefault(call.parameter, []).append(call.index)
        known = {
            number: any(entry.index == places[-2] for entry in history(places[-1]))
            for number, places in calls.items()
            if len(places) >= MANY_CALLS
        }
        self.layers = (
            [replace(call, repeats=known.get(call.parameter)) for call in self.layers] if known else self.layers
        )

    def mark_attention(self, attends: Callable[[SoftmaxCall], bool]) -> None:
        """At the end of the step, record for each softmax whether its result weights values."""
        self.softmaxes = [
            each if each.attends is not None else replace(each, attends=attends(each)) for each in self.softmaxes
        ]


def _factors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a layer multiplies, in order. The summand of `addmm` and similar functions is omitted."""
    if name in ADDED_PRODUCTS:
        args, kwargs = args[1:], {key: value for key, value in kwargs.items() if key != "input"}
    return [value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)]


def _fan_in(name: str, given: list[Tensor]) -> int | None:
    """The number of inputs that each output of a layer sums; `None` for a recurrent layer, where this varies."""
    if name in RECURRENT:
        return None
    if name.startswith("conv") and len(given) > 1:
        return math.prod(given[1].shape[1:])
    return given[0].shape[-1] if given[0].dim() else None


class _Recurrence(TypedDict, total=False):
    time_steps: int
    sequences: int


def _recurrence(name: str, args: tuple[Any, ...]) -> _Recurrence:
    """The number of time steps and sequences of a recurrent layer. With padding, `batch_first` is the last argument."""
    if name not in RECURRENT or len(args) != 9 or not isinstance(args[8], bool) or args[0].dim() != 3:
        return {}
    first, second = args[0].shape[:2]
    return {"time_steps": second, "sequences": first} if args[8] else {"time_steps": first, "sequences": second}


def _spread(values: Tensor) -> float | None:
    return finite_or_none(values.std(correction=0)) if values.numel() >= 2 else None


def _few_queries(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The queries, evenly thinned to at most `SAMPLE` logits, and the keys."""
    if query.dim() < 2 or key.dim() < 2:
        return query, key
    count = math.prod(query.shape[:-1]) * key.shape[-2]
    return (query[..., :: math.ceil(count / SAMPLE), :], key) if count > SAMPLE else (query, key)


def _places(flags: Tensor) -> list[int]:
    """The indices of the flags that are set, at most 4,096."""
    return cast("list[int]", flags.nonzero().reshape(-1)[:4096].tolist())
