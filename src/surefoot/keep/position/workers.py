"""Random streams inside the worker processes of a `DataLoader`, so that random augmentation continues exactly.

A worker draws from its own streams, which the main process never sees. So `collate_fn` is wrapped while the workers are
started: a batch carries those streams of its worker that have changed since that worker's last batch, and the loader's
iterator removes them before the batch is used. A data set without random numbers sends nothing extra. On resume, the
first batch goes to the worker whose turn it would have been, with its seeds, and each worker's streams are set to their
state after its last batch that was used.

The iterator is a subclass of torch's own, which replaces it while the loader creates it: batches stay in order. Not
covered: state of the data set other than random generators, such as a counter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.utils.data import _utils, dataloader, get_worker_info
from torch.utils.data._utils import signal_handling

from surefoot.keep.dead_workers import ended_workers, worker_death
from surefoot.keep.position.generators import (
    Generators,
    GeneratorStates,
    find_generators,
    process_generators,
    read_generators,
    set_generators,
)

_LOCK_SECONDS = 1.0
"""A process that runs holds the lock for microseconds."""
STOPPED_SECONDS = 30.0
"""After this time, the worker that holds the lock is stopped (SIGSTOP, a debugger), and is ended."""
log = logging.getLogger("surefoot")
WorkerStreams: TypeAlias = dict[int, GeneratorStates]
"""The states of the generators in each worker, by the number of the worker."""


class Carried:
    """A batch that is sent to the main process, with the changed streams of its worker."""

    def __init__(self, batch: Any, worker: int, states: GeneratorStates) -> None:
        self.batch, self.worker, self.states = batch, worker, states

    def pin_memory(self) -> Carried:
        """Called by the loader's pinning thread: the batch is pinned as it would be alone."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.batch = pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return self


class StreamCarrier:
    """Replaces `worker_init_fn` and `collate_fn` in each worker; it can be pickled if those two can."""

    def __init__(self, collate_fn: Any, worker_init_fn: Any, states: WorkerStreams) -> None:
        self._collate_fn, self._worker_init_fn, self._states = collate_fn, worker_init_fn, states
        self._worker = 0
        self._generators: Generators = {}
        self._last: GeneratorStates = {}

    def start(self, worker: int) -> None:
        """Run the user's `worker_init_fn`, then continue the streams of this worker."""
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)
        info = get_worker_info()
        roots = {"dataset": getattr(info, "dataset", None), "collate_fn": self._collate_fn}
        self._worker = worker
        self._generators = {**process_generators(), **find_generators(roots)}
        set_generators(self._generators, self._states.get(worker, {}))
        self._last = read_generators(self._generators)

    def collate(self, samples: Any) -> Any:
        """The user's batch, with the streams that have changed, if any."""
        batch = self._collate_fn(samples)
        now = read_generators(self._generators)
        moved = {path: state for path, state in now.items() if state != self._last[path]}
        self._last = now
        return Carried(batch, self._worker, moved) if moved else batch


@dataclass
class WorkerPlan:
    """The state of a set of workers in the main process, and their initial state."""

    states: WorkerStreams = field(default_factory=dict)
    """Streams of each worker after its last returned batch; only those that have been used."""
    base_seed: int | None = None
    """The seed of the workers; if it is given, it replaces a newly drawn one."""
    first_worker: int = 0
    """The worker with which the next pass begins."""
    before_first_pass: Callable[[], None] | None = None
    """Called once between starting the workers and using the sampler."""

    def plain_states(self) -> WorkerStreams:
        """An independent copy of the streams."""
        return {worker: dict(states) for worker, states in self.states.items()}

    def receive(self, data: Any) -> Any:
        """The batch alone; its streams are stored."""
        if type(data) is not Carried:
            return data
        self.states[data.worker] = {**self.states.get(data.worker, {}), **data.states}
        return data.batch


