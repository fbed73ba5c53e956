"""Converts numpy arrays and strings to Arrow arrays and columns of Arrow tables back, through their buffers.

`pyarrow.array`, `Array.to_numpy` and, in some versions, `DataType.to_pandas_dtype` import pandas if it is installed: a
second or more, and tens of megabytes, in a program that may not use it. So the run log and the report page convert
their arrays here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.ma  # numpy imports it when it is first needed, which may be when the disk is full

if TYPE_CHECKING:
    import pyarrow as pa

Array: TypeAlias = np.ndarray[Any, Any]


def from_numpy(values: Array, missing: Array | None = None) -> pa.Array:
    """An Arrow array of numbers or flags; null where `missing` is true."""
    import pyarrow as pa

    data = _bits(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    valid = None if missing is None or not missing.any() else _bits(~missing)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, data])


def from_words(words: Sequence[str]) -> pa.Array:
    """An Arrow array of strings."""
    import pyarrow as pa

    encoded = [word.encode("utf-8") for word in words]
    ends = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(each) for each in encoded], out=ends[1:])
    return pa.Array.from_buffers(pa.string(), len(encoded), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])


def to_numpy(values: pa.Array, null: float) -> Array:
    """The numbers or flags of an Arrow array, with `null` for missing ones."""
    valid, data = values.buffers()
    end = values.offset + len(values)
    if data is None:
        return np.zeros(0, _dtype(values.type))
    is_flags = values.type.bit_width == 1
    found: Array = (_flags(data, end) if is_flags else np.frombuffer(data, _dtype(values.type), end))[values.offset :]
    if not values.null_count:
        return found
    return np.where(_flags(valid, end)[values.offset :], found, found.dtype.type(null))


def column_values(column: pa.ChunkedArray, null: float) -> Array:
    """The numbers or flags of a column, with `null` for missing ones."""
    chunks = [to_numpy(chunk, null) for chunk in column.chunks]
    return np.concatenate(chunks) if chunks else np.zeros(0, _dtype(column.type))


def floats(column: pa.ChunkedArray) -> Array:
    """The numbers of a column in float64; null becomes NaN."""
    found = column_values(column, null=0).astype(np.float64)
    if column.null_count:
        found[column_values(column.is_null(), null=True)] = np.nan
    return found


def _dtype(kind: pa.DataType) -> np.dtype[Any]:
    """The numpy type of an Arrow type of numbers or flags."""
    from pyarrow import types

    if types.is_boolean(kind):
        return np.dtype(np.bool_)
    letter = "f" if types.is_floating(kind) else "u" if types.is_unsigned_integer(kind) else "i"
    return np.dtype(f"{letter}{kind.bit_width // 8}")


def _flags(bits: pa.Buffer, count: int) -> Array:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little").view(np.bool_)


def _bits(flags: Array) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(flags, bitorder="little"))


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
