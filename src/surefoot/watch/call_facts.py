"""The facts that a sampled step records about single calls of torch functions.

`loss_calls`, `layer_calls` and `numeric_calls` each handle one kind of call. They record numbers and names, not
conclusions. A call is examined right after it returns, while its tensors are alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import is_readable
from surefoot.record.facts import SampledCalls
from surefoot.watch.call_history import CallHistory
from surefoot.watch.deferred import number, own
from surefoot.watch.layer_calls import LayerCalls
from surefoot.watch.loss_calls import LossCalls
from surefoot.watch.numeric_calls import NumericCalls
from surefoot.watch.operation_names import (
    ACTIVATIONS,
    COMPARISONS,
    DROPOUTS,
    LOSSES,
    NORMS,
    PARTIAL,
    RECURRENT,
    RISKY,
    WEIGHT_LAYERS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.function_recorder import FunctionRecorder, RecordedCall


MOST_FACTS = 200
"""The maximum number of facts of each kind in one sampled step."""


class CallFacts:
    """The calls of one sampled step."""

    def __init__(
        self,
        step: int,
        parameter_id: Callable[[Tensor], int | None],
        recorder: FunctionRecorder | None,
        keeps_outputs: bool = False,
    ) -> None:
        """With `keeps_outputs`, `layers` keeps samples of the outputs of layers, for histograms."""
        history = CallHistory(step, parameter_id, recorder)
        self.losses, self.numbers = LossCalls(history), NumericCalls(history)
        self.layers = LayerCalls(history, keeps_outputs)

    def as_facts(self) -> SampledCalls:
        """All facts; long lists are cut."""
        losses, layers, numbers = self.losses, self.layers, self.numbers
        return SampledCalls(
            losses=losses.losses[:MOST_FACTS],
            differences=losses.differences[:MOST_FACTS],
            layers=layers.layers[:MOST_FACTS],
            activations=layers.activations[:MOST_FACTS],
            embeddings=layers.embeddings[:MOST_FACTS],
            dropouts=layers.dropouts[:MOST_FACTS],
            softmaxes=layers.softmaxes[:MOST_FACTS],
            key_masks=layers.key_masks[:MOST_FACTS],
            products=losses.products[:MOST_FACTS],
            single_products=losses.single_products[:MOST_FACTS],
            overlaps=losses.overlaps[:MOST_FACTS],
            ratios=losses.ratios[:MOST_FACTS],
            risky=numbers.risky[:MOST_FACTS],
            normalizations=layers.normalizations[:MOST_FACTS],
            folded_ids=numbers.folded_ids[:MOST_FACTS],
            overflows=numbers.overflows[:],
            orders=numbers.orders[:MOST_FACTS],
        )

    def take_evaluated(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record a loss, an accuracy or dropout in a block without gradients. No tensor is kept: no graph does."""
        with WithoutHooks():
            if entry.name in LOSSES:
                self.losses.loss(entry, args, kwargs, out)
                self.losses.drop_labels()
            elif entry.name in COMPARISONS:
                self.losses.comparison(entry, args)
                self.losses.drop_labels()
            elif entry.name in DROPOUTS:
                self.layers.dropout(entry, args, kwargs)

    def take(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record the facts of one call."""
        name = entry.name
        if _has_sparse(out) or (_has_sparse(*args) and name not in WEIGHT_LAYERS):
            return  # sparse tensors have no dense values to read
        if name in ("mul", "div") and len(args) > 1:
            _note_factor(entry, args)
        with WithoutHooks():
            if name in LOSSES:
                self.losses.loss(entry, args, kwargs, out)
            elif name in ACTIVATIONS and isinstance(out, Tensor) and out.is_floating_point():
                self.layers.activation(entry, out)
            elif name in WEIGHT_LAYERS or name in RECURRENT:
                self.layers.layer(entry, args, kwargs, out)
            elif name == "embedding":
                self.layers.embedding(entry, args, kwargs)
            elif name in ("softmax", "log_softmax"):
                self.layers.softmax(entry, args, kwargs, out)
            elif name == "scaled_dot_product_attention":
                self.layers.attention(entry, args, kwargs, out)
            elif name == "multi_head_attention_forward":
                self.layers.attention_module(entry, kwargs)
            elif name in ("sub", "rsub"):
                self.losses.difference(entry, args, out)
            elif name == "mul":
                self.losses.product(entry, args)
            elif name == "div":
                self.losses.overlap(entry, args)
            elif name in ("min", "minimum", "max", "maximum"):
                self.losses.bounded(entry)
            elif name == "exp":
                self.losses.ratio(entry, out)
            elif name in DROPOUTS:
                self.layers.dropout(entry, args, kwargs)
            elif name in NORMS:
                self.layers.normalization(entry, args, kwargs)
            elif name in ("clamp", "remainder", "fmod", "__mod__", "clip"):
                self.numbers.folded_ids_of(entry, args, out)
            elif name in ("getitem", "index_select"):
                self.numbers.order(args, kwargs)
            if entry.out_dtype == "float16" and isinstance(out, Tensor):
                self.numbers.overflow(entry, args, out)
            if not entry.out_grad and entry.name.rstrip("_") in PARTIAL:
                self.numbers.domain(entry, args, kwargs, out)
            if name in RISKY and entry.out_grad and isinstance(out, Tensor) and out.is_floating_point():
                self.numbers.risk(entry, args, out)


def _has_sparse(*values: Any) -> bool:
    """Whether one of the values is a tensor in a sparse layout."""
    return any(isinstance(value, Tensor) and value.layout is not torch.strided for value in values)


def _note_factor(entry: RecordedCall, args: tuple[Any, ...]) -> None:
    """Record the number that a call multiplied or divided by, if there is one."""
    constant = next((value for value in args if isinstance(value, (int, float))), None)
    if constant:
        entry.notes.constant = float(constant) if entry.name == "mul" else 1.0 / constant
    elif entry.name == "div" and isinstance(args[1], Tensor):
        with WithoutHooks():
            divisor = args[1]
            if divisor.numel() == 1 and not divisor.requires_grad and is_readable(divisor):
                entry.notes.divisor = number(own(divisor))
