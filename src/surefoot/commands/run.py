"""`surefoot run`: runs a script, observes it, and prints the diagnosis at its end."""

from __future__ import annotations

import atexit
import os
import sys
import time

from surefoot.commands.run_options import Request, misplaced, parse, unobserved_ranks
from surefoot.commands.run_sinks import Sinks
from surefoot.core.folder_lock import hold
from surefoot.errors import FolderInUse
from surefoot.watch.messages import print_line, stream
from surefoot.watch.process_exit import leave_by
from surefoot.watch.run_script import Ending, run
from surefoot.watch.torch_import import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, NoReturn

    from surefoot.commands.spawned_run import SpawnedRuns
    from surefoot.core.folder_lock import Hold
    from surefoot.diagnose.findings import Diagnosis
    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.record.facts import RunDescription, RunFacts
    from surefoot.record.log import RunLog
    from surefoot.record.rank_watch import RankWatch
    from surefoot.watch.watcher import Watcher


def main(arguments: list[str]) -> NoReturn:
    """Run the command. Does not return: the process ends as the script did."""
    request = parse(arguments)
    if request is None:
        from surefoot.cli import main as answer

        answer(["run", "--help"])
    if isinstance(request, str):
        from surefoot.core.console import wrapped_for

        print(wrapped_for(sys.stderr, f"surefoot run: {request}"), file=sys.stderr)
        sys.exit(2)
    for words in (misplaced(request.target), unobserved_ranks(request.target)):
        if words:
            print_line(words)
    RunSession(request).run()
    sys.exit(0)


