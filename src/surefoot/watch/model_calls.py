"""Records one call of a model: its inputs, its outputs, and its mode.

No tensor of the script is kept alive. A few values of the first input are copied, if the step has only one call of a
model; outputs are found again by the numbers of their autograd nodes. Only the first few tensors of a call are
described; the recorder follows what happens inside the model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import is_readable
from surefoot.record.facts import FeatureScales, ModelCall
from surefoot.watch import autograd_graph as graph
from surefoot.watch.deferred import later, own
from surefoot.watch.function_recorder import tensors_in
from surefoot.watch.tensor_summary import few_of, finite_or_none, prints_of_rows, summary_of
from surefoot.watch.user_frames import site

if TYPE_CHECKING:
    from surefoot.watch.parameter_registry import ParameterRegistry

MOST_CALLS = 64
"""The maximum number of model calls recorded in one step."""
FEWEST_ROWS = 8
"""Fewer rows are not compared with one another."""
MOST_PRINTS = 256
"""The maximum number of rows of a batch that get a fingerprint."""
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCHNORM = nn.modules.batchnorm._BatchNorm


class Output(NamedTuple):
    """Identifies an output of a model: the number of its autograd node, and its index among the node's results."""

    number: int
    result: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Features(NamedTuple):
    """A few values of a batch."""

    size: int
    """The number of rows of the batch."""
    rows: Tensor
    """At most 64 rows of at most 64 numbers, or of at most 4,096 ids; a copy."""


class Held(NamedTuple):
    """What later measurements need from a call with gradients enabled."""

    call: ModelCall
    features: Features | None
    """The features of the first input, if this is the only call so far."""
    outputs: list[Output]
    shape: torch.Size
    """The shape of the first input; empty if there is none."""
    takes_ids: bool
    """Whether the first input consists of integers."""


class ModelCalls:
    """The model calls of one sampled step."""

    def __init__(self, step: int, registry: ParameterRegistry, marks: object | None, enough: int | None = None) -> None:
        """`marks` is the owner of the numbers of autograd nodes, if outputs must be found later.

        In an evaluation, `enough` is the number of calls after which nothing more needs to be recorded.
        """
        self._enough = enough
        self.last_features: Features | None = None
        """A few values of the first input of the last call of an evaluation …"""
        self.keeps_features = True
        """… while its losses are recorded."""
        self.calls: list[ModelCall] = []
        self.held: list[Held] = []
        self._step, self._registry, self._marks = step, registry, marks
        self._has_backward = False
        self._reached: set[int] = set()
        """The identities of the calls that a backward of the step passed through."""
        self._entered: set[int] = set()
        """The identities of the models that were added to the registry in this step."""
        self._several = len({number for held in registry.parameters for number in held.optimizers}) > 1
        """Whether there are several optimizers: then models may judge each other, and their samples are compared."""

    def take(self, module: nn.Module, args: Any, kwargs: Any, out: Any, index: int | None) -> None:
        """Record a completed call; `index` is the recorder's current position."""
        if len(self.calls) >= MOST_CALLS or not any(True for _ in module.parameters()):
            return
        grad_mode = torch.is_grad_enabled()
        with WithoutHooks():
            name = self._name_of(module)
            inputs = [tensor for tensor in [*tensors_in(args), *tensors_in(kwargs)] if tensor.dim()][:4]
            outputs = list(tensors_in(out))[:4]
            call = ModelCall(
                model=name,
                step=self._step,
                trained_on=grad_mode and any(tensor.requires_grad for tensor in outputs),
                grad_mode=grad_mode,
                training=module.training,
                site=site(4),
                inputs=[summary_of(tensor) for tensor in inputs],
                outputs=[summary_of(tensor) for tensor in outputs],
                autocast=_autocast(outputs),
                index=index,
                **mode_facts(module),
                **_batch_facts(inputs, grad_mode),
            )
            if call.trained_on and (spread := _row_spread(outputs[0])) is not None:
                call = replace(call, row_spread=spread)
            if self._several and grad_mode:
                call = replace(call, samples=[_few(tensor) for tensor in (inputs[:1] + outputs[:1])])
            for tensor in module.parameters():
                record = self._registry.get(tensor)
                if record is not None and grad_mode:
                    record.requires_grad = tensor.requires_grad
            self.calls.append(call)
            if grad_mode:
                self._hold(call, inputs, outputs)
            elif self._enough is not None and self.keeps_features:
                self.last_features = _features(inputs[0]) if inputs and is_readable(inputs[0]) else None

    def has_enough(self) -> bool:
        """Whether an evaluation has called models more often than is recorded."""
        return self._enough is not None and len(self.calls) > self._enough

    def note_reached(self, numbers: set[int | None]) -> None:
        """A backward begins; these are the numbers of the nodes in its graph."""
        self._has_backward = self._marks is not None
        for held in self.held:
            if any(output.number in numbers for output in held.outputs):
                self._reached.add(id(held.call))

    def first_outputs(self) -> dict[int, int]:
        """By the number of the node of its first output, the index of each call; none with a single optimizer."""
        held = [each for each in self.held if self._several and each.outputs and each.call.index is not None]
        return {each.outputs[0].number: each.call.index for each in held if each.call.index is not None}

    def as_facts(self) -> list[ModelCall]:
        """All calls; after a backward, with whether it passed through them."""
        if not self._has_backward:
            return self.calls
        return [replace(call, reached=id(call) in self._reached) if call.trained_on else call for call in self.calls]

    def _name_of(self, module: nn.Module) -> str:
        """The name of a model. Its parameters are registered once per step."""
        known = self._registry.known_model(module) if id(module) in self._entered else None
        self._entered.add(id(module))
        return known if known is not None else self._registry.add_model(module)

    def _hold(self, call: ModelCall, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        first = inputs[0] if inputs and not self.held and is_readable(inputs[0]) else None
        self.held = [held._replace(features=None) for held in self.held]
        found: list[Output] = []
        for tensor in outputs if self._marks is not None else ():
            node = graph.node_of(tensor)
            if node is None:
                continue
            number = graph.number_of(node, self._marks)
            if number is None:  # the recorder did not mark this node
                number = -1 - len(found) - 4 * len(self.held)
                graph.mark(node, self._marks, number)
            found.append(Output(number, tensor.output_nr, tensor.shape, tensor.dtype, tensor.device))
        shape, takes_ids = torch.Size(), False
        if inputs:
            shape, takes_ids = inputs[0].shape, not inputs[0].is_floating_point()
        self.held.append(Held(call, None if first is None else _features(first), found, shape, takes_ids))


def _features(batch: Tensor) -> Features | None:
    if batch.dim() < 2 or not batch.numel() or batch.layout is not torch.strided or batch.is_complex():
        return None
    if not batch.is_floating_point():
        return Features(len(batch), few_of(batch, 64, 4096).clone())
    return Features(len(batch), few_of(batch, 64, 64).to(torch.float32, copy=True))


def _row_spread(out: Tensor) -> float | None:
    """How much the directions of the rows of a matrix differ: 0 if all are the same, about 1 for a centred cloud."""
    if out.dim() != 2 or len(out) < FEWEST_ROWS or out.shape[1] < 2 or not out.is_floating_point():
        return None
    if not is_readable(out) or out.layout is not torch.strided:
        return None
    rows = few_of(out.detach(), 64, 64).float()
    directions = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-12)
    return finite_or_none(directions.var(0, correction=0).sum().sqrt())


