"""Observes the outputs of a model's layers, through forward hooks that are on for one forward pass.

`ActivationWatch.begin` puts a hook on every leaf module; `end` removes them and returns what they recorded: for each
call a sample of the output (`observe/histograms.py`) and its mean, variance and largest value; for ReLU-like layers the
number of dead units, which are zero for the whole batch; for sigmoid, tanh and their piecewise linear forms the share
of values at a bound. A hook computes outside the graph and returns nothing, so it changes no bit.

It does nothing where it could have an effect: in other threads (such as `DataParallel`'s replicas), in evaluation
(`eval()` and no gradients), while a checkpointed part is recomputed, while torch compiles, traces, transforms or
captures a CUDA graph, and under a dispatch mode. Not observed at all: compiled and scripted modules; torch's own
transformer encoders and attention, which take another path in evaluation if anything inside has a hook; modules that
only pass on, drop or reshape; activations that are called as functions (`F.relu`), which have no hook.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from surefoot.core.device import is_capturing
from surefoot.core.nested import leaves
from surefoot.core.weak_reference import InertWhenCopied
from surefoot.core.without_hooks import WithoutHooks, runs_eagerly
from surefoot.observe.histograms import Sample, largest_of, take_sample
from surefoot.observe.parameters import plain_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MOST_MODULES = 1000
MOST_CALLS = 4
"""The maximum number of recorded calls of one module in a step, such as a recurrent cell."""
FEWEST_VALUES = 16
"""The minimum number of values for a unit to count as dead: a small batch is zero by chance."""

_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_PASS_ON = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_RELUS = (nn.ReLU, nn.ReLU6, nn.Threshold)
_LEAKY = ("leakyrelu", "prelu", "rrelu")
"""Named like a ReLU, but never constantly zero."""
SATURATED_WITHIN = 0.01
"""An output of a sigmoid or tanh is saturated if it is this close to one of the bounds."""


class LayerOutput(NamedTuple):
    """One call of one module."""

    name: str
    sample: Sample
    dead: Tensor | None
    """The number of its dead units; `None` for layers that are not ReLU-like."""
    units: int
    moments: Tensor
    """Mean and variance of the sample, the largest absolute value of the whole output, and the saturated share of the
    sample: NaN for layers without bounds."""
    saturates: bool
    """Whether the layer has bounds."""


class ActivationWatch:
    """Observes the outputs of the leaf modules of some models, during one step."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self.error: Exception | None = None
        """The error inside a hook. It is never raised in the model."""
        self._handles: list[Any] = []
        self._seen: list[LayerOutput] = []
        self._calls: dict[str, int] = {}
        self._thread = get_ident()
        self._units: tuple[int, int] | None = None
        """The dimension of the units in the last layer with weights, and their number."""

    def begin(self) -> None:
        """Add the hooks, for the next forward pass."""
        self.end()
        self._thread = get_ident()
        for name, module in list(watched_modules(self._models))[:MOST_MODULES]:
            self._handles.append(module.register_forward_hook(ForwardHook(self, name)))

    def end(self) -> list[LayerOutput]:
        """Remove the hooks; returns what they recorded, in the order of the calls."""
        for handle in self._handles:
            handle.remove()
        seen, self._seen = self._seen, []
        self._handles, self._calls, self._units = [], {}, None
        return seen

    def look(self, name: str, module: nn.Module, output: Any) -> None:
        """A module was called. Never raises."""
        if get_ident() != self._thread or not runs_eagerly() or self._in_evaluation() or in_backward():
            return
        try:
            with WithoutHooks():
                self._look(name, module, output)
        except Exception as error:
            self.end()
            self.error = error

    def _look(self, name: str, module: nn.Module, output: Any) -> None:
        values = next(leaves(output, deepest=1), None)
        if values is None or not (values.is_floating_point() or values.is_complex()) or is_capturing(values.device):
            return
        where = _unit_dimension(module, values)
        if where is not None:
            self._units = where, values.shape[where]
        self._calls[name] = self._calls.get(name, 0) + 1
        if self._calls[name] > MOST_CALLS:
            return
        sample = take_sample(values)
        if sample is None:
            return
        dead, units = self._count_dead(values) if is_relu_like(module) else (None, 0)
        bounds = _bounds(module)
        moments = _moments(sample.values, largest_of(values), bounds)
        self._seen.append(LayerOutput(name, sample, dead, units, moments, bounds is not None))

    def _count_dead(self, values: Tensor) -> tuple[Tensor | None, int]:
        """The number of units that are zero for the whole batch, and the number of units."""
        if type(values) is not Tensor or values.ndim < 2 or not values.numel() or values.is_complex():
            return None, 0
        dim, width = self._units or (0, 0)
        if not -values.ndim <= dim < values.ndim or values.shape[dim] != width:
            dim = 1 if values.ndim >= 4 else -1  # reshaped since, or no layer with weights: the usual convention
        units = values.shape[dim]
        if values.numel() // units < FEWEST_VALUES:
            return None, 0
        others = [i for i in range(values.ndim) if i != dim % values.ndim]
        return ((values.amax(others) == 0) & (values.amin(others) == 0)).sum(), units

    def _in_evaluation(self) -> bool:
        return not torch.is_grad_enabled() and not any(model.training for model in self._models)


