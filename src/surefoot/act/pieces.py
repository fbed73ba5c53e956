"""Divides a batch of any structure into pieces of fewer rows.

A batch is a tensor, or tuples, lists, mappings, named tuples and dataclasses of them. Its rows are along the first
dimension. Their number is the most frequent first dimension of its tensors and arrays. Those are divided, and so are
lists of plain objects of the same length (texts, a dictionary of boxes per image); everything else is passed on
unchanged: numbers, strings, tables of another length. Pieces of tensors are views: nothing is copied.

If it is not clear what a row is, the batch is refused: a wrong division would silently train on wrong data. Two cases
cannot be detected: a table that has by chance as many entries as the batch has rows, and a batch whose first dimension
is not the batch (time first). Keep both out of `batch`: the loss function can read them from its closure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surefoot.core.nested import parts_of, rebuilt
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WAY_OUT = "Remove values that do not belong to a row from `batch`; the loss function can use them as a closure."


def count_rows(batch: Any) -> int:
    """The number of rows of a batch. Raises `UsageError` if it cannot be determined."""
    _refuse_samples(batch)
    sizes = Counter(_leading_sizes(batch)) or Counter(_leading_sizes(batch, everywhere=True))
    sizes = sizes or Counter(_list_lengths(batch))
    if not sizes:
        raise UsageError(
            f"`batch` has nothing to divide; got {_describe(batch)}. Expected a tensor, or tuples, lists or "
            "dictionaries of tensors whose first dimension is the batch."
        )
    (rows, votes), *others = sizes.most_common(2)
    if others and others[0][1] == votes:
        raise UsageError(
            f"cannot tell what a row of `batch` is: as many of its parts have {rows} as have {others[0][0]} entries; "
            f"got {_describe(batch)}. {_WAY_OUT}"
        )
    if rows == 0:
        raise UsageError(f"`batch` has no rows; got {_describe(batch)}. Skip empty batches.")
    return rows


def take_rows(batch: Any, start: int, stop: int, rows: int) -> Any:
    """The rows from `start` to `stop` of a batch of `rows`, with the structure of the batch."""
    is_list = _holds_objects(batch) and len(batch) == rows and not _has_arrays(batch)
    return batch[start:stop] if is_list else _take(batch, start, stop, rows)


def same_rows(batch: Any) -> Any:
    """The whole batch in new containers, so that a loss that removes entries does not change the batch."""
    children = None if _is_array(batch) else _children(batch)
    return batch if children is None else rebuilt(batch, [same_rows(child) for child in children])


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor of a batch."""
    return [array for array in _arrays(batch) if isinstance(array, Tensor)]


def _take(part: Any, start: int, stop: int, rows: int) -> Any:
    if _is_array(part):
        return _cut(part, start, stop) if _leading_size(part) == rows else part
    children = _children(part)
    if children is None:
        return part
    return rebuilt(part, [_take_nested(child, start, stop, rows) for child in children])


def _take_nested(part: Any, start: int, stop: int, rows: int) -> Any:
    if not (_holds_objects(part) and len(part) == rows):
        return _take(part, start, stop, rows)
    inside = [_leading_size(array) for array in _arrays(part)]
    if inside and all(size == rows for size in inside):
        raise UsageError(
            f"cannot tell whether a list of {rows} with tensors of {rows} entries is one entry per row or a structure; "
            f"got {_describe(part)}. Give the structure as a dictionary."
        )
    return part[start:stop]


def _cut(array: Any, start: int, stop: int) -> Any:
    if isinstance(array, Tensor) and array.layout is not torch.strided:
        return array.index_select(0, torch.arange(start, stop, device=array.device))
    return array[start:stop]


def _is_array(part: Any) -> bool:
    return isinstance(part, (Tensor, np.ndarray))


def _leading_size(array: Any) -> int | None:
    return int(array.shape[0]) if array.ndim else None


def _is_plain_list(part: Any) -> bool:
    """A list or tuple whose items have positions, not names."""
    return isinstance(part, (list, tuple)) and not hasattr(part, "_fields") and type(part) is not torch.Size


def _holds_objects(part: Any) -> bool:
    """A list that may have one entry per row; several tensors of one length are a structure."""
    if not _is_plain_list(part) or not part:
        return False
    arrays = [item for item in part if _is_array(item)]
    return len(arrays) < len(part) or len({_leading_size(array) for array in arrays} - {None}) != 1


def _children(part: Any) -> list[Any] | None:
    """The parts of a container; `None` for anything else."""
    if isinstance(part, torch.nn.utils.rnn.PackedSequence) or (isinstance(part, Tensor) and part.is_nested):
        raise UsageError(f"a {type(part).__name__} has no rows to cut at. Pack or nest the padded piece in the loss.")
    parts = parts_of(part)
    return None if parts is None else list(parts)


def _arrays(part: Any) -> Iterator[Any]:
    if isinstance(part, Tensor) and part.is_nested:
        _children(part)
    if _is_array(part):
        yield part
        return
    for child in _children(part) or ():
        yield from _arrays(child)


def _has_arrays(part: Any) -> bool:
    return next(_arrays(part), None) is not None


def _leading_sizes(part: Any, *, everywhere: bool = False, top: bool = True) -> Iterator[int]:
    """First dimensions of the arrays; those inside a list of objects belong to its objects."""
    if not _is_array(part):
        if top or everywhere or not _holds_objects(part):
            for child in _children(part) or ():
                yield from _leading_sizes(child, everywhere=everywhere, top=False)
        return
    if isinstance(part, Tensor) and part.is_nested:
        _children(part)
    size = _leading_size(part)
    if size is not None:
        yield size


def _list_lengths(part: Any) -> Iterator[int]:
    """Lengths of the innermost lists."""
    children = _children(part) or []
    if _is_plain_list(part) and not any(_is_plain_list(child) for child in children):
        yield len(part)
        return
    for child in children:
        yield from _list_lengths(child)


def _refuse_samples(batch: Any) -> None:
    """Refuse a list of samples, which would be divided inside the samples, not between them."""
    if not _is_plain_list(batch) or len(batch) < 2 or not all(isinstance(item, Mapping) for item in batch):
        return
    if len({tuple(sorted(map(str, item))) for item in batch}) == 1 and _has_arrays(batch):
        raise UsageError(
            f"cannot tell samples in a list from parts of a batch; got {_describe(batch)}, all with the same keys. "
            "Collate samples first; put parts into a dictionary."
        )


def _describe(part: Any, depth: int = 0) -> str:
    """A short description of a batch."""
    if _is_array(part):
        return f"{type(part).__name__}{tuple(part.shape)}" if not getattr(part, "is_nested", False) else "nested Tensor"
    children = None if isinstance(part, torch.nn.utils.rnn.PackedSequence) else _children(part)
    if children is None or depth > 2:
        return type(part).__name__
    names: Sequence[str] = [f"{key!r}: " for key in part] if isinstance(part, Mapping) else [""] * len(children)
    inside = [name + _describe(child, depth + 1) for name, child in zip(names, children[:6], strict=False)]
    return f"{type(part).__name__}({', '.join(inside + ['…'] * (len(children) > 6))})"
