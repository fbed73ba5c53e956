"""Observes the processes that a script starts with `torch.multiprocessing.spawn`, each as one of several ranks.

Such a process is a new interpreter: nothing that was installed in its parent exists in it. Before it imports the
script, it loads a dictionary of settings that `multiprocessing` prepares. One more entry is added to this dictionary,
and loading it begins the observation. Nothing else that the process receives is different.

Only `spawn` and `start_processes` of torch do this: other processes of the script, such as those of a `DataLoader`, are
not observed. A process that takes no optimizer step and ends normally leaves no record. The parent prints one diagnosis
of all processes when it ends.

This module imports nothing that the interpreter has not already loaded (see `watch.run_script`).
"""

from __future__ import annotations

import _thread
import os
import sys

from surefoot.errors import UsageError
from surefoot.watch.messages import print_line, stream
from surefoot.watch.run_script import Ending, Target, exit_code, lines_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from surefoot.commands.run import RunSession
    from surefoot.commands.run_options import Request

_BEGIN = """
try:
    import sys
    sys.path.append({root!r})
    from surefoot.commands.spawned_run import begin
    begin(**{settings!r})
except Exception as error:
    sys.stderr.write(f"surefoot: a spawned process runs unobserved ({{type(error).__name__}}: {{error}})\\n")
"""
"""What a new process executes first. Its `sys.path`, which `multiprocessing` replaces next, may lack surefoot."""


class _Beginning:
    """Pickled as code that begins the observation of the process that loads it."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (self._code,)


class _SpawnCall:
    """A call of `start_processes`."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count, self.thread, self.started = folder, count, _thread.get_ident(), 0


class SpawnedRuns:
    """The groups of processes that a script spawns, from the point of view of the script."""

    def __init__(self, request: Request, folder: Callable[[], Path]) -> None:
        self._request, self._top, self._process = request, folder, os.getpid()
        self._call: _SpawnCall | None = None
        self._groups: list[Path] = []
        from multiprocessing.spawn import get_preparation_data

        from torch.multiprocessing.spawn import start_processes

        from surefoot.core.function_hooks import Hook, add_hook

        add_hook(start_processes, Hook(self._starting, None, self._has_started), always=True)
        add_hook(get_preparation_data, Hook(self._expected, self._with_beginning))

    def print_diagnoses(self, shown: str) -> bool:
        """Print the diagnosis of each group that has left a record; returns whether there is one."""
        from surefoot.core.console import takes_colour
        from surefoot.diagnose.engine import diagnose_folder
        from surefoot.diagnose.terminal import as_text
        from surefoot.record.rank_file import rank_folders

        recorded = []
        for group in self._groups:
            places = [group, *rank_folders(group)]
            if any((place / name).is_file() for place in places for name in ("run.json", "alive.json")):
                recorded.append(group)
        for group in recorded:
            where = os.path.join(shown, group.name) if group != self._top() else shown
            try:
                print_line(as_text(diagnose_folder(group), where, takes_colour(stream())))
            except UsageError as error:  # they were killed before they saved anything
                print_line(f"surefoot: no diagnosis: {error}")
            else:
                print_line(f"charts and events on one page: surefoot report {where}")
        return bool(recorded)

    def _starting(self, args: Any, kwargs: Any) -> _SpawnCall | None:
        count = args[2]
        if os.getpid() != self._process or not isinstance(count, int) or self._call is not None:
            return None
        number = len(self._groups) + 1
        self._call = _SpawnCall(self._top() if number == 1 else self._top() / f"spawn-{number}", count)
        return self._call

    def _has_started(self, call: _SpawnCall) -> None:
        self._call = None

    def _expected(self, args: Any, kwargs: Any) -> _SpawnCall | None:
        call = self._call
        is_of_call = call is not None and call.thread == _thread.get_ident() and call.started < call.count
        return call if is_of_call else None

    def _with_beginning(self, call: _SpawnCall, settings: Any) -> Any:
        rank, call.started = call.started, call.started + 1
        if rank == 0:
            self._groups.append(call.folder)
        given = {name: value for name, value in vars(self._request).items() if name not in ("target", "out")}
        told = {
            "rank": rank,
            "count": call.count,
            "folder": str(call.folder),
            "target": vars(self._request.target),
            "options": given,
        }
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        return {**settings, "surefoot": _Beginning(_BEGIN.format(root=root, settings=told))}


def begin(rank: int, count: int, folder: str, target: dict[str, Any], options: dict[str, Any]) -> None:
    """Observe this process, number `rank` of `count`. It has not imported the script yet."""
    from surefoot.commands.run import RunSession
    from surefoot.commands.run_options import Request

    RunSession(Request(Target(**target), folder, **options), rank, count).begin()


def follow_function(session: RunSession) -> None:
    """Follow the function that this process was spawned for, and watch the other ranks once they are connected."""
    import traceback

    import torch.distributed as dist
    from torch.multiprocessing.spawn import _wrap

    from surefoot.core.function_hooks import Hook, add_hook
    from surefoot.watch.tracebacks import without_watching

    def ended(_: Any) -> None:
        session.close(_ending(sys.exc_info()[1]))

    def formatting(args: Any, kwargs: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and error.__traceback__ is not None:
            error.__traceback__ = without_watching(error.__traceback__)

    def connected(_: Any, result: Any) -> None:
        if (dist.get_rank(), dist.get_world_size()) == session.place:  # otherwise there are other machines, too
            session.watch_ranks()

    add_hook(_wrap, Hook(lambda args, kwargs: True, None, ended), always=True)
    add_hook(traceback.format_exc, Hook(formatting))
    if dist.is_available():
        add_hook(dist.init_process_group, Hook(lambda args, kwargs: True, connected))


def _ending(error: BaseException | None) -> Ending:
    """How the function has ended, by the exception that leaves torch's wrapper of it."""
    ending = Ending()
    ending.globals = vars(sys.modules["__main__"])
    raised = error
    if isinstance(error, SystemExit):
        ending.code = exit_code(error)
        own = error.__traceback__
        if own is not None and own.tb_next is None:  # raised by the wrapper, after the function has raised
            raised = error.__context__
    elif error is not None:
        ending.code = 1
    if raised is not None:
        ending.lines = lines_of(raised.__traceback__)
        ending.error = None if isinstance(raised, SystemExit) else raised
    return ending