class OutputFolder:
    """The folder of one run: chosen once, and locked, so that no other run writes to it."""

    def __init__(self, request: Request, began: float, rank: int, world_size: int) -> None:
        self._out, self._name, self._here, self._began = request.out, request.target.name, os.getcwd(), began
        self._rank, self._world_size = rank, world_size
        self._lock_rank = rank if world_size > 1 else 0  # ranks without folders of their own would mix their files
        self._held: Hold | None = None
        self.chosen: Path | None = None
        """The folder, once it is chosen."""

    def claim(self) -> None:
        """Lock the folder of `--out`; exit with code 2 if another process writes to it.

        Imports nothing, because the script has not started.
        """
        if self._out is None:
            return
        folder = os.path.join(self._here, self._out)
        folder = os.path.join(folder, f"rank{self._rank}") if self._world_size > 1 else folder
        try:
            self._held = hold(folder, "log", self._lock_rank)
        except (FolderInUse, OSError) as error:
            print_line(f"surefoot run: {error}")
            sys.exit(2)

    def choose(self) -> Path:
        """The folder, which may not exist yet."""
        from surefoot.record.run_folder import folder_for

        while self.chosen is None:
            folder = folder_for(self._out, self._name, self._here, self._began, self._rank, self._world_size)
            try:
                self._held = self._held or hold(folder, "log", self._lock_rank)
            except FolderInUse:  # chosen by another run that began in the same second
                if self._world_size == 1 and self._out is None:
                    continue
            self.chosen = folder
        return self.chosen

    @property
    def shown(self) -> str:
        """The folder for messages: relative to the directory of the command, unless `--out` is an absolute path."""
        if self._out is not None and os.path.isabs(self._out):
            return str(self.chosen)
        return os.path.relpath(self.choose(), self._here)

    def make(self) -> Path:
        """Create the folder. The folder of a rank must not be a link that another user has placed there."""
        from surefoot.core.files import make_subfolder

        folder = self.choose()
        if self._world_size > 1:
            make_subfolder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class RunSession:
    """One watched run: of the script, or of the process `rank` of `world_size` that it has spawned."""

    def __init__(self, request: Request, rank: int | None = None, world_size: int = 1) -> None:
        self.request = request
        self.watcher: Watcher | None = None
        self.ending = Ending()
        self._began = time.time()
        self._started = time.monotonic()
        self._process = os.getpid()
        self._closed = False
        self._experiment: Experiment | None = None
        self._ranks: RankWatch | None = None
        self._is_spawned = rank is not None
        self._spawned: SpawnedRuns | None = None
        self._rank, self._world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if rank is not None:  # what a launcher has set is about the process that spawns
            self._rank, self._world_size = rank, world_size
        self.place = self._rank, self._world_size
        self._folder = OutputFolder(request, self._began, self._rank, self._world_size)
        self._sinks = Sinks(request, f"rank{self._rank}" if self._world_size > 1 else "")

    def begin(self) -> None:
        """Observe this process from now on. It is diagnosed when it ends, after its threads and `atexit` functions."""
        when_imported("torch", self._attach)
        atexit.register(self._close)

        def leaving(status: int) -> None:
            if os.getpid() == self._process:
                self.ending.code = status & 0xFF
                self._close(flush=False)  # `os._exit` does not flush the script's output either

        leave_by(leaving)

    def run(self) -> None:
        """Run the script. The diagnosis is printed last."""
        self._folder.claim()
        self.begin()
        if "SUREFOOT_EXPERIMENT" in os.environ:  # files must be protected before the script can open one
            from json import loads

            from surefoot.experiments.changes.guard import guard_early

            guard_early(loads(os.environ["SUREFOOT_EXPERIMENT"]))
        if '"incident"' in os.environ.get("SUREFOOT_EXPERIMENT", ""):
            # A replay wraps parts of surefoot; with the script's own `import surefoot`, they would be half imported.
            import torch  # noqa: F401
        try:
            run(self.request.target, self.ending)
        finally:
            if self.watcher is not None:  # `atexit` functions of the script run compiled code again
                self.watcher.probes.safely("looking", self.watcher.state.run_compiled)

    def _attach(self) -> None:
        try:
            from surefoot.watch.context import WatchOptions
            from surefoot.watch.patches import install
            from surefoot.watch.watcher import Watcher

            options: dict[str, Any] = {
                "guard": self.request.guard,
                "eager_looks": self.request.eager_looks,
                "open_log": self._open_log,
                "save": self._save,
                "folder": self._folder.choose,
                "rank": self._rank,
                "world_size": self._world_size,
            }
            order = None
            if "SUREFOOT_EXPERIMENT" in os.environ:  # one of the runs of `surefoot bisect`
                from surefoot.experiments import changes

                order = changes.take_order()
                options |= changes.options_for(order)
            self.watcher = Watcher(WatchOptions(**options))
            if order is not None:
                self._experiment = changes.begin(self.watcher, order)
            install(self.watcher, ("surefoot.report.terminal.progress",) if self.request.progress else ())
            if self._experiment is not None:
                self._experiment.follow()
            if self._is_spawned:
                from surefoot.commands.spawned_run import follow_function

                follow_function(self)
            elif self._world_size > 1:
                self.watch_ranks()
            elif order is None:
                from surefoot.commands.spawned_run import SpawnedRuns

                self._spawned = SpawnedRuns(self.request, self._folder.choose)
        except Exception as error:
            print_line(
                f"surefoot: cannot observe this torch ({type(error).__name__}: {error}); the script runs unobserved"
            )

    def watch_ranks(self) -> None:
        """Start the thread that checks whether this rank makes progress, and which rank it waits for."""
        if self.watcher is not None and self._ranks is None and self._world_size > 1:
            self._ranks = watch_ranks(self.watcher, self._folder.choose())

    def close(self, ending: Ending) -> None:
        """A spawned process has ended like this; nothing of it is kept alive."""
        self.ending = ending
        self._close(flush=False)

    def _close(self, flush: bool = True) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        if flush:
            _flush()
        if self._ranks is not None and self.watcher is not None:
            self.watcher.probes.safely("other ranks", notify_ranks, self._ranks, self.ending)
        try:
            self._write(self.ending)
        except Exception as error:
            if self.watcher is not None:
                print_line(f"surefoot: no diagnosis: {type(error).__name__}: {error}")
            if os.environ.get("SUREFOOT_DEBUG"):
                raise
        interrupted = isinstance(self.ending.error, KeyboardInterrupt)
        # Drop all references to objects of the script, so that they are destroyed in the usual order.
        self.watcher = None
        self.ending = Ending()
        if interrupted and flush:
            _end_by_interrupt()

    def _save(self, facts: RunFacts) -> None:
        """Write the facts so far, in case the run is killed."""
        if os.getpid() == self._process:
            self._write_facts(self._with_experiment(facts), self._describe(None))

    def _with_experiment(self, facts: RunFacts) -> RunFacts:
        """The facts, with those of the experiment if this is a run of `surefoot bisect`."""
        from dataclasses import replace

        return facts if self._experiment is None else replace(facts, experiment=self._experiment.as_facts())

    def _describe(self, ending: Ending | None) -> dict[str, Any]:
        """The contents of `run.json`. A run that has not ended has no exit code."""
        from surefoot.record.run_folder import describe_run

        target, torch = self.request.target, sys.modules.get("torch")
        error = ending.error if ending is not None else None
        guarded = self.watcher.steps.guard.as_facts() if self.watcher is not None else None
        return describe_run(target.name, target.arguments, target.is_module, self.request.guard, self._began) | {
            **({"eager_looks": True} if self.request.eager_looks else {}),
            "rank": self._rank,
            "world_size": self._world_size,
            "exit_code": ending.code if ending is not None else None,
            "error": type(error).__name__ if error is not None else None,
            "seconds": round(time.monotonic() - self._started, 3),
            "torch": str(getattr(torch, "__version__", "")) or None,
            **({} if guarded is None else {"guarded": guarded.to_json()}),
        }

    def _write_facts(self, facts: RunFacts | None, description: dict[str, Any]) -> None:
        from surefoot.core.formats import FACTS
        from surefoot.record.run_folder import write_json

        folder = self._folder.make()
        write_json(folder / "run.json", description)
        held = facts.to_json() if facts is not None else {"schema": FACTS.version, "steps": 0}
        write_json(folder / "facts.json", held)

    def _open_log(self, steps_before: int) -> tuple[RunLog, int] | None:
        """Open the run log, and write `run.json` next to it, so that other commands can show the run.

        The script has taken `steps_before` steps before; returns that number if the folder contains them, otherwise 0.
        """
        if os.getpid() != self._process:
            return None
        from surefoot.record.log import RunLog
        from surefoot.record.run_folder import write_json

        folder = self._folder.choose()
        try:
            self._folder.make()
            began = steps_before if (contains_run := (folder / "telemetry").exists()) else 0
            if contains_run:
                print_line(f"surefoot: {folder} already contains a run; {_how_continued(began)}")
            write_json(folder / "run.json", self._describe(None))
        except OSError:
            return None  # reported at the end of the run
        from surefoot.record.loader_waits import follow_loaders

        log = RunLog(folder, sinks=self._sinks.make(), close_at_exit=False)  # closed after the diagnosis
        follow_loaders(log)
        return log, began

    def _write(self, ending: Ending) -> None:
        if not ending.has_script:
            return
        facts = self._facts(self.watcher, ending) if self.watcher is not None else None
        steps = 0 if facts is None else facts.steps
        if self._is_spawned and not steps and not ending.code:
            return  # this process does not train
        if self._spawned is not None and not steps and self._spawned.print_diagnoses(self._folder.shown):
            return  # they are the run
        description, is_written = self._describe(ending), True
        try:
            self._write_facts(facts, description)
        except OSError as error:
            where, why, is_written = self._folder.chosen, error.strerror or error, False
            print_line(f"surefoot: cannot write {where}: {why}; the diagnosis is only printed here")
        if facts is not None:
            from surefoot.record.facts import RunDescription

            diagnosis = self._diagnose(facts, RunDescription.from_json(description), is_written)
            if not self._is_spawned:  # the parent of spawned processes prints one diagnosis of all
                _print_result(diagnosis, facts, self._folder, self.watcher)
                if is_written and diagnosis.steps:
                    print_line(f"charts and events on one page: surefoot report {self._folder.shown}")
                if is_written and self._world_size > 1 and self._rank == 0:
                    whole = os.path.dirname(self._folder.shown)
                    print_line(f"for one diagnosis of all ranks, after they have ended, run: surefoot diagnose {whole}")
        elif "torch" not in sys.modules:
            print_line("\nsurefoot: the script did not import torch in this process, so there was nothing to observe")

    def _diagnose(self, facts: RunFacts, description: RunDescription, is_written: bool) -> Diagnosis:
        """Diagnose the run, and write the diagnosis to the run log and the folder."""
        from surefoot.diagnose.engine import diagnose
        from surefoot.record.run_folder import write_json

        assert self.watcher is not None
        diagnosis = diagnose(facts, description)
        if (log := self.watcher.events.log) is not None:
            self.watcher.probes.safely("run log", log.end, diagnosis, description.exit_code)
        if is_written:
            write_json(self._folder.choose() / "findings.json", diagnosis.as_json())
        return diagnosis

    def _facts(self, watcher: Watcher, ending: Ending) -> RunFacts:
        from dataclasses import replace

        from surefoot.watch.crash import describe_end, find_bad_loss, without_frames

        watcher.probes.out_of_memory = type(ending.error).__name__ == "OutOfMemoryError"
        crash = watcher.probes.safely("crash", describe_end, ending.error, watcher.indexed_calls)
        if crash is None and ending.error is not None:
            crash = without_frames(ending.error)
        bad = watcher.probes.safely("autopsy", find_bad_loss, ending.error, ending.globals, watcher)
        return replace(self._with_experiment(watcher.as_facts()), crash=crash, discarded_loss=bad)


