"""Which parameters an optimizer updates, what they are called, and which of them have a gradient right now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.observe.parameters import named_parameters, optimizer_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from surefoot.types import NamedParameter


class Layout:
    """The parameters of one optimizer, under the names of the models they belong to."""

    def __init__(self, models: Sequence[nn.Module], optimizer: Any) -> None:
        self._models = models
        self._optimizer = optimizer
        self._seen: list[int] = []
        self._present: tuple[int, ...] = ()
        self._positions: Tensor | None = None
        self.parameters: list[NamedParameter] = []
        self.refresh()

    def refresh(self) -> bool:
        """Look again if the optimizer has been given other parameters, as when layers are unfrozen one by one."""
        seen = [id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]
        if seen == self._seen:
            return False
        names = {id(parameter): name for name, parameter in named_parameters(self._models)}
        self.parameters = optimizer_parameters(self._optimizer.param_groups, names)
        self._seen, self._present = seen, ()
        self.known = sum(id(parameter) in names for _, parameter in self.parameters)
        return True

    @property
    def home(self) -> torch.device:
        """The device of the first parameter; small results are gathered there."""
        return self.parameters[0].parameter.device

    def with_gradient(self) -> tuple[list[NamedParameter], list[Tensor]]:
        """The parameters that have a gradient now, and the gradients."""
        present: list[int] = []
        gradients: list[Tensor] = []
        for i, (_, parameter) in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            present.append(i)
            gradients.append(gradient)
        if tuple(present) != self._present:
            self._present, self._positions = tuple(present), None
        if len(present) == len(self.parameters):
            return self.parameters, gradients
        return [self.parameters[i] for i in present], gradients

    def drop_gradients(self) -> None:
        """Set every gradient to `None`: `optimizer.zero_grad()` without its bookkeeping."""
        for _, parameter in self.parameters:
            parameter.grad = None

    @property
    def positions(self) -> Tensor | None:
        """Where the gradients of the last call stand among all parameters; `None` if all had one."""
        if len(self._present) == len(self.parameters):
            return None
        if self._positions is None:
            table = torch.tensor(self._present, device="cpu", pin_memory=self.home.type == "cuda")
            self._positions = table.to(self.home, non_blocking=True)
        return self._positions
