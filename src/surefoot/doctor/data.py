"""Step 10: the data: non-finite values, labels and ids out of range, order, repeats, splits.

The batches are recorded as the data of a run would be, and the rules judge them, so this step also works if the model
does not run. The last part of the step, the control with shuffled labels, trains a model and is in its own file.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.doctor.batches import Part, leaves, row_count, target_part, to_device, token_parts
from surefoot.doctor.checks import Check, passed, skipped
from surefoot.doctor.model_copy import rms
from surefoot.record.facts import (
    BatchScale,
    DrawnBatch,
    EmbeddingCall,
    LoaderFacts,
    LossCall,
    NonFiniteLoss,
    RunFacts,
    SampledCalls,
    SampledStep,
    SplitComparison,
)
from surefoot.watch.batch_numbers import BatchNumbers
from surefoot.watch.tensor_summary import describe

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.function_calls import LossInput

STEP = 10
_ENOUGH_BATCHES, _ENOUGH_ROWS = 8, 64


def check_data(context: CheckContext) -> list[Check]:
    """Check every batch taken."""
    _measure_scales(context)
    facts = RunFacts(
        sampled_steps=[
            SampledStep(step=index, calls=SampledCalls(losses=losses, embeddings=lookups))
            for index, (losses, lookups) in enumerate(zip(_losses(context), _lookups(context), strict=True))
        ],
        loaders=[_loader(len(context.batches))],
        batches=_drawn(context),
        discarded_loss=_first_nonfinite(context),
    )
    count = len(context.batches)
    has_labels = any(step.calls.losses for step in facts.sampled_steps)
    has_ids = any(step.calls.embeddings for step in facts.sampled_steps)
    checks = []
    for name, causes, words, expected in _QUESTIONS:
        if has_labels or not name.startswith("label"):
            sound = passed(STEP, name, words.format(count), 0, expected)
            if name == _IDS and not has_ids:
                sound = skipped(STEP, name, "no batch has ids of an embedding")
            checks.append(context.judged(causes, sound, facts))
    return [*checks, *(_splits(context) if context.eval_batches else [])]


_IDS = "token ids"
_QUESTIONS = (
    (
        "finite data",
        ("data.nonfinite-input",),
        "all values of {} batches are finite, or the model accepts them",
        "finite",
    ),
    (
        "outlier batches",
        ("data.bad-batch",),
        "{} batches are of similar scale",
        "no batch differs from the others",
    ),
    (
        "label range",
        ("data.label-out-of-range", "loss.no-valid-targets"),
        "the labels of {} batches are valid",
        "labels that the model has outputs for, in every batch",
    ),
    (
        "label order",
        ("data.unshuffled",),
        "the labels of {} batches are mixed",
        "batches as mixed as after a shuffle",
    ),
    (
        _IDS,
        ("data.token-mismatch",),
        "the ids of {} batches are in range",
        "ids that the embedding has rows for",
    ),
    ("repeated batches", ("data.repeated-batches",), "{} batches were compared", "different batches"),
)
"""Name, causes, the summary if nothing is wrong, and the expected value."""


def _losses(context: CheckContext) -> list[list[LossCall]]:
    """For each batch, its labels as the loss of the first pass would receive them; none if it uses no labels."""
    found = target_part(context)
    if found is None or not found[1].has_indices:
        return [[] for _ in context.batches]
    targets = [found[0].of(batch) for batch in context.batches]
    return [[] if each is None else [_with_labels(found[1], each, index)] for index, each in enumerate(targets)]


def _with_labels(call: LossInput, target: Tensor, index: int) -> LossCall:
    ignored = int(call.settings.get("ignore_index", -100))
    valid = target[target != ignored]
    low, high = (int(bound) for bound in valid.aminmax()) if valid.numel() else (0, 0)
    return LossCall(
        op=call.kind,
        site=f"batch {index}",
        module="",
        index=0,
        step=index,
        trained_on=True,
        reduction=str(call.settings.get("reduction", "mean")),
        input=describe(call.input),
        target=describe(target),
        same_shape=False,
        target_from_model=False,
        ignore_index=ignored,
        valid=valid.numel(),
        targets=target.numel(),
        label_range=(low, high),
    )


def _lookups(context: CheckContext) -> list[list[EmbeddingCall]]:
    """For each batch, the ids that are used directly as indices into an embedding."""
    parts = token_parts(context)
    return [
        [
            EmbeddingCall(
                op="embedding",
                site=f"batch{part.path}",
                module=lookup.where,
                index=0,
                step=index,
                rows=lookup.table_rows,
                lowest=int(ids.min()),
                highest=int(ids.max()),
            )
            for part, lookup in parts
            if (ids := part.of(batch)) is not None and ids.numel()
        ]
        for index, batch in enumerate(context.batches)
    ]


def _loader(count: int) -> LoaderFacts:
    return LoaderFacts(
        number=0,
        sampler="",
        shuffles=False,
        workers=0,
        iterations=1,
        drawn=count,
        site="`loader`",
    )


def _drawn(context: CheckContext) -> list[DrawnBatch]:
    found = target_part(context)
    return [
        DrawnBatch(
            loader=0,
            iteration=1,
            step=index,
            backward=index,
            size=row_count(batch) or 1,
            fingerprint=_fingerprint(batch),
            grad_mode=True,
            labels=_labels(None if found is None else found[0].of(batch)),
        )
        for index, batch in enumerate(context.batches)
    ]


def _labels(target: Tensor | None) -> dict[str, int] | None:
    """How often each label occurs, for one target per row only: the order of tokens has a meaning."""
    if target is None or target.dim() != 1 or not target.numel():
        return None
    return BatchNumbers(None, target, with_scales=True, most_rows=0).as_fields().get("labels")


def _fingerprint(batch: Any) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for path, tensor in leaves(batch):
        digest.update(f"{path}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return int.from_bytes(digest.digest(), "big")


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().to_dense().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _first_nonfinite(context: CheckContext) -> NonFiniteLoss | None:
    """The first non-finite values, unless their loss is finite; masks use minus infinity."""
    for index, batch in enumerate(context.batches):
        for path, tensor in leaves(batch):
            broken = tensor.isnan() | (tensor == torch.inf) if tensor.is_floating_point() else None
            if broken is None or not bool(broken.any()) or math.isfinite(value := _loss_of(context, batch)):
                continue
            rows = broken.reshape(broken.shape[0], -1).any(1).nonzero().flatten().tolist() if broken.dim() else [0]
            nan = int(tensor.isnan().sum())
            return NonFiniteLoss(
                value=value,
                kind="data",
                tensor=path,
                step=index,
                call=f"batch{path}",
                nan=nan,
                inf=int(broken.sum()) - nan,
                shape=list(tensor.shape),
                rows=rows[:10],
                bad_rows=len(rows),
            )
    return None


def _loss_of(context: CheckContext, batch: Any) -> float:
    if context.convention is None or context.refusal:
        return math.nan
    look = context.trial().look(to_device(batch, context.device))
    return look.value if look.error is None else math.nan


def _measure_scales(context: CheckContext) -> None:
    """How many times as large each batch is as the others."""
    found: list[BatchScale] = []
    for path, _ in leaves(context.batches[0]):
        tensors = [Part(path).of(batch) for batch in context.batches]
        scales = [rms(t) if t is not None and t.is_floating_point() and t.numel() else math.nan for t in tensors]
        finite = sorted(scale for scale in scales if math.isfinite(scale))
        usual = finite[len(finite) // 2] if len(finite) >= _ENOUGH_BATCHES else 0.0
        if usual > 0.0:
            found.append(BatchScale(path=f"batch{path}", batch=scales.index(finite[-1]), ratio=finite[-1] / usual))
    context.measured(largest_batches=found)


def _splits(context: CheckContext) -> list[Check]:
    target = target_part(context)
    skip = "" if target is None else target[0].path
    paths = [path for path, _ in leaves(context.batches[0]) if path != skip]
    train, held = (_row_prints(batches, paths) for batches in (context.batches, context.eval_batches))
    if not paths or train is None or held is None:
        return [skipped(STEP, "leakage", "the batches have no rows to compare")]
    shift, stretch = _shift(context, paths)
    known = set(train)
    shared = sum(row in known for row in held)
    context.measured(
        splits=SplitComparison(
            trained=len(train), different=len(known), evaluated=len(held), shared=shared, shift=shift, stretch=stretch
        )
    )
    rows = f"{shared} of {len(held):,} eval rows are among {len(train):,} training rows ({len(known):,} of them unique)"
    scale = "too few real-valued rows to compare" if shift is None else f"means differ by {shift:.2g} spreads"
    expected = "no row of the eval data in the training data"
    return [
        context.judged(("data.leakage",), passed(STEP, "leakage", rows, shared / max(1, len(held)), expected)),
        context.judged(
            ("data.split-mismatch",), passed(STEP, "same scale in both splits", scale, shift, "equal means")
        ),
    ]


def _row_prints(batches: list[Any], paths: list[str]) -> list[bytes] | None:
    prints = []
    for batch in batches:
        count = row_count(batch)
        if count is None:
            return None
        parts = [tensor for path in paths if (tensor := Part(path).of(batch)) is not None and tensor.dim() > 0]
        prints += [b"|".join(hashlib.md5(_bytes(part[row])).digest() for part in parts) for row in range(count)]
    return prints


def _shift(context: CheckContext, paths: list[str]) -> tuple[float | None, float | None]:
    """The distance between the means of the first real-valued part, and the ratio of the spreads."""
    for path in paths:
        train, held = (_values(batches, path) for batches in (context.batches, context.eval_batches))
        if train is not None and held is not None and min(len(train), len(held)) >= _ENOUGH_ROWS:
            spread = max(float(train.std()), 1e-12)
            return abs(float(train.mean() - held.mean())) / spread, float(held.std()) / spread
    return None, None


def _values(batches: list[Any], path: str) -> Tensor | None:
    found = [
        tensor.double().flatten()
        for batch in batches
        if (tensor := Part(path).of(batch)) is not None and tensor.is_floating_point()
    ]
    return torch.cat(found) if found else None