def _how_continued(steps_before: int) -> str:
    if steps_before:
        return f"this run continues it after step {steps_before}. The diagnosis is of this part, whose steps begin at 0"
    return "this run starts at step 0 and replaces it"


def _print_result(diagnosis: Diagnosis, facts: RunFacts, folder: OutputFolder, watcher: Watcher | None) -> None:
    """Print the diagnosis, what `--guard` did, and how to replay the captured step."""
    from surefoot.core.console import takes_colour, wrapped_for
    from surefoot.diagnose.terminal import as_text

    print_line(as_text(diagnosis, folder.shown, takes_colour(stream())))
    if facts.guard is not None:
        from surefoot.watch.guard import in_words

        print_line(wrapped_for(stream(), f"surefoot: {in_words(facts.guard)}"))
    incidents = None if watcher is None else watcher.incidents
    if incidents is not None and incidents.replay_command is not None:
        command = incidents.replay_command.replace(str(folder.chosen), folder.shown, 1)
        print_line(f"the first bad step was captured; to run it again:\n  {command}")


def watch_ranks(watcher: Watcher, folder: Path) -> RankWatch | None:
    """Start the thread that checks whether this rank makes progress, and which rank it waits for."""
    from surefoot.record.rank_watch import RankWatch

    context = watcher.context
    if context.step_clock is None:
        return None

    def notify(event: Any) -> None:
        if context.events.log is not None:
            context.events.log.notice(event)

    state, options = context.state, context.options
    watch = RankWatch(
        folder,
        options.rank,
        options.world_size,
        clock=context.step_clock,
        notify=notify,
        say=print_line,
        thread=lambda: state.thread,
    )
    return watch.start()


