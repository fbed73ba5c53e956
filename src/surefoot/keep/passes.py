"""One pass over a loader: begun, or taken up again at the batch after the last one that was handed out.

Taking a pass up again means putting the random streams back to where the pass began, letting the loader make its
iterator (it draws a seed, its sampler a permutation, exactly as then), and moving past what was handed out:

- a `DataLoader` over a map-style data set moves past *indices*: no data is loaded, and worker streams are continued
  (`surefoot.keep.workers`);
- a loader with `state_dict` and `load_state_dict` of its own (torchdata's `StatefulDataLoader`) is asked to do it;
- everything else is consumed and thrown away, which is said out loud.

What cannot be exact, and is said when such a pass is taken up: `in_order=False`; workers that were started before the
pass was followed; a sampler or an iterable that draws from the same global stream as the training loop, in turns
(`surefoot.keep.samplers`): its draws cannot be repeated without the loop's.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from surefoot.errors import UsageError
from surefoot.keep.generators import find_generators, read_generators, set_generators
from surefoot.keep.samplers import FollowedIndices, FollowedSampler, StreamWatch
from surefoot.keep.workers import FollowedWorkers, WorkerPlan, replaced, workers_followed
from surefoot.streams import read_streams, set_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("surefoot")
SLOW_SECONDS = 5.0
"""A fast-forward that takes longer than this is told with its time."""

_ITERATION = ("__iter__", "_get_iterator")
_SETTINGS = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")


@dataclass
class Pass:
    """Where one pass over one loader is, and where it began."""

    number: int
    loader: dict[str, Any]
    """What kind of loader it is: see `describe`."""
    streams: dict[str, Any] = field(default_factory=read_streams)
    """The process's random streams as the pass began."""
    generators: dict[str, Any] = field(default_factory=dict)
    """The states of the loader's own generators as the pass began."""
    count: int = 0
    """Batches handed out."""
    failed: int = 0
    """Batches that raised since the last one handed out; they count once the loop goes on after them."""
    plan: WorkerPlan | None = None
    reused_workers: bool = False
    """The workers were started in an earlier pass (`persistent_workers`)."""
    untracked_workers: bool = False
    """The workers were started by somebody else, and their streams are not known."""
    watch: StreamWatch | None = None
    shared: list[str] = field(default_factory=list)
    """Streams that both the order of the data and the loop drew from, in turns, as far as an earlier process saw."""

    def handed_out(self) -> None:
        """One more batch has been handed out."""
        self.count += 1 + self.failed
        self.failed = 0

    def state_dict(self, own: Any) -> dict[str, Any]:
        """Tensors and plain values; `own` is the state of a loader that has one."""
        plan = self.plan or WorkerPlan()
        watched = self.watch.shared if self.watch else set()
        return {
            "number": self.number,
            "count": self.count,
            "loader": dict(self.loader),
            "streams": self.streams,
            "generators": dict(self.generators),
            "workers": plan.plain_states(),
            "base_seed": plan.base_seed if self.reused_workers else None,
            "untracked_workers": self.untracked_workers,
            "shared": sorted({*self.shared, *watched}),
            "own": own,
        }


def describe(loader: Any) -> dict[str, Any]:
    """What a loader must have in common with another for its batches to be the same. Runs none of the user's code."""
    facts: dict[str, Any] = {"kind": loader_kind(loader), "type": type(loader).__name__}
    facts |= {"length": None, "batch_size": None, "workers": 0, "in_order": True}
    if isinstance(loader, DataLoader):
        facts["batch_size"], facts["workers"] = loader.batch_size, loader.num_workers
        facts["in_order"] = bool(getattr(loader, "in_order", True))
        if facts["kind"] == "map" and _draws_once(loader):
            with suppress(Exception):  # what is wrong with it is the loader's own to say
                facts["length"] = len(loader)
    elif isinstance(loader, (list, tuple, range)):
        facts["length"] = len(loader)
    return facts


def loader_kind(loader: Any) -> str:
    """How a pass over this loader is taken up again."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return "stateful"
    if not isinstance(loader, DataLoader):
        return "iterable"
    as_torch = all(getattr(type(loader), name) is getattr(DataLoader, name) for name in _ITERATION)
    is_map = loader._dataset_kind == 0 and all(name in vars(loader) for name in _SETTINGS)
    return "map" if as_torch and is_map else "iterable"


def _draws_once(loader: Any) -> bool:
    """Whether the samplers are torch's own, which draw from the global streams as they begin only, or plain lists."""
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler]
    known = ("builtins", "torch.utils.data.sampler", "torch.utils.data.distributed")
    return all(type(each).__module__ in known for each in samplers)


def begin(loader: Any, number: int, workers: WorkerPlan | None = None) -> tuple[Pass, Iterator[Any]]:
    """Begin a pass, exactly as `iter(loader)` would, or as it would with the workers of an earlier process."""
    generators = find_generators(loader)
    current = Pass(number, describe(loader), generators=read_generators(generators))
    kind = current.loader["kind"]
    if workers is not None:
        _go_on(current, workers, generators)
    if kind == "map":
        return current, _iterate_map(loader, current, 0)
    iterator = iter(loader)
    if kind == "iterable" and current.loader["workers"] == 0 and not isinstance(loader, (list, tuple, range)):
        current.watch = StreamWatch()
        iterator = FollowedIndices(iterator, 0, current.watch)
    return current, iterator


