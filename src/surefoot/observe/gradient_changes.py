"""Notice gradients that were changed in place between backward and step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from surefoot.types import NamedParameter

WATCHED = 4
"""How many gradients are looked at: whoever clips, clips them all."""


class GradientChanges:
    """Remembers the version counters of a few gradients. Comparing them reads nothing off the device."""

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        gradients = (parameter.grad for _, parameter in parameters)
        found = [gradient for gradient in gradients if gradient is not None][:WATCHED]
        self._versions: list[tuple[Tensor, int]] = [(gradient, gradient._version) for gradient in found]

    @property
    def broken(self) -> bool:
        """Whether any of them has been changed since."""
        return any(gradient._version != version for gradient, version in self._versions)