def notify_ranks(ranks: RankWatch, ending: Ending) -> None:
    """Record for the other ranks that this one ends, and why; print which rank ended before, if that is the reason."""
    from surefoot.core.user_code import is_users, place
    from surefoot.record.collectives import failed_collective

    error = ending.error
    is_left = failed_collective(error) is not None
    where = next((place(*line) for line in reversed(ending.lines) if is_users(line[0])), "")
    at = f" at {where}" if where else ""
    text = f"exit code {ending.code}{at}" if at else f"at the end of the script, exit code {ending.code}"
    if error is not None:
        text = f"{type(error).__name__}{at}: {' '.join(str(error).split())[:160]}"
    if is_left and (lost := ranks.rank_that_ended()):
        print_line(f"surefoot: this rank ends because {lost}")
        text = f"it was waiting for a rank that has ended: {lost}"
    ranks.end(ending.code, text, where=where, follows=is_left)


def _end_by_interrupt() -> None:
    """End by SIGINT, as Python does after an uncaught interrupt, so that a shell loop around it stops too."""
    import signal

    _flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _flush() -> None:
    """Flush stdout: the script's output must precede surefoot's."""
    try:  # noqa: SIM105 (contextlib is not imported before the script)
        sys.stdout.flush()
    except Exception:
        pass  # the interpreter flushes again at exit and reports the error


def _number(name: str, otherwise: int) -> int:
    word = os.environ.get(name, "")
    return int(word) if word.isdigit() else otherwise