class OutputObserver(Protocol):
    """Receives the outputs of a module."""

    def look(self, name: str, module: nn.Module, output: Any) -> None:
        """The module was called."""


class ForwardHook(InertWhenCopied):
    """A forward hook."""

    __slots__ = ("_name", "_watch")

    def __init__(self, watch: OutputObserver, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module was called."""
        if torch.compiler.is_compiling():  # a constant during compilation, so that none of this is compiled
            return
        self._watch.look(self._name, module, output)

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        return _take_off


def _take_off(module: nn.Module, args: Any, output: Any) -> None:
    for number, hook in list(module._forward_hooks.items()):
        if hook is _take_off:
            del module._forward_hooks[number]


def watched_modules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The observed leaf modules, each once, with the names of their parameters."""
    done: set[int] = set()
    for i, model in enumerate(models):
        yield from _leaves(model, f"{i}." if len(models) > 1 else "", done)


def _leaves(module: nn.Module, name: str, done: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in done or _is_left_alone(module):
        return
    done.add(id(module))
    parts = [(key, part) for key, part in module.named_children() if key != "parametrizations"]
    if not parts and not isinstance(module, _PASS_ON):
        yield plain_name(name.removesuffix(".")) or type(module).__name__, module
    for key, part in parts:
        yield from _leaves(part, f"{name}{key}.", done)


def _is_left_alone(module: nn.Module) -> bool:
    compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, (*_FAST_PATHS, torch.jit.ScriptModule)) or _has_compiled_code(module)


def _has_compiled_code(module: nn.Module) -> bool:
    """Whether torch has compiled the forward of this class: the user calls a compiled copy of the module."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    entries = getattr(dynamo, "_debug_get_cache_entry_list", None)
    code = getattr(type(module).forward, "__code__", None)
    return bool(entries is not None and code is not None and entries(code))


def is_relu_like(module: nn.Module) -> bool:
    """Whether a unit of this module can be stuck at zero: torch's ReLUs, and classes named after them."""
    name = type(module).__name__.lower()
    return isinstance(module, _RELUS) or ("relu" in name and not any(other in name for other in _LEAKY))


def _bounds(module: nn.Module) -> tuple[float, float] | None:
    """The bounds at or beyond which an output is saturated; `None` for layers without bounds."""
    if isinstance(module, nn.Sigmoid):
        return SATURATED_WITHIN, 1 - SATURATED_WITHIN
    if isinstance(module, nn.Tanh):
        return SATURATED_WITHIN - 1, 1 - SATURATED_WITHIN
    if isinstance(module, nn.Hardsigmoid):
        return 0.0, 1.0
    if isinstance(module, nn.Hardtanh) and not is_relu_like(module):
        return float(module.min_val), float(module.max_val)
    return None


def _moments(sample: Tensor, largest: Tensor | None, bounds: tuple[float, float] | None) -> Tensor:
    """Four numbers on the device of the sample; see `LayerOutput.moments`."""
    if largest is None:
        return sample.new_full((4,), torch.nan, dtype=torch.float32)
    variance, mean = torch.var_mean(sample, correction=0)
    at_bound = None if bounds is None else (sample <= bounds[0]) | (sample >= bounds[1])
    share = mean.new_full((), torch.nan) if at_bound is None else at_bound.to(mean.dtype).mean()
    return torch.stack([each.to(torch.float32) for each in (mean, variance, largest, share)])


def _unit_dimension(module: nn.Module, values: Tensor) -> int | None:
    """The dimension of the units in a layer with weights; `None` for other modules."""
    if isinstance(module, nn.modules.conv._ConvNd):
        dim = -1 - len(module.kernel_size)
    elif isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm)):
        dim = 1
    elif isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding, nn.RMSNorm)):
        dim = -1
    else:
        return None
    return dim if -values.ndim <= dim < values.ndim else None


def in_backward() -> bool:
    """Whether a backward is running: then a forward is the recomputation of a checkpointed part."""
    return torch._C._current_graph_task_id() != -1


def calls_by_module(names: Sequence[str]) -> Mapping[str, list[int]]:
    """The positions of each module's calls, in the order of the first calls."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(name, []).append(i)
    return found
