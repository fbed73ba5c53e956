"""Columns of a table as arrays: null becomes NaN, with a mask of the measured values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from surefoot.record.arrays import column_values, floats, to_numpy

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.report.page.downsample import Numbers


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
