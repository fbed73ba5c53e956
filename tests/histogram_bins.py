"""The bin of a number, from the edges alone."""

from surefoot.record.bins import EDGES, ZERO

SIDE = EDGES[ZERO + 1 :]
"""The edges above zero."""


def bin_of(value):
    """The bin of a number; `None` for NaN and Inf. The reference that faster implementations are compared with."""
    if value != value or value in (float("inf"), float("-inf")):
        return None
    beyond = min(sum(edge <= abs(value) for edge in SIDE), len(SIDE) - 1)
    return ZERO + beyond if value >= 0 else ZERO - beyond