def _autocast(outputs: list[Tensor]) -> str | None:
    if outputs and torch.is_autocast_enabled(outputs[0].device.type):
        return str(torch.get_autocast_dtype(outputs[0].device.type)).removeprefix("torch.")
    return None


class _BatchFacts(TypedDict, total=False):
    rows: list[int]
    features: FeatureScales | None


def _batch_facts(inputs: list[Tensor], grad_mode: bool) -> _BatchFacts:
    """Fingerprints of the input rows, and the scale of each feature.

    For a large training batch, these are the first rows, as in `step_data`; for an evaluation, rows are taken evenly
    from the whole batch.
    """
    facts: _BatchFacts = {}
    if inputs and _has_rows(inputs[0]) and inputs[0].numel() <= 1 << 22:
        distance = 1 if grad_mode else math.ceil(len(inputs[0]) / MOST_PRINTS)
        facts["rows"] = prints_of_rows(inputs[0][::distance], MOST_PRINTS)
        facts["features"] = feature_scales(inputs[0])
    return facts


def _has_rows(tensor: Tensor) -> bool:
    """Whether a tensor has rows that can be read one by one, which is not so for sparse layouts."""
    return tensor.layout is torch.strided and bool(tensor.dim()) and bool(len(tensor)) and is_readable(tensor)


class _ModeFacts(TypedDict):
    dropouts: int
    dropouts_on: int
    batchnorms: int
    batchnorms_on: int
    batchnorms_frozen: int


def mode_facts(module: nn.Module) -> _ModeFacts:
    """The modules that behave differently in training, and their mode."""
    dropouts, others, norms = [], [], []
    for part in module.modules():
        if isinstance(part, _DROPOUT):
            dropouts += [part] if part.p > 0 else []
        elif isinstance(part, (nn.RNNBase, nn.MultiheadAttention)):
            others += [part] if part.dropout else []
        elif isinstance(part, _BATCHNORM) and part.track_running_stats:
            norms.append(part)
    return {
        "dropouts": len(dropouts) + len(others),
        "dropouts_on": sum(part.training for part in [*dropouts, *others]),
        "batchnorms": len(norms),
        "batchnorms_on": sum(part.training for part in norms),
        "batchnorms_frozen": sum(not any(p.requires_grad for p in part.parameters()) for part in norms if part.affine),
    }


def feature_scales(tensor: Tensor) -> FeatureScales | None:
    """Mean and standard deviation of each feature of a batch, at most 64."""
    if not tensor.is_floating_point() or tensor.dim() < 2 or len(tensor) < 2:
        return None
    rows = few_of(tensor, len(tensor), 64).float()
    return later(partial(_scales, len(rows)), rows.mean(0), rows.std(0, correction=0))


def _scales(count: int, means: Tensor, spreads: Tensor) -> FeatureScales:
    rounded = [[round(v, 6) for v in values.tolist()] for values in (means, spreads)]
    return FeatureScales(count=count, mean=rounded[0], std=rounded[1])


def _few(tensor: Tensor) -> list[list[float]] | None:
    """A few rows of a batch, thinned to a few numbers each."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.numel() or not _has_rows(tensor):
        return None
    return later(partial(rounded_rows, 4), own(few_of(tensor, 32, 16)))


def rounded_rows(digits: int, rows: Tensor) -> list[list[float]]:
    """A matrix as lists of numbers with this many digits."""
    return [[round(v, digits) for v in row] for row in rows.float().nan_to_num().tolist()]
