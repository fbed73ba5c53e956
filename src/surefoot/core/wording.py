"""Counts in messages: "1 dropout", "2 dropouts".

Only nouns whose plural ends in "s" are supported, which are all that messages use.
"""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """The number with its noun, singular for 1.

    Example:
        >>> count_of(1, "parameter")
        '1 parameter'
        >>> count_of(12_000, "row")
        '12,000 rows'
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
