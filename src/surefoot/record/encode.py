"""Converts messages into Arrow record batches, many at a time.

Columns are gathered by list comprehension and passed to Arrow in one piece; layers remain arrays throughout. Names
(parts, layers, kinds) become numbers in a dictionary that keeps the order of first appearance, which for layers is the
order of the model.

One invalid message must not affect the others: if Arrow refuses a column, its values are checked one by one, and
anything that is not a number becomes null. A message that cannot be encoded is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.record import bins
from surefoot.record.arrays import Array, from_numpy, from_words
from surefoot.record.schema import LAYER_NUMBERS, SIGNAL, STEP_NUMBERS, TableName, schema_of

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.record.messages import DeviceRow, Histogram, LayerRows, StepRow

MOST_EXTRA_COLUMNS = 256
"""Signals (or device readings) with more names than this are left out: a name per step would be a column per step."""
LONGEST_NAME = 512
"""Names are cut to this many characters."""


class Words:
    """A growing dictionary of words, in the order in which they first appeared."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._known: dict[tuple[str, ...], Array] = {}
        self._array: pa.Array | None = None

    def column(self, words: Iterable[str]) -> pa.DictionaryArray:
        """A column of these words."""
        return self.encoded(np.array([self._code(word) for word in words], dtype=np.int32))

    def codes(self, words: Sequence[str]) -> Array:
        """The numbers of words that recur in the same order, like the layers of a model."""
        key = words if isinstance(words, tuple) else tuple(words)
        codes = self._known.get(key)
        if codes is None:
            if len(self._known) >= 64:
                self._known.clear()
            codes = self._known[key] = np.array([self._code(word) for word in key], dtype=np.int32)
        return codes

    def encoded(self, codes: Array) -> pa.DictionaryArray:
        """A column of words that are already numbers."""
        import pyarrow as pa

        if self._array is None or len(self._array) != len(self._codes):
            self._array = from_words(list(self._codes))
        return pa.DictionaryArray.from_arrays(from_numpy(codes), self._array)

    def _code(self, word: str) -> int:
        code = self._codes.get(word)
        return self._new_code(word) if code is None else code

    def _new_code(self, word: str) -> int:
        # a lone surrogate (for example, from a file name) cannot be encoded as UTF-8
        plain = str(word)[:LONGEST_NAME].encode("utf-8", "replace").decode("utf-8")
        return self._codes.setdefault(plain, len(self._codes))


