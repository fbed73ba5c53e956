"""Loops without an optimizer: the leaves of the first graph are the parameters, and each backward is a step.

They are found once, at the first backward, and named after the script's variables. What the script then does with the
gradients is not followed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.observe.readable import readable
from surefoot.watch import autograd_graph as graph
from surefoot.watch.optimizer_record import left_share
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.user_frames import name_of, user_frame

if TYPE_CHECKING:
    from surefoot.watch.parameter_registry import ParameterRegistry


class ManualLoop:
    """The parameters of such a loop, weakly held."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[Tensor]] = []

    def tensors(self) -> list[Tensor]:
        """Those that are still alive."""
        return [tensor for ref in self._held if (tensor := ref()) is not None]

    def is_known(self) -> bool:
        """Whether the parameters were found."""
        return bool(self._held)

    def find(self, root: Tensor, registry: ParameterRegistry) -> None:
        """Take the leaves under a loss for the parameters."""
        found = [leaf for leaf in graph.leaves(root.grad_fn) if leaf.dim() or leaf.numel() == 1]
        frame = user_frame(4)
        for leaf in found:
            record = registry.add(leaf)
            if not record.name:
                record.name = name_of(leaf, frame)
        self._held = [weakref.ref(leaf) for leaf in found]

    def let_go(self) -> list[Tensor]:
        """Drop the weak references; `hold_again` takes the tensors back."""
        tensors, self._held = self.tensors(), []
        return tensors

    def hold_again(self, tensors: list[Tensor]) -> None:
        """Refer to the parameters again."""
        self._held = [weakref.ref(tensor) for tensor in tensors]

    def left_share(self) -> float:
        """Which share of the parameters still has a gradient that is not zero."""
        return float(left_share(self.tensors()))

    def gradient_norm(self, gradients: Any) -> float | None:
        """The norm of the gradients: of those `autograd.grad` returned, or else of those that were accumulated."""
        grads = [tensor.grad for tensor in self.tensors() if tensor.grad is not None]
        with WithoutHooks():
            held = [readable(grad) for grad in gradients or grads if isinstance(grad, Tensor)]
            dense = [
                grad if grad.layout is torch.strided else grad.coalesce().values() for grad in held if grad is not None
            ]
            norms = [torch.linalg.vector_norm(grad.float()) for grad in dense]
            return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None
