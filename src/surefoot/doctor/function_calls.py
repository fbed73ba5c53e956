"""Sees, by value, what reaches the functions that matter: losses, embeddings, activations.

A function mode stands between the model and torch, so it does not matter whether a loss was called as a module,
as a function or inside the model, nor what anything is named. Calls are noted before they run: when one raises, what it
was given is known.

Left out: what runs inside a single call, such as the softmax within `multi_head_attention_forward`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.core.nested import leaves
from surefoot.core.operations import FunctionMode, RunningModules, arguments_by_name

if TYPE_CHECKING:
    from collections.abc import Mapping

CLASSES = ("cross_entropy", "nll_loss")
"""Losses whose targets are class indices."""

POINTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses that compare a prediction with a target of the same shape."""

_LOSSES = {
    getattr(F, name): name
    for name in (*CLASSES, *POINTWISE, "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
}
_BOUNDED = {torch.sigmoid: "sigmoid", Tensor.sigmoid: "sigmoid", F.sigmoid: "sigmoid"}
_BOUNDED |= {torch.tanh: "tanh", Tensor.tanh: "tanh", F.tanh: "tanh"}
_RELU = {F.relu: "relu", torch.relu: "relu", Tensor.relu: "relu", F.relu6: "relu6"}
_AT_THE_BOUND = 0.99


@dataclass(frozen=True)
class LossInput:
    """One call of a loss function: what reached it."""

    kind: str
    input: Tensor
    target: Tensor
    settings: Mapping[str, Any]
    """Its other arguments, defaults filled in."""
    value: Tensor | None = None
    """What it returned; `None` if it raised."""

    @property
    def class_dim(self) -> int:
        """The axis of the classes in the input."""
        return 1 if self.input.dim() > 1 else 0

    @property
    def class_count(self) -> int:
        """How many classes the input has."""
        return self.input.shape[self.class_dim] if self.input.dim() else 1

    @property
    def has_indices(self) -> bool:
        """Whether the targets are class indices."""
        return self.kind in CLASSES and not self.target.is_floating_point()

    @property
    def valid(self) -> Tensor:
        """Which targets count, that is, are not the ignore index."""
        return torch.ne(self.target, self.settings.get("ignore_index", -100))


@dataclass(frozen=True)
class Lookup:
    """One lookup in an embedding table."""

    where: str
    ids: Tensor
    table_rows: int


@dataclass(frozen=True)
class ActivationOutput:
    """What an activation function put out."""

    where: str
    kind: str
    output: Tensor

    def saturated_share(self) -> float:
        """Share of the outputs at a bound, where the slope is nearly 0."""
        values = self.output.float()
        centred = values.abs() if self.kind == "tanh" else (2 * values - 1).abs()
        return float((centred > _AT_THE_BOUND).float().mean()) if values.numel() else 0.0

    def silent_units(self) -> Tensor:
        """Which units are 0 on every row: the axis after the batch, or the last of a sequence."""
        zero = self.output == 0
        if zero.dim() == 4:
            return zero.flatten(2).all(2).all(0)
        return zero.reshape(-1, zero.shape[-1]).all(0) if zero.dim() >= 2 else zero.new_zeros(0)


@dataclass
class Recorded:
    """Everything one pass showed."""

    losses: list[LossInput] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    activations: list[ActivationOutput] = field(default_factory=list)
    first_nan: tuple[str, str] | None = None
    """The first operation that made a NaN out of none, and the module it ran in."""


class FunctionCalls(FunctionMode):
    """Notes what reaches losses, embeddings and activations while it is on."""

    def __init__(self, recorded: Recorded, running: RunningModules, trace_nan: bool = False) -> None:
        super().__init__()
        self.recorded = recorded
        self._running = running
        self._trace_nan = trace_nan

    def on_function(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the function, noting what matters about it."""
        self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        with torch.no_grad():
            self._after(func, args, kwargs, result)
        return result

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if func in _LOSSES:
            self._note_loss(_LOSSES[func], func, args, kwargs)
        elif func is F.embedding:
            ids, table = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            self.recorded.lookups.append(Lookup(self._running.innermost, ids.detach(), table.shape[0]))

    def _note_loss(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        settings = arguments_by_name(func, args, kwargs)
        value, target = settings.pop("input"), settings.pop("target")
        if isinstance(value, Tensor) and isinstance(target, Tensor):
            self.recorded.losses.append(LossInput(kind, value.detach(), target.detach(), settings))

    def _after(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if func in _LOSSES and self.recorded.losses and isinstance(result, Tensor):
            call = self.recorded.losses[-1]
            self.recorded.losses[-1] = LossInput(call.kind, call.input, call.target, call.settings, result.detach())
        elif func in _BOUNDED or func in _RELU:
            kind = _BOUNDED.get(func) or _RELU[func]
            self.recorded.activations.append(ActivationOutput(self._running.innermost, kind, result.detach()))
        if self._trace_nan and self.recorded.first_nan is None and _made_nan(args, kwargs, result):
            self.recorded.first_nan = (getattr(func, "__name__", str(func)), self._running.innermost)


def _made_nan(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    def nan(value: Any) -> bool:
        numbers = (each for each in leaves(value) if each.is_floating_point() or each.is_complex())
        return any(bool(each.isnan().any()) for each in numbers)

    return nan(result) and not nan(args) and not nan(kwargs)
