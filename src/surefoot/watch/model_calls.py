"""What is recorded about one call of a model: what went in, what came out, and in which mode it ran.

No tensor of the script's is kept alive. The values of the first input are, through a tensor that shares them, as long
as the step has only one call of a model; outputs are found again by the numbers that their autograd nodes are given.
Only the first few tensors of a call are described; the recorder follows what happens inside the model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from surefoot.observe.readable import is_readable
from surefoot.record.facts import FeatureScales, ModelCall
from surefoot.watch import autograd_graph as graph
from surefoot.watch.function_recorder import tensors_in
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.tensor_summary import describe, fingerprints
from surefoot.watch.user_frames import site

if TYPE_CHECKING:
    from surefoot.watch.parameter_registry import ParameterRegistry

MOST_CALLS = 64
"""A step with more model calls than this is not one; further calls are not recorded."""
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCHNORM = nn.modules.batchnorm._BatchNorm


class Output(NamedTuple):
    """How to find an output of a model again: the number of its autograd node, and which result of that it is."""

    number: int
    result: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Held(NamedTuple):
    """What later questions need of a call with gradients on."""

    call: ModelCall
    features: Tensor | None
    """The values of the first input; only of the only call so far."""
    outputs: list[Output]


class ModelCalls:
    """The model calls of one sampled step."""

    def __init__(self, step: int, registry: ParameterRegistry, marks: object | None) -> None:
        """`marks` is whose numbers the nodes bear, where outputs are requested later."""
        self.calls: list[ModelCall] = []
        self.held: list[Held] = []
        self._step, self._registry, self._marks = step, registry, marks
        self._several = len({number for held in registry.parameters for number in held.optimizers}) > 1
        """Several optimizers: perhaps models that judge each other, whose samples are compared."""

    def take(self, module: nn.Module, args: Any, kwargs: Any, out: Any, index: int | None) -> None:
        """Note a call that is over; `index` is where the recorder stands."""
        if len(self.calls) >= MOST_CALLS or not any(True for _ in module.parameters()):
            return
        grad_mode = torch.is_grad_enabled()
        with WithoutHooks():
            name = self._registry.add_model(module)
            inputs = [tensor for tensor in [*tensors_in(args), *tensors_in(kwargs)] if tensor.dim()][:4]
            outputs = list(tensors_in(out))[:4]
            call = ModelCall(
                model=name,
                step=self._step,
                trained_on=grad_mode and any(tensor.requires_grad for tensor in outputs),
                grad_mode=grad_mode,
                training=module.training,
                site=site(4),
                inputs=[describe(tensor) for tensor in inputs],
                outputs=[describe(tensor) for tensor in outputs],
                autocast=_autocast(outputs),
                index=index,
                **mode_facts(module),
                **_batch_facts(inputs, outputs),
            )
            if self._several and grad_mode:
                call = replace(call, samples=[_few(tensor) for tensor in (inputs[:1] + outputs[:1])])
            for tensor in module.parameters():
                record = self._registry.get(tensor)
                if record is not None and grad_mode:
                    record.requires_grad = tensor.requires_grad
            self.calls.append(call)
            if grad_mode:
                self._hold(call, inputs, outputs)

    def _hold(self, call: ModelCall, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        first = inputs[0] if inputs and not self.held and is_readable(inputs[0]) else None
        self.held = [held._replace(features=None) for held in self.held]
        found: list[Output] = []
        for tensor in outputs if self._marks is not None else ():
            node = tensor.grad_fn
            if node is None:
                continue
            number = graph.number_of(node, self._marks)
            if number is None:  # none of the recorder's own
                number = -1 - len(found) - 4 * len(self.held)
                graph.mark(node, self._marks, number)
            found.append(Output(number, tensor.output_nr, tensor.shape, tensor.dtype, tensor.device))
        self.held.append(Held(call, None if first is None else first.detach(), found))


def _autocast(outputs: list[Tensor]) -> str | None:
    if outputs and torch.is_autocast_enabled(outputs[0].device.type):
        return str(torch.get_autocast_dtype(outputs[0].device.type)).removeprefix("torch.")
    return None


class _BatchFacts(TypedDict, total=False):
    rows: list[int]
    features: FeatureScales | None
    diversity: float


def _batch_facts(inputs: list[Tensor], outputs: list[Tensor]) -> _BatchFacts:
    """Prints of the rows that went in, the scale of each feature, and how different the outputs are."""
    facts: _BatchFacts = {}
    if inputs and is_readable(inputs[0]) and inputs[0].shape[0] and inputs[0].numel() <= 1 << 22:
        facts["rows"] = fingerprints(inputs[0], 256)
        facts["features"] = feature_scales(inputs[0])
    out = outputs[0] if outputs and is_readable(outputs[0]) else None
    if out is not None and out.dim() > 1 and len(out) > 1 and out.is_floating_point():
        facts["diversity"] = float(out.detach().float().std(0).mean())
    return facts


class _ModeFacts(TypedDict):
    dropouts: int
    dropouts_on: int
    batchnorms: int
    batchnorms_on: int
    batchnorms_frozen: int


def mode_facts(module: nn.Module) -> _ModeFacts:
    """Which parts behave differently in training, and in which mode they are."""
    dropouts = [part for part in module.modules() if isinstance(part, _DROPOUT) and part.p > 0]
    others = [
        part for part in module.modules() if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)) and part.dropout
    ]
    norms = [part for part in module.modules() if isinstance(part, _BATCHNORM) and part.track_running_stats]
    return {
        "dropouts": len(dropouts) + len(others),
        "dropouts_on": sum(part.training for part in [*dropouts, *others]),
        "batchnorms": len(norms),
        "batchnorms_on": sum(part.training for part in norms),
        "batchnorms_frozen": sum(not any(p.requires_grad for p in part.parameters()) for part in norms if part.affine),
    }


def feature_scales(tensor: Tensor) -> FeatureScales | None:
    """Mean and spread of each feature of a batch, up to 64 of them."""
    if not tensor.is_floating_point() or tensor.dim() < 2 or len(tensor) < 2:
        return None
    rows = tensor.detach().reshape(len(tensor), -1).float()
    if rows.shape[1] > 64:
        rows = rows[:, :: math.ceil(rows.shape[1] / 64)]
    means, spreads = rows.mean(0).tolist(), rows.std(0, correction=0).tolist()
    rounded = [round(v, 6) for v in means], [round(v, 6) for v in spreads]
    return FeatureScales(count=len(rows), mean=rounded[0], std=rounded[1])


def _few(tensor: Tensor) -> list[list[float]] | None:
    """A few rows of a batch, thinned to a few numbers each."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.numel() or not is_readable(tensor):
        return None
    rows = tensor.detach()[:32].reshape(len(tensor[:32]), -1)
    rows = rows[:, :: math.ceil(rows.shape[1] / 16)]
    return [[round(v, 4) for v in row] for row in rows.float().nan_to_num().tolist()]