def take_up(loader: Any, saved: dict[str, Any]) -> tuple[Pass, Iterator[Any]]:
    """Take a pass up again where it was saved. The global streams are left wherever that takes them."""
    now, then = describe(loader), saved["loader"]
    skip = _tell_difference(now, then, saved)
    current = Pass(saved["number"], now, saved["streams"], saved["generators"], skip, shared=list(saved["shared"]))
    generators = find_generators(loader)
    _put_back(current, generators)
    if now["kind"] == "map":
        same_workers = now["workers"] == then["workers"] and then["kind"] == "map"
        current.plan = WorkerPlan(_by_worker(saved) if same_workers else {})
        if now["workers"] > 0:
            current.plan.first_worker = skip % now["workers"]
            if same_workers and saved["base_seed"] is not None:
                current.plan.base_seed = saved["base_seed"]
                _go_on(current, current.plan, generators)
        return current, _iterate_map(loader, current, skip)
    if now["kind"] == "stateful" and saved["own"] is not None:
        loader.load_state_dict(saved["own"])
        return current, iter(loader)
    return current, _fast_forward(loader, current, skip)


def _put_back(current: Pass, generators: dict[str, Any]) -> None:
    """The streams as they were when the pass began."""
    set_streams(current.streams)
    set_generators(generators, current.generators)


def _go_on(current: Pass, workers: WorkerPlan, generators: dict[str, Any]) -> None:
    """These workers had been started in an earlier pass, so this one must not be seen to draw their seed."""
    current.plan, current.reused_workers = workers, True
    workers.before_first_pass = lambda: _put_back(current, generators)


def _by_worker(saved: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {int(worker): dict(states) for worker, states in saved["workers"].items()}


def _tell_difference(now: dict[str, Any], then: dict[str, Any], saved: dict[str, Any]) -> int:
    """One warning about everything that will not be exact; how many batches to move past."""
    said: list[str] = []
    count = int(saved["count"])
    different = [name for name in now if now[name] != then.get(name)]
    skip = count
    if different:
        both = [", ".join(f"{name}={facts.get(name)!r}" for name in different) for facts in (now, then)]
        said.append(f"the loader differs from the one the state was saved with: {both[0]}; saved: {both[1]}")
    if now["batch_size"] and then["batch_size"] and now["batch_size"] != then["batch_size"]:
        skip = count * then["batch_size"] // now["batch_size"]
        said.append(f"going on after {skip} batches of the new size, about the same number of samples")
    if now["workers"] != then["workers"]:
        said.append("the random streams of the workers start anew")
    elif saved["untracked_workers"]:
        said.append(
            "the workers were started before `resume(loader)` was first called, so random numbers drawn in them do not "
            "go on exactly; call it before any other iteration over a loader with persistent workers"
        )
    if not now["in_order"] and now["workers"] > 0:
        said.append("with in_order=False it is not known which batches are out: some may come twice or never")
    if saved["shared"]:
        said.append(
            f"the order of the data and the training loop draw from the same stream ({', '.join(saved['shared'])}) in "
            "turns, so the order is another one from here on; give the sampler or the data set a generator of its own"
        )
    if said:
        log.warning("resuming after batch %d cannot be exact: %s.", count, "; ".join(said))
    return skip


def _iterate_map(loader: Any, current: Pass, skip: int) -> Iterator[Any]:
    """The iterator of a map-style loader, past its first `skip` batches."""
    if not _draws_once(loader):
        current.watch = StreamWatch()
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = vars(loader)[name]
    followed = FollowedSampler(sampler, skip, current.watch)
    with ExitStack() as stack:
        if skip or current.watch is not None:
            stack.enter_context(replaced(vars(loader), name, followed))
        if loader.num_workers > 0:
            _prepare_workers(loader, current, followed if skip or current.watch else sampler, stack)
        iterator: Any = iter(loader)
    if getattr(iterator, "_index_sampler", None) is followed:
        iterator._index_sampler = sampler  # later passes of kept workers skip nothing
    if skip and followed.latest is not None:
        followed.latest.move()  # before the global streams go to where they were saved
    made: Iterator[Any] = iterator
    return made


def _prepare_workers(loader: Any, current: Pass, sampler: Any, stack: ExitStack) -> None:
    """Have the workers' streams followed, in workers that will be started or in those kept from an earlier pass."""
    kept = getattr(loader, "_iterator", None) if loader.persistent_workers else None
    if kept is not None and current.plan is not None:  # taken up: these workers are not where the saved ones were
        vars(loader)["_iterator"] = kept = None
    if kept is None:
        current.plan = current.plan or WorkerPlan()
        stack.enter_context(workers_followed(loader, current.plan))
        return
    kept._index_sampler = sampler
    if isinstance(kept, FollowedWorkers):
        current.plan, current.reused_workers = kept.surefoot_plan, True
    else:
        current.untracked_workers = True


def _fast_forward(loader: Any, current: Pass, skip: int) -> Iterator[Any]:
    """Consume what was handed out before."""
    if skip:
        log.warning(
            "moving past %d batches of %s by loading them again: it has no way to begin in the middle. "
            "A loader with state_dict() would, such as torchdata's StatefulDataLoader.",
            skip,
            current.loader["type"],
        )
    began = time.monotonic()
    if current.loader["workers"] == 0:
        current.watch = StreamWatch()
    iterator = FollowedIndices(iter(loader), skip, current.watch)
    iterator.move()
    seconds = time.monotonic() - began
    if seconds > SLOW_SECONDS:
        log.warning("moving past %d batches took %.0f s.", skip, seconds)
    return iterator


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
