"""`surefoot run`: its arguments, the run from beginning to end, and what it says when the script is done."""

from __future__ import annotations

import atexit
import os
import sys
import time

from surefoot.commands.run_sinks import Sinks
from surefoot.core.folder_lock import hold
from surefoot.errors import FolderInUse
from surefoot.watch.messages import print_line, stream
from surefoot.watch.process_exit import leave_by
from surefoot.watch.run_script import Ending, Target, run
from surefoot.watch.torch_import import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, NoReturn

    from surefoot.commands.spawned_run import SpawnedRuns
    from surefoot.core.folder_lock import Hold
    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.record.facts import RunFacts
    from surefoot.record.log import RunLog
    from surefoot.record.rank_watch import RankWatch
    from surefoot.watch.watcher import Watcher

USAGE = (
    "usage: surefoot run [--out DIR] [--guard] [--progress] [--tensorboard DIR] [--webhook-env NAME] "
    "[--heartbeat SECONDS] [--eager-looks] SCRIPT [ARGS...], or with -m MODULE instead of SCRIPT"
)

OPTIONS = {
    "--out": "DIR",
    "--guard": "",
    "--progress": "",
    "--tensorboard": "DIR",
    "--webhook-env": "NAME",
    "--heartbeat": "SECONDS",
    "--eager-looks": "",
}
"""Our options that few scripts have, in the order of the usage, and what each takes. `-m` is common in scripts."""
_WITHOUT_TORCH = "\nsurefoot: the script did not import torch in this process, so there was nothing to observe"
_WANTED = {"DIR": "a folder", "NAME": "the name of an environment variable", "SECONDS": "a number of seconds"}


class Request:
    """What the command line asked for."""

    def __init__(
        self,
        target: Target,
        out: str | None = None,
        guard: bool = False,
        progress: bool = False,
        eager_looks: bool = False,
        tensorboard: str | None = None,
        webhook_env: str | None = None,
        heartbeat: float | None = None,
    ) -> None:
        self.target, self.out, self.guard, self.progress = target, out, guard, progress
        self.eager_looks, self.tensorboard = eager_looks, tensorboard
        self.webhook_env, self.heartbeat = webhook_env, heartbeat


def parse(arguments: list[str]) -> Request | str | None:
    """The request, or what is wrong with it; `None` asks for help. What follows the script belongs to the script."""
    given: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if OPTIONS.get(name) and (equals or waiting):
            given[name] = value if equals else waiting.pop(0)
        elif OPTIONS.get(word):
            return f"{word} needs {_WANTED[OPTIONS[word]]}: surefoot run {word} {OPTIONS[word]} SCRIPT"
        elif word in OPTIONS:
            given[word] = "yes"
        elif word == "-m":
            if not waiting:
                return "-m needs a module: surefoot run -m MODULE"
            return _request(Target(waiting[0], tuple(waiting[1:]), is_module=True), given)
        elif word in ("-h", "--help"):
            return None
        elif word == "--" and waiting:
            return _request(Target(waiting[0], tuple(waiting[1:])), given)
        elif word.startswith("-") and word != "-":
            return _unknown(name)
        else:
            return _request(Target(word, tuple(waiting)), given)
    return f"no script given. {USAGE}"


def _unknown(option: str) -> str:
    import difflib

    near = difflib.get_close_matches(option, OPTIONS, n=1)
    meant = f"did you mean {near[0]}?" if near else "options of the script come after the script."
    return f"unknown option {option}; {meant} {USAGE}"


def _request(target: Target, given: dict[str, str]) -> Request | str:
    variable = given.get("--webhook-env")
    if variable is not None and not os.environ.get(variable):
        return (
            f"--webhook-env {variable}: the environment variable is not set, or it is empty. It must contain the "
            "URL that alerts are sent to."
        )
    try:
        heartbeat = float(given["--heartbeat"]) if "--heartbeat" in given else None
    except ValueError:
        return f"--heartbeat takes a number of seconds; got {given['--heartbeat']!r}."
    if heartbeat is not None and variable is None:
        return "--heartbeat needs --webhook-env: the environment variable with the address that heartbeats are sent to."
    return Request(
        target,
        given.get("--out"),
        guard="--guard" in given,
        progress="--progress" in given,
        eager_looks="--eager-looks" in given,
        tensorboard=given.get("--tensorboard"),
        webhook_env=variable,
        heartbeat=heartbeat,
    )


def misplaced(target: Target) -> str:
    """What to say of options of ours that stand behind the script, where they belong to the script."""
    given = [word for word in target.arguments if word in OPTIONS or OPTIONS.get(word.partition("=")[0])]
    if not given:
        return ""
    found = list(dict.fromkeys(word.partition("=")[0] for word in given))
    usage = " ".join(f"{name} {OPTIONS[name]}".rstrip() for name in sorted(found, key=list(OPTIONS).index))
    script = f"{'-m ' * target.is_module}{target.name}"
    were = "was" if len(found) == 1 else "were"
    return (
        f"surefoot: {', '.join(found)} after {target.name} {were} passed to the script; "
        f"to use {'it' if len(found) == 1 else 'them'} in surefoot, run: surefoot run {usage} {script} ..."
    )


