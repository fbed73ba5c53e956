"""Step 10: the data itself: values that are not finite, labels and ids out of range, order, repeats, splits.

Works on the batches alone, so it also runs when the model does not. The last part of the step, the control with
shuffled labels, trains and has a file of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.doctor.batch_parts import Part, target_part, token_parts
from surefoot.doctor.batches import leaves, row_count, to_device
from surefoot.doctor.checks import Check, from_catalogue, passed, skipped
from surefoot.doctor.model_copy import rms

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.function_calls import LossInput

STEP = 10
_ENOUGH_BATCHES, _ENOUGH_ROWS = 4, 64
_OUTLIER = 50.0
_UNMIXED = 0.5
_MOSTLY_UNIQUE = 0.95
_LEAKED = 0.01
_SHIFTED, _STRETCHED = 0.5, 2.0


def check_data(context: CheckContext) -> list[Check]:
    """Go through every batch taken."""
    checks = [_finite(context), _outliers(context), *_targets(context), _tokens(context), _repeats(context)]
    return [*checks, *(_splits(context) if context.eval_batches else [])]


def _rows(context: CheckContext) -> str:
    return f"{len(context.batches)} batches"


def _finite(context: CheckContext) -> Check:
    name, expected = "finite data", "no NaN or Inf"
    for index, batch in enumerate(context.batches):
        for path, tensor in leaves(batch):
            if not tensor.is_floating_point():
                continue
            broken = tensor.isnan() | (tensor == torch.inf)  # minus infinity is how masks are written
            if bool(broken.any()) and not _digested(context, batch):
                rows = broken.reshape(broken.shape[0], -1).any(1).nonzero().flatten().tolist() if broken.dim() else [0]
                summary = (
                    f"{int(broken.sum())} values of `batch{path}` are not finite in batch {index} of {_rows(context)} "
                    f"taken, row {rows[0]}" + (f" and {len(rows) - 1} more rows" if len(rows) > 1 else "")
                )
                number = int(broken.sum())
                return from_catalogue(STEP, name, "fail", "data.nonfinite-input", summary, number, expected)
    return passed(STEP, name, f"all values of {_rows(context)} are finite", 0, expected)


def _digested(context: CheckContext, batch: Any) -> bool:
    """Whether the model takes such values on purpose: the loss is finite all the same."""
    if context.convention is None or context.refusal:
        return False
    look = context.trial().look(to_device(batch, context.device))
    return look.error is None and math.isfinite(look.value)


def _outliers(context: CheckContext) -> Check:
    name, expected = "outlier batches", f"no batch {_OUTLIER:g} times the scale of the others"
    worst, where = 1.0, ""
    for path, _ in leaves(context.batches[0]):
        scales = [
            (rms(tensor), index)
            for index, batch in enumerate(context.batches)
            if (tensor := Part(path).of(batch)) is not None and tensor.is_floating_point() and tensor.numel()
        ]
        finite = sorted(scale for scale, _ in scales if math.isfinite(scale))
        if len(finite) < 2 * _ENOUGH_BATCHES or finite[len(finite) // 2] <= 0.0:
            continue
        ratio = finite[-1] / finite[len(finite) // 2]
        if ratio > worst:
            worst, where = ratio, f"`batch{path}` of batch {max(item for item in scales if item[0] == finite[-1])[1]}"
    summary = f"the largest batch has {worst:.3g} times the usual scale" + (f" ({where})" if where else "")
    if worst > _OUTLIER:
        return from_catalogue(STEP, name, "warn", "data.bad-batch", summary, worst, expected)
    return passed(STEP, name, summary, worst, expected)


def _targets(context: CheckContext) -> list[Check]:
    found = target_part(context)
    if found is None or not found[1].has_indices:
        return []
    part, call = found
    targets = [tensor.cpu() for batch in context.batches if (tensor := part.of(batch)) is not None]
    return [_range(context, call, targets), _order(context, call, targets)]


def _range(context: CheckContext, call: LossInput, targets: list[Tensor]) -> Check:
    name, expected = "label range", f"0 to {call.class_count - 1}"
    ignored = call.settings.get("ignore_index", -100)
    empty = [index for index, target in enumerate(targets) if bool((target == ignored).all())]
    wrong = sum(int(((t != ignored) & ((t < 0) | (t >= call.class_count))).sum()) for t in targets)
    total = sum(target.numel() for target in targets)
    if wrong:
        summary = f"{wrong} of {total:,} labels in {_rows(context)} lie outside"
        return from_catalogue(STEP, name, "fail", "data.label-out-of-range", summary, wrong, expected)
    if empty:
        summary = f"every target of batch {empty[0]} is the ignore index ({len(empty)} of {_rows(context)})"
        return from_catalogue(STEP, name, "fail", "loss.no-valid-targets", summary, len(empty), "0 such batches")
    return passed(STEP, name, f"all {total:,} labels in {_rows(context)} are in range", 0, expected)


def _order(context: CheckContext, call: LossInput, targets: list[Tensor]) -> Check:
    """Compare how mixed labels are within batches with how mixed they would be after a shuffle."""
    name, expected = "label order", "batches as mixed as a shuffle would make them"
    sizes = [target.numel() for target in targets]
    pooled = torch.cat([target.flatten() for target in targets])
    if len(targets) < _ENOUGH_BATCHES or min(sizes) < 4 or targets[0].dim() != 1:
        return passed(STEP, name, "too few batches, or too small, to judge the order")
    if bool((pooled == pooled[0]).all()):
        summary = f"all {len(pooled):,} labels seen are class {int(pooled[0])}, and the model has {call.class_count}"
        return from_catalogue(STEP, name, "warn", "data.unshuffled", summary, 1, "several classes")
    mixed_up = pooled[torch.randperm(len(pooled), generator=torch.Generator().manual_seed(0))]
    shuffled = torch.split(mixed_up, sizes)
    usual = sum(map(_entropy, shuffled)) / len(sizes)
    mixed = sum(map(_entropy, targets)) / max(usual, 1e-12) / len(sizes)
    summary = f"labels within a batch have {mixed:.0%} of the entropy that a shuffle gives"
    if mixed < _UNMIXED:
        return from_catalogue(STEP, name, "warn", "data.unshuffled", summary, mixed, expected)
    return passed(STEP, name, summary, mixed, expected)


def _entropy(labels: Tensor) -> float:
    counts: Tensor = torch.unique(labels, return_counts=True)[1]
    shares = counts.double() / labels.numel()
    return float(-(shares * shares.log()).sum())


def _tokens(context: CheckContext) -> Check:
    name = "token ids"
    for part, lookup in token_parts(context):
        ids = [tensor for batch in context.batches if (tensor := part.of(batch)) is not None and tensor.numel()]
        low, high = min(int(t.min()) for t in ids), max(int(t.max()) for t in ids)
        summary = f"ids of `batch{part.path}` from {low} to {high}; `{lookup.where}` has {lookup.table_rows} rows"
        expected = f"0 to {lookup.table_rows - 1}"
        if low < 0 or high >= lookup.table_rows:
            return from_catalogue(STEP, name, "fail", "data.token-mismatch", summary, high, expected)
        return passed(STEP, name, summary, high, expected)
    return passed(STEP, name, "nothing in the batch goes straight into an embedding")


def _repeats(context: CheckContext) -> Check:
    name, expected = "repeated batches", "0"
    prints = Counter(_fingerprint(batch) for batch in context.batches)
    again = len(context.batches) - len(prints)
    summary = f"{again} of {_rows(context)} have been seen before"
    if again and len(context.batches) > 1:
        return from_catalogue(STEP, name, "warn", "data.repeated-batches", summary, again, expected)
    return passed(STEP, name, summary, again, expected)


def _fingerprint(batch: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for path, tensor in leaves(batch):
        digest.update(f"{path}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.digest()


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().to_dense().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _splits(context: CheckContext) -> list[Check]:
    target = target_part(context)
    skip = "" if target is None else target[0].path
    paths = [path for path, _ in leaves(context.batches[0]) if path != skip]
    if not paths:
        return [skipped(STEP, "leakage", "the batches hold no inputs to compare")]
    return [_leakage(context, paths), _shift(context, paths)]


def _leakage(context: CheckContext, paths: list[str]) -> Check:
    name, expected = "leakage", "no row of the eval data in the training data"
    train, held = (_row_prints(batches, paths) for batches in (context.batches, context.eval_batches))
    if train is None or held is None:
        return skipped(STEP, name, "the tensors of a batch do not agree on what a row is")
    if len(set(train)) < _MOSTLY_UNIQUE * len(train):
        return skipped(
            STEP, name, f"only {len(set(train))} of {len(train)} training rows are unique: equal rows prove nothing"
        )
    shared = sum(row in set_of for set_of in [set(train)] for row in held)
    share = shared / max(1, len(held))
    summary = f"{shared} of {len(held):,} eval rows are among {len(train):,} training rows, value for value"
    if share > _LEAKED:
        return from_catalogue(STEP, name, "fail", "data.leakage", summary, share, expected)
    return passed(STEP, name, summary, share, expected)


def _row_prints(batches: list[Any], paths: list[str]) -> list[bytes] | None:
    prints = []
    for batch in batches:
        count = row_count(batch)
        if count is None:
            return None
        parts = [tensor for path in paths if (tensor := Part(path).of(batch)) is not None and tensor.dim() > 0]
        prints += [b"|".join(hashlib.md5(_bytes(part[row])).digest() for part in parts) for row in range(count)]
    return prints


def _shift(context: CheckContext, paths: list[str]) -> Check:
    name, expected = "same scale in both splits", f"means within {_SHIFTED:g} standard deviations"
    for path in paths:
        train, held = (_values(batches, path) for batches in (context.batches, context.eval_batches))
        if train is None or held is None or min(len(train), len(held)) < _ENOUGH_ROWS:
            continue
        spread = max(float(train.std()), 1e-12)
        shift, stretch = abs(float(train.mean() - held.mean())) / spread, float(held.std()) / spread
        summary = f"`batch{path}`: eval mean is {shift:.2g} standard deviations away, eval spread {stretch:.2g} times"
        if shift > _SHIFTED or not 1.0 / _STRETCHED < stretch < _STRETCHED:
            return from_catalogue(STEP, name, "warn", "data.split-mismatch", summary, shift, expected)
        return passed(STEP, name, summary, shift, expected)
    return passed(STEP, name, "too few real-valued rows to compare")


def _values(batches: list[Any], path: str) -> Tensor | None:
    found = [
        tensor.double().flatten()
        for batch in batches
        if (tensor := Part(path).of(batch)) is not None and tensor.is_floating_point()
    ]
    return torch.cat(found) if found else None
