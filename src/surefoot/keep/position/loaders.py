"""Describes a loader, compares it with another, and checks whether its own state can be saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypedDict

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, dataloader

from surefoot.errors import UsageError

log = logging.getLogger("surefoot")
_ITERATION = ("__iter__", "_get_iterator")
_SETTINGS = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")


class SharedRows(TypedDict, total=False):
    """Known for a loader whose sampler distributes the rows over several ranks."""

    replicas: int
    """The number of ranks; absent without such a sampler."""


class LoaderDescription(SharedRows):
    """The properties that two loaders must share to return the same batches."""

    kind: str
    """See `loader_kind`."""
    type: str
    length: int | None
    batch_size: int | None
    workers: int
    in_order: bool


def describe(loader: Any) -> LoaderDescription:
    """The properties that two loaders must share to return the same batches. Does not run user code."""
    facts: LoaderDescription = {
        "kind": loader_kind(loader),
        "type": type(loader).__name__,
        "length": None,
        "batch_size": None,
        "workers": 0,
        "in_order": True,
    }
    if isinstance(loader, DataLoader):
        facts["batch_size"], facts["workers"] = loader.batch_size, loader.num_workers
        facts["in_order"] = bool(getattr(loader, "in_order", True))
        if (replicas := _replicas(loader)) is not None:
            facts["replicas"] = replicas
        if facts["kind"] == "map" and draws_once(loader):
            with suppress(Exception):  # the loader itself reports what is wrong with it
                facts["length"] = len(loader)
    elif isinstance(loader, (list, tuple, range)):
        facts["length"] = len(loader)
    return facts


def _replicas(loader: Any) -> int | None:
    """The `num_replicas` of a `DistributedSampler` or a similar sampler."""
    samplers = [vars(loader).get("sampler"), getattr(vars(loader).get("batch_sampler"), "sampler", None)]
    found = [getattr(sampler, "__dict__", {}).get("num_replicas") for sampler in samplers]
    return next((each for each in found if type(each) is int and each >= 1), None)


def loader_kind(loader: Any) -> str:
    """How a pass over this loader is resumed.

    `"map"` by indices, `"stateful"` by itself, `"stream"` (an `IterableDataset`) and `"iterable"` by consuming.
    """
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return "stateful"
    if not isinstance(loader, DataLoader):
        return "iterable"
    as_torch = all(getattr(type(loader), name) is getattr(DataLoader, name) for name in _ITERATION)
    if not as_torch or not all(name in vars(loader) for name in _SETTINGS):
        return "iterable"
    return "map" if loader._dataset_kind == dataloader._DatasetKind.Map else "stream"


def draws_once(loader: Any) -> bool:
    """Whether the samplers are plain lists, or torch's own, which draw from the global streams only at the start."""
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler]
    known = ("builtins", "torch.utils.data.sampler", "torch.utils.data.distributed")
    return all(type(each).__module__ in known for each in samplers)


def warn_of_differences(
    now: LoaderDescription, then: LoaderDescription, count: int, untracked_workers: bool, shared: Sequence[str]
) -> int:
    """Log one warning about everything that will not be exact; returns the number of batches to skip."""
    notes: list[str] = []
    here, there = dict(now), dict(then)
    skip, again = divmod(count * _rows(then), _rows(now)) if _can_share(now, then) else (count, 0)
    different = [name for name in there if here.get(name) != there[name]]  # older states have fewer entries
    if "replicas" in different and _can_share(now, then) and set(different) <= {"replicas", "length"}:
        different = []
        log.info("surefoot: %d ranks now share the rows of %d ranks.", now["replicas"], then["replicas"])
    if different:
        both = [", ".join(f"{name}={facts.get(name)!r}" for name in different) for facts in (here, there)]
        notes.append(f"the loader differs from the one the state was saved with: {both[0]}; saved: {both[1]}")
    if now["batch_size"] and then["batch_size"] and now["batch_size"] != then["batch_size"]:
        notes.append(f"continuing after {skip} batches of the new size, about the same number of samples")
    elif again:
        notes.append(
            f"{count} batches on {then['replicas']} ranks do not divide evenly among {now['replicas']}: {again} "
            f"samples are repeated, from batch {skip} on"
        )
    if now["workers"] != then["workers"]:
        notes.append("the random streams of the workers start again")
    elif untracked_workers:
        notes.append(
            "the workers were started before `resume(loader)` was first called, so random numbers drawn in them do not "
            "continue exactly; call it before any other iteration over a loader with persistent workers"
        )
    if not now["in_order"] and now["workers"] > 0:
        notes.append("with in_order=False it is not known which batches were returned: some may be repeated or skipped")
    if shared:
        notes.append(
            f"the data and the training loop use the same random stream ({', '.join(shared)}). If the order of the "
            "data depends on it, it differs from here on: use a separate generator for the sampler or the data set"
        )
    if notes:
        log.warning("resuming after batch %d may not be exact: %s.", count, "; ".join(notes))
    return skip


def _can_share(now: LoaderDescription, then: LoaderDescription) -> bool:
    """Whether the number of rows that all ranks together take per batch is known, for now and for the save."""
    return bool(now["batch_size"] and then["batch_size"]) and ("replicas" in now) == ("replicas" in then)


def _rows(loader: LoaderDescription) -> int:
    return (loader["batch_size"] or 1) * loader.get("replicas", 1)


def plain(state: Any, where: str) -> Any:
    """A copy of a loader's own state, which must be tensors and plain values to be saved without pickle."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if state is None or isinstance(state, (bool, int, float, str, bytes)):
        return state
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict) and all(isinstance(key, (str, int)) for key in state):
        return {key: plain(value, f"{where}[{key!r}]") for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(plain(value, f"{where}[{index}]") for index, value in enumerate(state))
    raise UsageError(
        f"the loader's own state holds a {type(state).__name__} at {where}; it must be tensors, numbers, strings, "
        "bytes, lists and dictionaries with names or numbers for keys, so that it can be saved without pickle. "
        "Change the `state_dict()` of its data set or sampler."
    )