class Encoder:
    """Makes the batches of one session. Has its number, and the names so far."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.refused = 0
        """The number of invalid messages: a column of another length than the names, a step that is not a number."""
        self.columns_left_out = False
        """Whether there were more names of signals than `MOST_EXTRA_COLUMNS`."""
        self._parts, self._names, self._kinds, self._sources = Words(), Words(), Words(), Words()
        self._extra: dict[TableName, dict[str, None]] = {"scalars": {}, "device": {}}
        self._makers: dict[TableName, Callable[[Sequence[Any]], pa.RecordBatch | None]] = {
            "scalars": self._scalars,
            "layers": self._layers,
            "histograms": self._histograms,
            "device": self._device,
        }

    def encode(self, table: TableName, messages: Sequence[Any]) -> pa.RecordBatch | None:
        """The rows of these messages; `None` if there are none."""
        if not messages:
            return None
        try:
            return self._makers[table](messages)
        except Exception:  # one of them is invalid: encode the others without it
            if len(messages) == 1:
                self.refused += 1
                return None
        half = len(messages) // 2
        batches = [self.encode(table, part) for part in (messages[:half], messages[half:])]
        return _joined([batch for batch in batches if batch is not None])

    def _scalars(self, rows: Sequence[StepRow]) -> pa.RecordBatch:
        signals = self._extra_names("scalars", (row.signals for row in rows))
        columns = [
            _whole([row.step for row in rows]),
            _numbers([row.time for row in rows]),
            self._parts.column(row.part for row in rows),
            *(_numbers([getattr(row, name) for row in rows]) for name in STEP_NUMBERS),
            _flags([row.skipped for row in rows]),
        ]
        extra = [_numbers([row.signals.get(name) for row in rows]) for name in signals]
        return self._batch("scalars", columns, extra, [SIGNAL + name for name in signals])

    def _layers(self, messages: Sequence[LayerRows]) -> pa.RecordBatch | None:
        pieces = [piece for message in messages if (piece := self._layer_piece(message)) is not None]
        if not pieces:
            return None
        counts = [len(codes) for _, _, codes, _ in pieces]
        columns = [
            from_numpy(np.repeat(np.array([step for step, *_ in pieces], dtype=np.int64), counts)),
            self._parts.encoded(np.repeat(self._parts.codes([part for _, part, *_ in pieces]), counts)),
            self._names.encoded(np.concatenate([codes for _, _, codes, _ in pieces])),
        ]
        for index in range(len(LAYER_NUMBERS)):
            columns.append(_stacked([arrays[index] for *_, arrays in pieces], counts))
        return self._batch("layers", columns)

    def _layer_piece(self, message: LayerRows) -> tuple[int, str, Array, list[Array | None]] | None:
        codes = self._names.codes(message.names)
        arrays = [None if (column := message.columns.get(name)) is None else _array(column) for name in LAYER_NUMBERS]
        if any(array is not None and array.shape != codes.shape for array in arrays):
            self.refused += 1
            return None
        return message.step, message.part, codes, arrays

    def _histograms(self, rows: Sequence[Histogram]) -> pa.RecordBatch:
        import pyarrow as pa

        counts = np.clip(np.array([_array(row.counts, np.int64) for row in rows]), 0, np.iinfo(np.int32).max)
        columns = [
            _whole([row.step for row in rows]),
            self._parts.column(row.part for row in rows),
            self._kinds.column(row.kind for row in rows),
            self._names.column(row.layer for row in rows),
            pa.FixedSizeListArray.from_arrays(from_numpy(counts.astype(np.int32).reshape(-1)), bins.COUNT),
            *(_whole([getattr(row, name) for row in rows]) for name in ("nan", "positive_inf", "negative_inf")),
        ]
        return self._batch("histograms", columns)

    def _device(self, rows: Sequence[DeviceRow]) -> pa.RecordBatch:
        names = self._extra_names("device", (row.numbers for row in rows))
        columns = [
            _numbers([row.time for row in rows]),
            _whole([row.step for row in rows], optional=True),
            self._sources.column(row.source for row in rows),
        ]
        return self._batch(
            "device", columns, [_numbers([row.numbers.get(name) for row in rows]) for name in names], names
        )

    def _batch(
        self, table: TableName, columns: list[Any], extra: Sequence[Any] = (), names: Sequence[str] = ()
    ) -> pa.RecordBatch:
        import pyarrow as pa

        session = from_numpy(np.full(len(columns[0]), self.session, dtype=np.int32))
        return pa.record_batch([*columns, session, *extra], schema=schema_of(table, names))

    def _extra_names(self, table: TableName, mappings: Iterable[Mapping[str, Any]]) -> list[str]:
        """Every extra column so far, including those of these rows, in order of first appearance."""
        known = self._extra[table]
        for mapping in mappings:
            for name in mapping:
                if name not in known:
                    if len(known) < MOST_EXTRA_COLUMNS:
                        known[name] = None
                    else:
                        self.columns_left_out = True
        return list(known)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch | None:
    import pyarrow as pa

    if not batches:
        return None
    table = pa.concat_tables([pa.Table.from_batches([b]) for b in batches], promote_options="default")
    return table.unify_dictionaries().combine_chunks().to_batches()[0]


def _array(column: Any, kind: Any = np.float32) -> Array:
    """An array from a tensor (including bfloat16, which numpy lacks), an array or a list; `None` is masked."""
    if hasattr(column, "detach"):
        column = column.detach().cpu()
        column = (column.float() if kind is np.float32 else column).numpy()
    with np.errstate(over="ignore"):
        if isinstance(column, (list, tuple)) and any(value is None for value in column):
            filled = [0 if value is None else value for value in column]
            return np.ma.array(filled, dtype=kind, mask=[value is None for value in column])
        return np.asarray(column, dtype=kind)


def _stacked(arrays: list[Array | None], counts: list[int]) -> pa.Array:
    """One column from the pieces of many messages; missing pieces and values are null."""
    import pyarrow as pa

    if all(array is None for array in arrays):
        return pa.nulls(sum(counts), pa.float32())
    values = [np.zeros(n, np.float32) if array is None else array for array, n in zip(arrays, counts, strict=True)]
    missing = np.repeat([array is None for array in arrays], counts)
    missing |= np.concatenate([np.ma.getmaskarray(array) for array in values])
    plain = np.concatenate([np.ma.getdata(array) for array in values])
    return from_numpy(plain, missing)


def _numbers(values: list[Any]) -> pa.Array:
    missing = np.array([value is None for value in values], dtype=bool)
    try:
        numbers = np.array([0.0 if value is None else value for value in values], dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        numbers = np.empty(0)
    if numbers.shape != missing.shape:
        one_by_one = [_number(value) for value in values]
        missing = np.array([value is None for value in one_by_one], dtype=bool)
        numbers = np.array([0.0 if value is None else value for value in one_by_one], dtype=np.float64)
    return from_numpy(numbers, missing)


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _whole(values: list[Any], optional: bool = False) -> pa.Array:
    missing = np.array([value is None for value in values], dtype=bool)
    if missing.any() and not optional:
        raise ValueError("a row without a step")
    return from_numpy(np.array([0 if value is None else int(value) for value in values], dtype=np.int64), missing)


def _flags(values: list[Any]) -> pa.Array:
    return from_numpy(np.array([bool(value) for value in values], dtype=bool))
