"""Find what surrounds each weight, by running the model once and reading the autograd graph backwards.

The graph shows what no list of modules can: which activation really follows a layer (including functional calls), which
additions close a residual branch, and which layer comes last in each. A residual addition is one whose one side is an
ancestor of its other side: `x + f(x)`. The forward runs in eval mode, and model and random streams are restored.

Not covered: what autograd does not show. A branch behind `torch.utils.checkpoint(use_reentrant=True)` or a custom
`autograd.Function` is one opaque node, and a shortcut that is itself a layer (`conv(x) + f(x)`) is not counted.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.core.nested import leaves
from surefoot.core.save_restore import untouched

Node = torch.autograd.graph.Node

_ACTIVATIONS = {
    "Relu": "relu",
    "LeakyRelu": "leaky_relu",
    "RreluWithNoise": "relu",
    "PreluKernel": "relu",
    "Gelu": "gelu",
    "Silu": "silu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Hardsigmoid": "sigmoid",
    "Elu": "elu",
    "Celu": "elu",
    "Hardtanh": "hardtanh",
    "Softplus": "softplus",
    "Mish": "mish",
    "Hardswish": "hardswish",
    "Glu": "glu",
    "Threshold": "relu",
}
_PRODUCTS = ("Addmm", "Mm", "Convolution", "Linear", "Bmm", "Baddbmm", "MkldnnRnnLayer", "CudnnRnn", "Embedding")
_ATTENTION = ("ScaledDotProduct", "SafeSoftmax", "Softmax")
"""The first two come from `scaled_dot_product_attention` alone: with three dimensions it has no kernel of its own."""
_NORMS = ("NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm", "CudnnBatchNorm", "FusedRmsNorm", "Rsqrt")
_VIEWS = ("View", "UnsafeView", "Reshape", "Transpose", "T", "Permute", "Clone", "Squeeze", "Unsqueeze", "ToCopy")


@dataclass(frozen=True)
class Role:
    """What surrounds one weight."""

    activation: str = "none"
    """What follows its output before the next layer: an activation, `none`, or `unknown` if not observed."""

    slope: float = 0.0
    """The negative slope, for a leaky ReLU."""

    fed_by: Literal["activation", "other"] = "other"
    """Whether its input is an activation's output, or something standardised (data, a norm, an embedding)."""

    ends_branch: bool = False
    """Whether its output is added to a residual stream with no norm and no scale in between."""


@dataclass
class Trace:
    """What one forward showed."""

    roles: dict[Tensor, Role] = field(default_factory=dict)
    """By weight."""

    branches: int = 0
    """How many residual additions there are in the whole model."""

    attention: bool = False
    """Whether attention was seen."""

    sequence_steps: int | None = None
    """The longest sequence a recurrent module was given."""


def trace(model: nn.Module, example: Any) -> Trace:
    """Run `model` once on `example` (a tensor, a tuple of arguments, or a dict of keyword arguments)."""
    found = Trace()
    weights = {parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim > 1}
    with untouched(model), torch.enable_grad(), _sequence_lengths(model, found):
        model.eval()
        graph = _Graph([tensor.grad_fn for tensor in leaves(call(model, example)) if tensor.grad_fn is not None])
        if not graph.order:
            raise ValueError(
                "The forward on `example` returned nothing that depends on a trainable parameter. "
                "Give an example whose output (logits, a loss) is differentiable."
            )
        residual = graph.residual_additions()
        found.branches = len(residual)
        found.attention = any(_kind(node).startswith(_ATTENTION[:2]) for node in graph.order) or graph.softmax_inside()
        for node in graph.order:
            variable = getattr(node, "variable", None)
            if variable is not None and variable in weights:
                found.roles[variable] = graph.role(node, residual)
    return found


def call(model: nn.Module, example: Any) -> Any:
    """Call the model on a tensor, a tuple of arguments, or a dict of keyword arguments."""

    def watched(value: Any) -> Any:  # a float input becomes a leaf, so that a shortcut from it shows in the graph
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().requires_grad_().clone()  # a copy, which the model may also change in place
        return value

    if isinstance(example, Mapping):
        return model(**{key: watched(value) for key, value in example.items()})
    arguments = example if isinstance(example, tuple) else (example,)
    return model(*(watched(value) for value in arguments))


