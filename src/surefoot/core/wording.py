"""Counts and places in messages: "1 dropout", "2 dropouts", " at train.py:3".

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


def at_place(place: str | None) -> str:
    """The words " at train.py:3"; nothing if the place is not known, as for objects that a doctor is given.

    Example:
        >>> f"backward{at_place('train.py:3')} failed"
        'backward at train.py:3 failed'
        >>> f"backward{at_place('')} failed"
        'backward failed'
    """
    return f" at {place}" if place else ""


def capital(words: str) -> str:
    """The words with a capital first letter."""
    return words[:1].upper() + words[1:]
