"""Every operator, by what it changes."""

from __future__ import annotations

from surefoot.zoo.mutation.operators import constants, data, loop, losses, models

OPERATORS = (
    *loop.OPERATORS,
    *constants.OPERATORS,
    *losses.OPERATORS,
    *data.OPERATORS,
    *models.OPERATORS,
)
"""All of them, in the order of the output."""
