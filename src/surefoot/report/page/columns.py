"""Columns of a table as arrays, and long series reduced for the page without losing outliers.

In an array, null becomes NaN, with a mask of the measured values. To reduce a series, it is divided into intervals of
equal length. The lowest, the highest and the first non-finite value of each interval are kept, so that a spike of one
step is visible at any zoom. The smoothed line is a running median of the last values, followed by a running mean: a
single bad value does not bend it, and it does not move before its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from surefoot.record.arrays import column_values, floats, to_numpy

if TYPE_CHECKING:
    import pyarrow as pa


Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MOST_POINTS = 4_000
"""Points of a series on the page, in addition to those kept for events."""
SMOOTH_POINTS = 1_200
"""Points of a smoothed line."""


def kept(values: Numbers, most: int = MOST_POINTS) -> Numbers:
    """The indices to keep, in order: all of them for a short series."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    width = -(-count // (most // 3))
    blocks = -(-count // width)
    starts = np.arange(blocks) * width
    padded = np.full(blocks * width, np.nan)
    padded[:count] = values
    table = padded.reshape(blocks, width)
    finite = np.isfinite(table)
    real = (np.arange(blocks * width) < count).reshape(blocks, width)
    odd = ~finite & real
    wanted = [
        np.array([0, count - 1]),
        (starts + np.where(finite, table, np.inf).argmin(axis=1))[finite.any(axis=1)],
        (starts + np.where(finite, table, -np.inf).argmax(axis=1))[finite.any(axis=1)],
        (starts + odd.argmax(axis=1))[odd.any(axis=1)],
    ]
    return np.unique(np.concatenate(wanted))


def kept_with(steps: Numbers, values: Numbers, events: Iterable[int], most: int = MOST_POINTS) -> Numbers:
    """As `kept`, and every step that has an event."""
    chosen = kept(values, most)
    if len(chosen) == len(values):
        return chosen
    wanted = np.fromiter(events, dtype=np.int64)
    return np.union1d(chosen, np.flatnonzero(np.isin(steps, wanted)))


def smoothed(steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """A smoothed line over the finite values of a series. Each point depends only on the values up to it.

    A centred window would make the line rise before the step that made the loss rise.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) < 12:
        return steps[:0], values[:0]
    width = -(-len(values) // SMOOTH_POINTS)
    if width > 1:
        ends = np.minimum(np.arange(width - 1, len(values) + width - 1, width), len(values) - 1)
        steps, values = steps[ends], _medians(values, width)
    # A sixtieth of the line, of a short one up to seven values: a longer window lags visibly.
    last = 2 * max(1, min(3, len(values) // 40), len(values) // 120) + 1
    return steps, _over_last(np.mean, _over_last(np.median, values, last), last // 2 + 1)


def _medians(values: Numbers, width: int) -> Numbers:
    """The median of each interval of `width` values; the last interval may be shorter."""
    whole = len(values) // width * width
    medians: Numbers = np.median(values[:whole].reshape(-1, width), axis=1)
    return medians if whole == len(values) else np.append(medians, np.median(values[whole:]))


def _over_last(combine: Callable[..., Numbers], values: Numbers, count: int) -> Numbers:
    """For each value, a number computed from it and those before it, `count` in total; fewer at the beginning."""
    first = [combine(values[:end]) for end in range(1, count)]
    return np.append(first, combine(np.lib.stride_tricks.sliding_window_view(values, count), axis=1))


def measured(table: pa.Table, name: str) -> tuple[Numbers, Numbers] | None:
    """The values of a column and a mask of the measured ones; `None` if the column is absent or all null."""
    if name not in table.column_names:
        return None
    column = table.column(name)
    if column.null_count == len(column):
        return None
    return floats(column), column_values(column.is_valid(), null=False)


def whole_numbers(table: pa.Table, name: str) -> Numbers:
    """An integer column without nulls, such as the step."""
    return column_values(table.column(name), null=-1).astype(np.int64)


def coded(table: pa.Table, name: str) -> tuple[Numbers, list[str]]:
    """A string column as integer codes and the list of its strings, in order of first appearance; null is the empty
    string.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries().combine_chunks()
        column = column if isinstance(column, pa.DictionaryArray) else column.chunk(0)
        codes = to_numpy(column.indices, null=-1).astype(np.int64)
        return by_appearance(codes, [str(word) for word in column.dictionary.to_pylist()])
    encoded = pc.fill_null(column, "").combine_chunks().dictionary_encode()
    encoded = encoded if isinstance(encoded, pa.DictionaryArray) else encoded.combine_chunks()
    codes = to_numpy(encoded.indices, null=-1).astype(np.int64)
    return codes, [str(word) for word in encoded.dictionary.to_pylist()]


def coded_layers(table: pa.Table) -> tuple[Numbers, list[str]]:
    """The same for the layers of a table; those of the same name in several parts are distinguished."""
    layers, names = coded(table, "layer")
    parts, part_names = coded(table, "part") if "part" in table.column_names else (np.zeros_like(layers), [""])
    if len(part_names) < 2:
        return layers, names
    both, inverse = np.unique(parts * len(names) + layers, return_inverse=True)
    used = [names[code % len(names)] for code in both.tolist()]
    return inverse, [
        f"{part_names[code // len(names)] or 'main'} · {name}" if used.count(name) > 1 else name
        for code, name in zip(both.tolist(), used, strict=True)
    ]


def by_appearance(codes: Numbers, words: list[str]) -> tuple[Numbers, list[str]]:
    """Renumber the codes by first appearance, and drop strings that no row uses. A null, -1, is the last index."""
    first = np.full(len(words) + 1, len(codes), dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # the last assignment wins: the first row
    present = np.argsort(first, kind="stable")[: int((first < len(codes)).sum())]
    names = [*words, ""]
    used = [names[code] for code in present.tolist()]
    places = np.zeros(len(words) + 1, dtype=np.int64)
    places[present] = np.arange(len(present))
    return places[codes], used


def by_part(table: pa.Table) -> Iterator[tuple[str, Numbers]]:
    """The parts of a run in order of appearance, each with the indices of its rows."""
    if not table.num_rows:
        return
    if "part" not in table.column_names:
        yield "", np.arange(table.num_rows)
        return
    codes, words = coded(table, "part")
    for code, word in enumerate(words):
        yield word, np.flatnonzero(codes == code)
