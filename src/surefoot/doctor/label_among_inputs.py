"""Step 10: is the label part of the input? Then the model learns to copy it, and the results look too good.

A label is reported only if values are equal: a column of an input that equals the target or corresponds to it one to
one, or columns that together are its one-hot code. The model must use that input: its outputs change when the columns
change.

Not covered: columns that only correlate with the label, and targets with several values per row, which an autoencoder
or a language model shares with its input on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.doctor.batches import Part, leaves, replaced, target_part, to_device
from surefoot.doctor.checks import Check, passed, skipped, warned

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext

STEP = 10
_NAME = "label among the inputs"
_FEWEST_ROWS = 64
_MOST_ROWS, _MOST_COLUMNS = 512, 65_536
_EXPECTED = "no column of the inputs that encodes the label"


def check_label_among_inputs(context: CheckContext) -> list[Check]:
    """Compare every column of every input with the target."""
    found = target_part(context)
    if found is None:
        return [skipped(STEP, _NAME, "the target is not a part of the batch, so the inputs cannot be compared with it")]
    target = _joined(context.batches, found[0])
    if target is None or target.numel() != len(target):
        return [skipped(STEP, _NAME, "the target has more than one value per row")]
    labels = target.flatten()
    if len(labels) < _FEWEST_ROWS:
        return [skipped(STEP, _NAME, f"{len(labels)} rows are too few to decide; {_FEWEST_ROWS} are needed")]
    is_class = found[1].has_indices or found[1].kind.startswith("binary_cross_entropy")
    inputs = _inputs(context.batches, found[0], len(labels))
    compared = _compare_classes(inputs, labels) if is_class else _compare_values(inputs, labels)
    for part, columns in compared:
        if columns and _model_takes(context, part, columns):
            return [_found(part.path, columns, inputs[part].shape[1], len(labels))]
    count = sum(rows.shape[1] for rows in inputs.values())
    text = f"none of {count:,} columns encodes the label in {len(labels):,} rows"
    return [passed(STEP, _NAME, text, 0, _EXPECTED)]


def _inputs(batches: list[Any], target: Part, count: int) -> dict[Part, Tensor]:
    """The rows of every other part, as columns. A position in an image or a sequence is not a column."""
    found = {}
    for path, _ in leaves(batches[0]):
        rows = None if path == target.path else _joined(batches, Part(path))
        if rows is not None and rows.dim() <= 2 and len(rows) == count and 0 < rows[0].numel() <= _MOST_COLUMNS:
            found[Part(path)] = rows.reshape(count, -1)
    return found


def _compare_values(inputs: dict[Part, Tensor], labels: Tensor) -> list[tuple[Part, list[int]]]:
    """For each part, the first column that equals the target in every row."""
    if bool((labels == labels[0]).all()):
        return []
    return [
        (part, (columns.to(labels.dtype) == labels[:, None]).all(0).nonzero().flatten().tolist()[:1])
        for part, columns in inputs.items()
    ]


def _compare_classes(inputs: dict[Part, Tensor], labels: Tensor) -> list[tuple[Part, list[int]]]:
    """For each part, the first column that corresponds to the class one to one, or the columns of its one-hot code."""
    kinds, codes = torch.unique(labels, return_inverse=True)
    if not 2 <= len(kinds) <= len(labels) // 4:  # labels that are nearly all different prove nothing
        return []
    members = codes == torch.arange(len(kinds), device=codes.device)[:, None]
    steady = {part: _constant_within_labels(columns, members) for part, columns in inputs.items()}
    varying = {part: (columns != columns[:1]).any(0) for part, columns in inputs.items()}
    if all(bool((varying[part] <= steady[part]).all()) for part in inputs):
        return []  # the inputs contain only the label: possibly intended, such as a table to be learnt
    return [
        (part, _columns_of_class(columns, members, (steady[part] & varying[part]).nonzero().flatten().tolist()))
        for part, columns in inputs.items()
    ]


def _found(path: str, leaked: list[int], count: int, rows: int) -> Check:
    several = len(leaked) > 1
    numbers = ", ".join(map(str, leaked[:8])) + (", …" if len(leaked) > 8 else "")
    what = f"columns {numbers} of batch{path}" if several else f"column {numbers} of batch{path}"
    what = f"batch{path}" if count == 1 else what
    verb = "are together the one-hot code of the label" if several else "corresponds one to one to the label"
    fix = f"Take {what} out of the inputs, or out of the target if it should not be predicted."
    return warned(STEP, _NAME, f"{what} {verb} in all {rows:,} rows", len(leaked), _EXPECTED, fix, "data.leakage")


def _constant_within_labels(columns: Tensor, members: Tensor) -> Tensor:
    """Which columns have a single value for all rows of each label."""
    steady = torch.ones(columns.shape[1], dtype=torch.bool, device=columns.device)
    for member in members:
        rows = columns[member]
        steady &= (rows == rows[:1]).all(0)
    return steady


def _columns_of_class(columns: Tensor, members: Tensor, candidates: list[int]) -> list[int]:
    """Among columns with one value per label: one whose values all differ, or for each label one that identifies it."""
    for column in candidates:
        if len(torch.unique(columns[:, column])) == len(members):
            return [column]
    found = []
    for member in members:
        own = columns[member][0, candidates]
        match = ((columns[:, candidates] == own) == member[:, None]).all(0).nonzero().flatten().tolist()
        if not match or int(member.sum()) < 2:  # a single row can be distinct by chance
            return []
        found.append(candidates[match[0]])
    return found


def _joined(batches: list[Any], part: Part) -> Tensor | None:
    """The first rows of one part over all batches; `None` if their shapes differ."""
    found = [part.of(batch) for batch in batches]
    rows = [tensor for tensor in found if tensor is not None and tensor.dim() and tensor.layout is torch.strided]
    if len(rows) != len(batches) or len({(tuple(tensor.shape[1:]), tensor.dtype) for tensor in rows}) != 1:
        return None
    taken = 0
    for count, tensor in enumerate(rows, 1):
        taken += len(tensor)
        if taken >= _MOST_ROWS:
            rows = rows[:count]
            break
    return None if rows[0].is_complex() else torch.cat(rows)[:_MOST_ROWS]


def _model_takes(context: CheckContext, part: Part, columns: list[int]) -> bool:
    """Whether the input of the loss changes when the rows of some columns are permuted."""
    batch = context.batches[0]
    rows = part.of(batch)
    assert rows is not None
    flat = rows.reshape(len(rows), -1).clone()
    flat[:, columns] = flat[:, columns].roll(1, 0)
    changed = flat.reshape(rows.shape)
    one, other = (_predictions(context, each) for each in (batch, replaced(batch, part, changed)))
    return len(one) == len(other) and any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _predictions(context: CheckContext, batch: Any) -> list[Tensor]:
    trial = context.trial()
    trial.model.eval()
    return [call.input for call in trial.look(to_device(batch, context.device)).recorded.losses]
