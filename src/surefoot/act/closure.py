"""Steps with a closure (L-BFGS and its like): a copy of everything the step may change, to take it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.core.save_restore import save_optimizer, save_tensors

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
        self._undo = (save_tensors([parameter for _, parameter in parameters]), save_optimizer(optimizer))

    def restore(self) -> None:
        """Put everything back, bit for bit."""
        for put_back in self._undo:
            put_back()