_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
}


def unobserved_ranks(target: Target) -> str:
    """What to say of a launcher that is run under surefoot: it starts the script in other processes."""
    launcher = _LAUNCHERS.get(target.name if target.is_module else os.path.basename(target.name))
    if launcher is None:
        return ""
    return (
        f"surefoot: the processes that {launcher} starts are not observed; "
        f"to observe each of them, run: {launcher} ... -m surefoot run SCRIPT ..."
    )


def main(arguments: list[str]) -> NoReturn:
    """Run the command. Does not return: the process ends the way the script did."""
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
    """Where one run is written: chosen once, and locked, so that no other run writes there too."""

    def __init__(self, request: Request, began: float, rank: int, world_size: int) -> None:
        self._out, self._name, self._here, self._began = request.out, request.target.name, os.getcwd(), began
        self._rank, self._world_size = rank, world_size
        self._lock_rank = rank if world_size > 1 else 0  # ranks that have no folder of their own would mix their files
        self._held: Hold | None = None
        self.chosen: Path | None = None
        """The folder, once it is chosen."""

    def claim(self) -> None:
        """Two processes in one folder would mix their files: the second ends before its script begins.

        Imports nothing: the script has not begun.
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
        """The folder as a user types it: relative to where the command began, unless `--out` is an absolute path."""
        if self._out is not None and os.path.isabs(self._out):
            return str(self.chosen)
        return os.path.relpath(self.choose(), self._here)

    def make(self) -> Path:
        """The folder, which exists now. That of a rank must not be a link in another user's folder."""
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
                self._close(flush=False)  # what is not flushed by then is lost, as it always is

        leave_by(leaving)

    def run(self) -> None:
        """Run the script. However it ends, the diagnosis comes last."""
        self._folder.claim()
        self.begin()
        if "SUREFOOT_EXPERIMENT" in os.environ:  # files are looked after before the script can touch one
            from json import loads

            from surefoot.experiments.changes.guard import guard_early

            guard_early(loads(os.environ["SUREFOOT_EXPERIMENT"]))
        if '"incident"' in os.environ.get("SUREFOOT_EXPERIMENT", ""):  # what is wrapped then must be whole by itself
            import torch  # noqa: F401
        try:
            run(self.request.target, self.ending)
        finally:
            if self.watcher is not None:  # what the script does at exit runs compiled
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
        """Watch whether this rank moves, and which one it waits for."""
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
            self.watcher.probes.safely("other ranks", tell_ranks, self._ranks, self.ending)
        try:
            self._write(self.ending)
        except Exception as error:
            if self.watcher is not None:
                print_line(f"surefoot: no diagnosis: {type(error).__name__}: {error}")
            if os.environ.get("SUREFOOT_DEBUG"):
                raise
        interrupted = isinstance(self.ending.error, KeyboardInterrupt)
        # Let go of all that is the script's, so that it is taken down in the usual order.
        self.watcher = None
        self.ending = Ending()
        if interrupted and flush:
            _die_of_interrupt()

    def _save(self, facts: RunFacts) -> None:
        """What is known so far, in case the run is killed."""
        if os.getpid() == self._process:
            self._write_facts(self._with_experiment(facts), self._describe(None))

    def _with_experiment(self, facts: RunFacts) -> RunFacts:
        """The facts, with what the change of a `surefoot bisect` run did."""
        from dataclasses import replace

        return facts if self._experiment is None else replace(facts, experiment=self._experiment.as_facts())

    def _describe(self, ending: Ending | None) -> dict[str, Any]:
        """What ran, and how it ended; a run that has not ended has no exit code."""
        from surefoot.record.run_folder import describe_run

        target, torch = self.request.target, sys.modules.get("torch")
        error = ending.error if ending is not None else None
        return describe_run(target.name, target.arguments, target.is_module, self.request.guard, self._began) | {
            **({"eager_looks": True} if self.request.eager_looks else {}),
            "rank": self._rank,
            "world_size": self._world_size,
            "exit_code": ending.code if ending is not None else None,
            "error": type(error).__name__ if error is not None else None,
            "seconds": round(time.monotonic() - self._started, 3),
            "torch": str(getattr(torch, "__version__", "")) or None,
            **self._guarded(),
        }

    def _guarded(self) -> dict[str, Any]:
        """What `--guard` did so far."""
        facts = self.watcher.steps.guard.as_facts() if self.watcher is not None else None
        return {} if facts is None else {"guarded": facts.to_json()}

    def _write_facts(self, facts: RunFacts | None, run_facts: dict[str, Any]) -> Path:
        from surefoot.core.formats import FACTS
        from surefoot.record.run_folder import write_json

        folder = self._folder.make()
        write_json(folder / "run.json", run_facts)
        held = facts.to_json() if facts is not None else {"schema": FACTS.version, "steps": 0}
        write_json(folder / "facts.json", held)
        return folder

    def _open_log(self) -> RunLog | None:
        """The run log, and a `run.json` beside it, so that others can see what is running."""
        if os.getpid() != self._process:
            return None
        from surefoot.record.log import RunLog
        from surefoot.record.run_folder import write_json

        folder = self._folder.choose()
        try:
            self._folder.make()
            if (folder / "telemetry").exists():
                print_line(f"surefoot: {folder} already contains a run; this run starts at step 0 and replaces it")
            write_json(folder / "run.json", self._describe(None))
        except OSError:
            return None  # the end of the run says so
        from surefoot.record.loader_waits import follow_loaders

        log = RunLog(
            folder, sinks=self._sinks.make(), close_at_exit=False
        )  # the diagnosis, which comes last, belongs into it
        follow_loaders(log)
        return log

    def _write(self, ending: Ending) -> None:
        if not ending.has_script:
            return
        facts = self._facts(self.watcher, ending) if self.watcher is not None else None
        steps = 0 if facts is None else facts.steps
        if self._is_spawned and not steps and not ending.code:
            return  # this process does not train
        if self._spawned is not None and not steps and self._spawned.print_diagnoses(self._folder.shown):
            return  # they are the run
        run_facts = self._describe(ending)
        folder: Path | None = None
        try:
            folder = self._write_facts(facts, run_facts)
        except OSError as error:
            where, why = self._folder.chosen, error.strerror or error
            print_line(f"surefoot: cannot write {where}: {why}; the diagnosis is only printed here")
        if self.watcher is None or facts is None:
            if "torch" not in sys.modules:
                print_line(_WITHOUT_TORCH)
            return
        from surefoot.core.console import takes_colour, wrapped_for
        from surefoot.diagnose.engine import diagnose
        from surefoot.diagnose.terminal import as_text
        from surefoot.record.facts import RunDescription

        diagnosis = diagnose(facts, RunDescription.from_json(run_facts))
        log = self.watcher.events.log
        if log is not None:
            self.watcher.probes.safely("run log", log.end, diagnosis, ending.code)
        if folder is not None:
            from surefoot.record.run_folder import write_json

            write_json(folder / "findings.json", diagnosis.as_json())
        if self._is_spawned:
            return  # the parent prints one diagnosis of all
        print_line(as_text(diagnosis, self._folder.shown, takes_colour(stream())))
        if facts.guard is not None:
            from surefoot.watch.guard import in_words

            print_line(wrapped_for(stream(), f"surefoot: {in_words(facts.guard)}"))
        incidents = self.watcher.incidents
        if incidents is not None and incidents.replay_command is not None:
            command = incidents.replay_command.replace(str(self._folder.chosen), self._folder.shown, 1)
            print_line(f"the first bad step was captured; to run it again:\n  {command}")
        if folder is not None and diagnosis.steps:
            print_line(f"charts and events on one page: surefoot report {self._folder.shown}")
        if folder is not None and self._world_size > 1 and self._rank == 0:
            whole = os.path.dirname(self._folder.shown)
            print_line(f"for one diagnosis of all ranks, after they have ended, run: surefoot diagnose {whole}")

    def _facts(self, watcher: Watcher, ending: Ending) -> RunFacts:
        from dataclasses import replace

        from surefoot.watch.crash import describe_end, find_bad_loss, without_frames

        watcher.probes.out_of_memory = type(ending.error).__name__ == "OutOfMemoryError"
        crash = watcher.probes.safely("crash", describe_end, ending.error, watcher.indexed_calls)
        if crash is None and ending.error is not None:
            crash = without_frames(ending.error)
        bad = watcher.probes.safely("autopsy", find_bad_loss, ending.error, ending.globals, watcher)
        return replace(self._with_experiment(watcher.as_facts()), crash=crash, discarded_loss=bad)


