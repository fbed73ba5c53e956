"""Raises the error of a dead data loading worker between two steps, with the way in which the worker ended.

torch raises the error of a dead worker from a signal handler, wherever the program is: most often in the middle of a
step, where nothing can be saved, and possibly inside `optimizer.step`, which then has updated only some parameters.
While batches are drawn from `stabilizer.resume(loader)`, the error is held back until the next step's batch is
requested. The current step is completed, and the run can be saved before the error is raised.

Not covered: a worker of a loader that is iterated in another thread than the main one. Python runs signal handlers in
the main thread, and torch's own check raises in the other one.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.errors import with_causes

if TYPE_CHECKING:
    from types import FrameType

log = logging.getLogger("surefoot")

WORKER_DIED = "data.worker-died"
"""The cause of such an error."""
_TORCHS = "torch.utils.data._utils.signal_handling"
_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]+)\.")
_EXITED = re.compile(r"DataLoader worker \(pid (\d+)\) exited unexpectedly with exit code (-?\d+)\.")
_LOOKS, _LOOK_SECONDS = 20, 0.05
"""A connection is closed a moment before its process counts as ended."""
_GONE = re.compile(r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly")


@dataclass(frozen=True)
class WorkerDeath:
    """How a worker ended, according to torch's error."""

    pids: tuple[int, ...]
    signal: str = ""
    """Torch's name for the signal (`Killed`, `Segmentation fault`); empty if there was none, or it is not known."""
    exit_code: int | None = None
    """`None` if there was a signal, or it is not known."""

    @property
    def how(self) -> str:
        """A description of how it ended.

        >>> WorkerDeath((12,), signal="Killed").how
        'worker process 12 was killed by a signal (Killed)'
        """
        many = len(self.pids) > 1
        whose = f"worker process{'es' if many else ''} {', '.join(map(str, self.pids))}"
        if self.signal:
            return f"{whose} {'were' if many else 'was'} killed by a signal ({self.signal})"
        code = "in an unknown way" if self.exit_code is None else f"with exit code {self.exit_code}"
        return f"{whose} ended {code}"


def worker_death(message: str) -> WorkerDeath | None:
    """How a worker ended, from the message of torch's error; `None` if it is another error.

    >>> worker_death("DataLoader worker (pid 7) is killed by signal: Bus error. ")
    WorkerDeath(pids=(7,), signal='Bus error', exit_code=None)
    """
    if found := _KILLED.search(message):
        return WorkerDeath((int(found[1]),), signal=found[2].strip())
    if found := _EXITED.search(message):
        return WorkerDeath((int(found[1]),), exit_code=int(found[2]))
    if found := _GONE.search(message):
        return WorkerDeath(tuple(int(pid) for pid in found[1].split(",")))
    return None


def ended_workers(workers: Iterable[Any]) -> str | None:
    """How the first failed process ended, in torch's words; `None` if no status is known."""
    for worker in workers:
        code = worker.exitcode
        if code is not None and code < 0:
            return f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal.strsignal(-code)}. "
        if code:
            return f"DataLoader worker (pid {worker.pid}) exited unexpectedly with exit code {code}."
    return None


def error_of_worker(error: BaseException | None) -> BaseException | None:
    """The error about a worker's end, among an error and its causes; `None` if there is none.

    The error that torch raises finally reports only that a worker has ended.
    """
    found: BaseException | None = None
    for each in with_causes(error):
        death = worker_death(str(each)) if isinstance(each, RuntimeError) else None
        if death is not None and (death.signal or death.exit_code is not None):
            return each
        found = each if death is not None and found is None else found
    return found


class DeferringHandler:
    """Replaces torch's signal handler: an error is kept instead of raised, unless the program waits for a batch."""

    def __init__(self, torchs: Callable[[int, FrameType | None], Any]) -> None:
        self.torchs = torchs
        self.error: Exception | None = None
        self.drawing = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGCHLD."""
        try:
            self.torchs(number, frame)
        except RuntimeError as error:
            if self.drawing:
                raise
            self.error = self.error or error

    def died(self) -> Exception | None:
        """The error of a worker that has just died, or is about to be detected; `None` if there is none."""
        for _ in range(_LOOKS):
            if self.error is None:
                self(signal.SIGCHLD, None)
            if self.error is not None:
                error, self.error = self.error, None
                return error
            time.sleep(_LOOK_SECONDS)
        return None


class WorkerErrors:
    """The errors of dead workers in one loop over batches, raised between two steps."""

    def __init__(self) -> None:
        self._handler: DeferringHandler | None = None

    def draw(self, batches: Iterator[Any], between: bool) -> Any:
        """The next batch; if an error was kept and this is `between` two steps, it is raised."""
        handler = self._handler
        if handler is None:
            batch = next(batches)
            self._install_handler()  # torch sets its handler when the first workers are started
            return batch
        if between and handler.error is not None:
            error, handler.error = handler.error, None
            raise error
        handler.drawing = True
        try:
            return next(batches)
        except (OSError, EOFError) as error:  # a worker that dies while it sends a batch closes the connection
            handler.drawing = False
            raise handler.died() or error from None
        finally:
            handler.drawing = False

    def close(self) -> None:
        """No more batches are requested: restore torch's own handler.

        A worker that has died since the last batch is not an error of the loop, which has received all its batches.
        """
        handler, self._handler = self._handler, None
        if handler is None:
            return
        if _current() is handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler.torchs)
        if handler.error is not None:
            log.warning("A worker of a data loader died after the last batch was drawn: %s", handler.error)

    def _install_handler(self) -> None:
        torchs = _current()
        if is_workers_handler(torchs) and threading.current_thread() is threading.main_thread():
            # With two loops in parallel, the second uses the handler of the first.
            self._handler = torchs if isinstance(torchs, DeferringHandler) else DeferringHandler(torchs)
            signal.signal(signal.SIGCHLD, self._handler)


def is_workers_handler(handler: Any) -> bool:
    """Whether a handler of SIGCHLD is torch's, or its replacement."""
    return isinstance(handler, DeferringHandler) or getattr(handler, "__module__", None) == _TORCHS


def _current() -> Any:
    return signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