class FollowedWorkers(dataloader._MultiProcessingDataLoaderIter):
    """torch's iterator over worker processes, which also tracks the streams of its workers."""

    surefoot_plan: WorkerPlan

    def __init__(self, loader: Any) -> None:
        self.surefoot_plan = _making[-1]
        self._resetting = False
        super().__init__(loader)

    @property
    def _base_seed(self) -> int:
        assert self.surefoot_plan.base_seed is not None
        return self.surefoot_plan.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        if self.surefoot_plan.base_seed is None:
            self.surefoot_plan.base_seed = drawn

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        plan = self.surefoot_plan
        if not first_iter:
            for entry in self._task_info.values():  # received but never returned: its worker has already advanced
                for data in entry[1:]:
                    plan.receive(data)
        elif plan.before_first_pass is not None:
            plan.before_first_pass()
            plan.before_first_pass = None
        self._resetting = True
        try:
            super()._reset(loader, first_iter)
        finally:
            self._resetting = False

    def _try_get_data(self, *args: Any, **settings: Any) -> Any:
        """The same as torch's, but the error also reports how a worker ended."""
        try:
            return super()._try_get_data(*args, **settings)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            death = worker_death(str(error))
            how = None if death is None else ended_workers(self._workers)
            if how is None:
                raise
            raise RuntimeError(how) from error

    def _get_data(self) -> Any:
        index, data = super()._get_data()  # type: ignore[no-untyped-call]
        if self._resetting:
            self.surefoot_plan.receive(data)
        return index, data

    def _try_put_index(self) -> None:
        while self.surefoot_plan.first_worker > 0:
            next(self._worker_queue_idx_cycle)
            self.surefoot_plan.first_worker -= 1
        super()._try_put_index()

    def _shutdown_workers(self) -> None:
        """The same as torch's, which would wait forever for a lock that a killed or stopped worker holds.

        A signal to every process of the run may kill or stop a worker at any point.
        """
        done = getattr(self, "_workers_done_event", None)  # missing if the workers could not be started
        try:
            if done is not None and not self._shutdown and getattr(_utils, "python_exit_status", None) is False:
                self._wait_for_lock(done)
        finally:
            super()._shutdown_workers()

    def _wait_for_lock(self, done: Any) -> None:
        """Wait until the lock is free, or replace it. Torch's signal handler may raise in between, once per worker."""
        try:
            self._take_lock(done)
        except RuntimeError as error:
            if not worker_died(error):
                raise
            self._wait_for_lock(done)
            if not self._are_killed:
                raise

    _are_killed = False

    def _take_lock(self, done: Any) -> None:
        end = time.monotonic() + STOPPED_SECONDS
        while not done._cond.acquire(timeout=_LOCK_SECONDS):
            if time.monotonic() > end:
                self._kill_workers()
            if any(worker.exitcode for worker in self._workers):
                with suppress(ValueError):  # another worker has released the lock in the meantime
                    _set_for_killed_worker(done)
                self._workers_done_event = threading.Event()  # type: ignore[assignment]
                return
        done._cond.release()

    def _kill_workers(self) -> None:
        """End the workers, which are not needed any more. A stopped process receives no other signal."""
        alive = [worker for worker in self._workers if worker.is_alive()]
        if alive and not self._are_killed:
            log.warning(
                "surefoot: the workers of the data loader (processes %s) cannot be ended after %g s: one of them "
                "holds a lock, and is probably stopped (SIGSTOP). They are killed; the run continues.",
                ", ".join(str(worker.pid) for worker in alive), STOPPED_SECONDS,
            )  # fmt: skip
        self._are_killed = True
        for worker in alive:
            worker.kill()
            worker.join(_LOCK_SECONDS)

    def _process_data(self, data: Any, *rest: Any) -> Any:
        return self.surefoot_plan.receive(super()._process_data(data, *rest))  # type: ignore[no-untyped-call]


def _set_for_killed_worker(event: Any) -> None:
    """Set a `multiprocessing.Event` whose lock is held by a process that has ended: other workers still read it."""
    event._flag.release()
    event._cond.release()


_making: list[WorkerPlan] = []
_one_at_a_time = threading.RLock()


@contextmanager
def workers_followed(loader: Any, plan: WorkerPlan) -> Iterator[None]:
    """Iterators over workers that `loader` creates in the body follow `plan`. The loader is unchanged afterwards."""
    carrier = StreamCarrier(loader.collate_fn, loader.worker_init_fn, dict(plan.states))
    with (
        _one_at_a_time,
        replaced(vars(loader), "collate_fn", carrier.collate),
        replaced(vars(loader), "worker_init_fn", carrier.start),
        replaced(vars(dataloader), "_MultiProcessingDataLoaderIter", FollowedWorkers),
    ):
        _making.append(plan)
        try:
            yield
        finally:
            _making.pop()


def worker_died(error: BaseException) -> bool:
    """Whether torch raised this because a worker process ended; its signal handler may raise at any point."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__") == signal_handling.__name__


@contextmanager
def replaced(names: dict[str, object], name: str, value: Any) -> Iterator[None]:
    """Set `name` to another value during the body, bypassing `__setattr__`, which a loader forbids."""
    before = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = before
