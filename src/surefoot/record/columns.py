"""Columns of Arrow tables as numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from surefoot.record.arrays import to_numpy

if TYPE_CHECKING:
    import pyarrow as pa

    Array: TypeAlias = np.ndarray[Any, Any]


def numbers(rows: pa.Table, column: str) -> Array:
    """A column as numbers: words by their index in the dictionary, which all chunks must share; null as -1."""
    chunks = [_plain(chunk) for chunk in rows[column].chunks]
    return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)


def words(rows: pa.Table, column: str) -> list[str]:
    """The dictionary of a column of words; all its chunks must share it."""
    column_chunks = rows[column].chunks
    return column_chunks[0].dictionary.to_pylist() if column_chunks else []


def _plain(chunk: pa.Array) -> Array:
    import pyarrow as pa

    return to_numpy(chunk.indices if pa.types.is_dictionary(chunk.type) else chunk, null=-1)
