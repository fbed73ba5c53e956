"""`surefoot run`: its arguments, the run from beginning to end, and what it says when the script is done."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from surefoot.launch.arrival import when_imported
from surefoot.launch.execute import Ending, Target, finish, run
from surefoot.launch.folder import default_folder, describe_run, write_json

if TYPE_CHECKING:
    from surefoot.launch.watcher import Watcher

USAGE = "usage: surefoot run [--out DIR] [--guard] SCRIPT [ARGS...]   or: surefoot run [...] -m MODULE [ARGS...]"


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    target: Target
    out: Path | None = None
    guard: bool = False


def parse(arguments: list[str]) -> Request | str | None:
    """The request, or what is wrong with it; `None` asks for help. What follows the script belongs to the script."""
    out: Path | None = None
    guard = False
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--guard":
            guard = True
        elif word == "--out":
            if not waiting:
                return "--out needs a folder: surefoot run --out DIR SCRIPT"
            out = Path(waiting.pop(0))
        elif word.startswith("--out="):
            out = Path(word.removeprefix("--out="))
        elif word == "-m":
            if not waiting:
                return "-m needs a module: surefoot run -m MODULE"
            return Request(Target(waiting[0], tuple(waiting[1:]), is_module=True), out, guard)
        elif word in ("-h", "--help"):
            return None
        elif word == "--" and waiting:
            return Request(Target(waiting[0], tuple(waiting[1:])), out, guard)
        elif word.startswith("-") and word != "-":
            return f"unknown option {word}; options come before the script. {USAGE}"
        else:
            return Request(Target(word, tuple(waiting)), out, guard)
    return f"no script given. {USAGE}"


def main(arguments: list[str]) -> NoReturn:
    """Run the command. Does not return: the process ends the way the script did."""
    request = parse(arguments)
    if request is None:
        from surefoot.cli import main as answer

        answer(["run", "--help"])
    if isinstance(request, str):
        print(f"surefoot run: {request}", file=sys.stderr)
        sys.exit(2)
    session = Session(request)
    ending = session.run()
    finish(ending)


class Session:
    """One watched run."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.watcher: Watcher | None = None
        self.folder = request.out or default_folder(request.target.name)
        rank = os.environ.get("RANK")
        if rank is not None and int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
            self.folder = self.folder / f"rank{rank}"
        self.folder = self.folder.absolute()
        self._facts = describe_run(
            request.target.name, request.target.arguments, request.target.is_module, request.guard
        )
        self._started = time.monotonic()
        self._process = os.getpid()
        self._closed = False

    def run(self) -> Ending:
        """Run the script; whatever happens to it, end with a diagnosis."""
        when_imported("torch", self._attach)
        leave = os._exit

        def exit_at_once(code: int) -> NoReturn:
            if os.getpid() == self._process and threading.current_thread() is threading.main_thread():
                self._close(Ending(code=code))
            leave(code)

        os._exit = exit_at_once  # type: ignore[assignment]
        ending = run(self.request.target)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        os._exit = leave
        self._close(ending)
        return ending

    def _attach(self) -> None:
        try:
            from surefoot.launch.patches import install
            from surefoot.launch.watcher import Watcher

            self.watcher = Watcher(guard=self.request.guard)
            install(self.watcher)
        except Exception as error:
            _say(f"cannot watch this torch ({type(error).__name__}: {error}); the script runs as it is")

    def _close(self, ending: Ending) -> None:
        if self._closed:
            return
        self._closed = True
        sys.stdout.flush()
        try:
            self._write(ending)
        except Exception as error:
            _say(f"no diagnosis: {type(error).__name__}: {error}")
            if os.environ.get("SUREFOOT_DEBUG"):
                raise

    def _write(self, ending: Ending) -> None:
        facts: dict[str, Any] = {"schema": 1, "steps": 0}
        if self.watcher is not None:
            from surefoot.launch.postmortem import find_bad_loss, postmortem

            if ending.error is not None:
                crash = self.watcher.safely("crash", postmortem, ending.error, self.watcher)
                facts["crash"] = crash or {"type": type(ending.error).__name__, "message": str(ending.error)[:2000]}
            bad = self.watcher.safely("autopsy", find_bad_loss, ending.error, ending.globals, self.watcher)
            facts = self.watcher.as_facts() | facts | {"steps": self.watcher.steps}
            if bad is not None:
                facts["bad_loss"] = bad
        import_torch = sys.modules.get("torch")
        self._facts |= {
            "exit_code": ending.code,
            "error": type(ending.error).__name__ if ending.error is not None else None,
            "seconds": round(time.monotonic() - self._started, 3),
            "torch": str(getattr(import_torch, "__version__", "")) or None,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "run.json", self._facts)
            write_json(self.folder / "facts.json", facts)
        except OSError as error:
            _say(f"cannot write {self.folder}: {error.strerror or error}; the diagnosis is only shown here")
        if self.watcher is None:
            return
        from surefoot.diagnose.engine import diagnose
        from surefoot.diagnose.terminal import as_text

        diagnosis = diagnose(facts, self._facts)
        with contextlib.suppress(OSError):  # said above
            write_json(self.folder / "findings.json", diagnosis.as_json())
        print(as_text(diagnosis, str(self.folder)), file=sys.stderr)


def _say(words: str) -> None:
    print(f"surefoot: {words}", file=sys.stderr)
