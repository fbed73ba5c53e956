"""Data loaders and their batches: a fingerprint of each batch, its labels, and the step it was drawn for.

Batches that the script makes itself do not pass through here; `step_data` reads them from the graph.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from surefoot.observe.readable import is_readable
from surefoot.record.facts import DrawnBatch
from surefoot.watch.context import LoaderRecord
from surefoot.watch.deferred import later, number, own, reads_at_once
from surefoot.watch.function_recorder import tensors_in
from surefoot.watch.tensor_summary import label_counts
from surefoot.watch.user_frames import site

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher

MOST_BATCHES = 3_000
MOST_LABELLED = 600
"""The maximum number of batches recorded with their labels."""
MOST_PRINTED = 4
"""The number of tensors of a batch in its fingerprint: the same inputs with other labels are another batch."""


def wrap_data(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe loaders when they are iterated, and each batch that they return."""
    iterators: weakref.WeakKeyDictionary[Any, LoaderRecord] = weakref.WeakKeyDictionary()
    """The loader of each iterator."""

    def iterated(result: Any, args: Any, kwargs: Any) -> None:
        record = _loader_record(watcher, args[0])
        record.iterations += 1
        iterators[result] = record

    why = "the settings of the loader, and the number of passes over it"
    wrapping.after(DataLoader, "__iter__", "data loaders", iterated, why)

    def drawn(result: Any, args: Any, kwargs: Any) -> None:
        record = iterators.get(args[0])
        if record is not None:
            record.drawn += 1
            if len(watcher.calls.batches) < MOST_BATCHES:
                _record_batch(watcher, record, result)

    why = "a fingerprint of each batch, and the labels in it"
    wrapping.after(_BaseDataLoaderIter, "__next__", "batches", drawn, why)


def _print_of(tensor: Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().reshape(-1)
    if reads_at_once(flat):
        return _numbers(tensor.shape, flat[:8], flat[-8:], flat[: 1 << 12].double().sum().item())
    return later(partial(_numbers, tensor.shape), own(flat[:8]), own(flat[-8:]), flat[: 1 << 12].double().sum())


def _numbers(shape: torch.Size, first: Tensor, last: Tensor, total: float) -> tuple[Any, ...]:
    return *shape, *first.tolist(), *last.tolist(), total


def _hash(*prints: tuple[Any, ...]) -> int:
    return hash(prints)


def _fingerprint(tensors: list[Tensor]) -> int:
    prints = tuple([_print_of(tensor) for tensor in tensors])
    return hash(prints) if all(map(reads_at_once, tensors)) else later(_hash, *prints)


def _record_batch(watcher: Watcher, record: LoaderRecord, result: Any) -> None:
    """Add a batch. The numbers of one on a device are read later: a loader may return tensors that are there."""
    batches = watcher.calls.batches
    tensors = [tensor for tensor in tensors_in(result) if is_readable(tensor)]
    if not tensors or not tensors[0].dim():
        return
    batch = DrawnBatch(
        loader=record.number,
        iteration=record.iterations,
        step=watcher.state.steps,
        backward=watcher.state.backwards,
        size=len(tensors[0]),
        fingerprint=_fingerprint(tensors[:MOST_PRINTED]),
        grad_mode=torch.is_grad_enabled(),
    )
    labels = next((t for t in reversed(tensors[1:]) if not t.is_floating_point() and t.dim() == 1), None)
    if labels is not None and len(batches) < MOST_LABELLED:
        batch = replace(batch, labels=later(partial(label_counts, limit=64), own(labels)))
    elif len(tensors) > 1 and tensors[-1].is_floating_point() and tensors[-1].numel() <= 1 << 16:
        values = tensors[-1].detach().float()
        batch = replace(batch, target_mean=number(values.mean()), target_std=number(values.std(correction=0)))
    batches.append(batch)


def _loader_record(watcher: Watcher, loader: DataLoader[Any]) -> LoaderRecord:
    """The record of a loader, created when it is new. If there are too many, all others share the last one."""
    for position, held in enumerate(watcher.calls.loaders):
        if held.ref() is loader or position > 32:
            return held
    rows, sampler = _length(loader.dataset), loader.sampler
    record = LoaderRecord(
        ref=weakref.ref(loader),
        number=len(watcher.calls.loaders),
        batch_size=loader.batch_size,
        sampler=type(sampler).__name__,
        shuffles=_shuffles(sampler),
        workers=loader.num_workers,
        rows=rows,
        batches=None if rows is None else _length(loader),
        site=site(5),
        # A class derived from it may turn what it draws into other rows.
        weights=len(sampler.weights) if type(sampler) is WeightedRandomSampler else None,
    )
    watcher.calls.loaders.append(record)
    return record


def _length(sized: Any) -> int | None:
    """The length; `None` if there is none. A class may define one that raises, as that of an iterable data set does."""
    try:
        return len(sized)
    except Exception:
        return None


def _shuffles(sampler: Any) -> bool:
    """Whether a sampler of torch returns a different order every time."""
    if isinstance(sampler, DistributedSampler):
        return bool(vars(sampler).get("shuffle"))
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler))