@contextmanager
def _sequence_lengths(model: nn.Module, found: Trace) -> Iterator[None]:
    """While open, record the length of the sequences that recurrent modules get."""

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        batch = inputs[0]
        if isinstance(batch, nn.utils.rnn.PackedSequence):
            steps = len(batch.batch_sizes)
        else:
            steps = batch.shape[1 if module.batch_first and batch.ndim == 3 else 0]
        found.sequence_steps = max(steps, found.sequence_steps or 0)

    handles = [each.register_forward_pre_hook(note) for each in model.modules() if isinstance(each, nn.RNNBase)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kind(node: Node) -> str:
    return node.name().removeprefix("torch::autograd::").split("Backward")[0]


class _Graph:
    """The autograd graph as a list in forward order, with edges both ways."""

    def __init__(self, roots: list[Node]) -> None:
        self.order: list[Node] = []
        self.inputs: dict[Node, list[Node]] = {}
        self.users: dict[Node, list[Node]] = {}
        stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
        while stack:
            node, done = stack.pop()
            if done:
                self.order.append(node)
            elif node not in self.inputs:
                self.inputs[node] = [source for source, _ in node.next_functions if source is not None]
                stack.append((node, True))
                stack.extend((source, False) for source in self.inputs[node])
        self.place = {node: place for place, node in enumerate(self.order)}
        for node in self.order:
            for source in self.inputs[node]:
                self.users.setdefault(source, []).append(node)

    def residual_additions(self) -> set[Node]:
        """Find every addition of something to what was computed from it."""
        return {
            node
            for node in self.order
            if _kind(node) == "Add"
            and len(sides := [self._behind_views(source) for source in self.inputs[node]]) == 2
            and (self._descends(*sides) or self._descends(*reversed(sides)))
        }

    def softmax_inside(self) -> bool:
        """Whether a softmax feeds a matrix product: attention written out by hand."""
        return any(_kind(node) == "Softmax" and self._first_ahead(node, ("Bmm",)) is not None for node in self.order)

    def role(self, leaf: Node, residual: set[Node]) -> Role:
        """Read the surroundings of the weight that enters the graph at `leaf`."""
        product = self._first_ahead(leaf, _PRODUCTS)
        if product is None:
            return Role("unknown")
        fed_by = self._fed_by(product)
        rescaled = False
        for node in self._walk(product, self.users):
            kind = _kind(node)
            rescaled |= kind == "Mul" or kind in _NORMS
            if kind in _ACTIVATIONS:
                return Role(*_name_activation(node), fed_by=fed_by)
            if node in residual:
                return Role(fed_by=fed_by, ends_branch=not rescaled)
            if kind in _PRODUCTS or kind.startswith(_ATTENTION):
                break
        return Role(fed_by=fed_by)

    def _fed_by(self, product: Node) -> Literal["activation", "other"]:
        for node in self._walk(product, self.inputs):
            kind = _kind(node)
            if kind in _NORMS or kind in _PRODUCTS or kind.startswith(_ATTENTION):
                return "other"
            if kind in _ACTIVATIONS:
                return "activation"
        return "other"

    def _first_ahead(self, start: Node, kinds: tuple[str, ...]) -> Node | None:
        return next((node for node in self._walk(start, self.users) if _kind(node) in kinds), None)

    @staticmethod
    def _walk(start: Node, edges: dict[Node, list[Node]]) -> Iterator[Node]:
        """Yield the nodes reachable along `edges`, nearest first, without `start`."""
        seen, queue = {start}, deque([start])
        while queue:
            for node in edges.get(queue.popleft(), ()):
                if node not in seen:
                    seen.add(node)
                    queue.append(node)
                    yield node

    def _behind_views(self, node: Node) -> Node:
        while _kind(node) in _VIEWS and len(self.inputs[node]) == 1:
            node = self.inputs[node][0]
        return node

    def _descends(self, node: Node, ancestor: Node) -> bool:
        """Whether `ancestor` feeds `node`; never looks earlier than the ancestor's own place."""
        seen, stack = set[Node](), [node]
        while stack:
            for source in self.inputs[stack.pop()]:
                if source is ancestor:
                    return True
                if source not in seen and self.place[source] > self.place[ancestor]:
                    seen.add(source)
                    stack.append(source)
        return False


def _name_activation(node: Node) -> tuple[str, float]:
    name = _ACTIVATIONS[_kind(node)]
    if name == "leaky_relu":
        return name, float(node._saved_negative_slope)  # type: ignore[attr-defined]
    if name == "elu" and getattr(node, "_saved_scale", 1.0) != 1.0:
        return "selu", 0.0
    if name == "hardtanh" and node._saved_min_val == 0:  # type: ignore[attr-defined]
        return "relu", 0.0
    return name, 0.0
