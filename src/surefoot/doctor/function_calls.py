"""Records the values that are passed to losses and embeddings.

A function mode intercepts the calls to torch, so it does not matter whether a loss is called as a module, as a function
or inside the model, nor how anything is named. Calls are recorded before they run: if one raises, its arguments are
known.

Not covered: what runs inside a single call, such as the softmax within `multi_head_attention_forward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.core.operations import FunctionMode, RunningModules, arguments_by_name

CLASSES = ("cross_entropy", "nll_loss")
"""Losses whose targets are class indices."""

POINTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses that compare a prediction with a target of the same shape."""

_LOSSES = {
    getattr(F, name): name
    for name in (*CLASSES, *POINTWISE, "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
}


@dataclass(frozen=True)
class LossInput:
    """One call of a loss function and its arguments."""

    kind: str
    input: Tensor
    target: Tensor
    settings: Mapping[str, Any]
    """Its other arguments, defaults filled in."""
    value: Tensor | None = None
    """The returned value; `None` if the call raised."""

    @property
    def class_dim(self) -> int:
        """The axis of the input that contains the classes."""
        return 1 if self.input.dim() > 1 else 0

    @property
    def class_count(self) -> int:
        """The number of classes of the input."""
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


@dataclass
class Recorded:
    """Everything recorded in one pass."""

    losses: list[LossInput] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)


class FunctionCalls(FunctionMode):
    """While active, records the arguments of losses and embeddings."""

    def __init__(self, recorded: Recorded, running: RunningModules) -> None:
        super().__init__()
        self.recorded = recorded
        self._running = running

    def on_function(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the function and record its arguments."""
        self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in _LOSSES and self.recorded.losses and isinstance(result, Tensor):
            self.recorded.losses[-1] = replace(self.recorded.losses[-1], value=result.detach())
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
