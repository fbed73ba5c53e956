"""Steps with a closure (L-BFGS and its like): a copy of everything the step may change, to take it back."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.types import NamedParameter


class ClosureRefused(Exception):
    """Leaves an optimizer's `step` from inside its closure."""


class StepCopy:
    """Parameters, optimizer state and the settings of the groups as they were before a step.

    An optimizer with a closure moves the parameters while it looks for a step, so leaving a step out means going back.
    """

    def __init__(self, parameters: Sequence[NamedParameter], optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters = [(parameter, parameter.detach().clone()) for _, parameter in parameters]
        self._groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        self._state = {parameter: deepcopy(state) for parameter, state in optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, bit for bit."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - settings.keys() - {"params"}:  # a counter that the step began
                del group[key]
            group.update(settings)