def watch_ranks(watcher: Watcher, folder: Path) -> RankWatch | None:
    """Watch whether this rank moves, and which one it waits for."""
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


def tell_ranks(ranks: RankWatch, ending: Ending) -> None:
    """Tell the other ranks that this one ends; if it does so because another one has left, say which."""
    from surefoot.core.user_code import is_users, place
    from surefoot.record.collectives import failed_collective

    error = ending.error
    is_left = failed_collective(error) is not None
    where = next((place(*line) for line in reversed(ending.lines) if is_users(line[0])), "")
    at = f" at {where}" if where else ""
    words = f"exit code {ending.code}{at}" if at else f"at the end of the script, exit code {ending.code}"
    if error is not None:
        words = f"{type(error).__name__}{at}: {' '.join(str(error).split())[:160]}"
    if is_left and (lost := ranks.rank_that_ended()):
        print_line(f"surefoot: this rank ends because {lost}")
        words = f"it was waiting for a rank that has ended: {lost}"
    ranks.end(ending.code, words, where=where, follows=is_left)


def _die_of_interrupt() -> None:
    """As Python does after an uncaught interrupt, so that a shell loop around it stops too."""
    import signal

    _flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _flush() -> None:
    """What the script printed comes before what surefoot says."""
    try:  # noqa: SIM105 (contextlib is not imported before the script)
        sys.stdout.flush()
    except Exception:
        pass  # the interpreter flushes once more, and says what there is to say


def _number(name: str, otherwise: int) -> int:
    word = os.environ.get(name, "")
    return int(word) if word.isdigit() else otherwise
