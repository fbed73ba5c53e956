"""Running somebody's script as `python SCRIPT` or `python -m MODULE` would, inside this process.

The script gets a fresh `__main__` (so that pickling, multiprocessing and `if __name__ == "__main__"` work), its own
`sys.argv` and `sys.path[0]`. An exception leaves with the traceback Python itself would print: surefoot's frames are
taken off, and `sys.excepthook` is honoured.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import signal
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Target:
    """What to run."""

    name: str
    """A path, or a module's name."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass
class Ending:
    """How the script ended."""

    code: int = 0
    error: BaseException | None = None
    """What it died of; `None` after a normal end or `sys.exit`."""
    globals: dict[str, object] | None = None
    """The script's own namespace, if it got that far."""


def run(target: Target) -> Ending:
    """Run the target to its end. Its exceptions are reported here, as Python would, and never leave."""
    ending = Ending()
    try:
        if target.is_module:
            _run_module(target, ending)
        else:
            _run_path(target, ending)
    except SystemExit as exit_request:
        ending.code = _exit_code(exit_request)
    except BaseException as error:
        ending.error = error
        ending.code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _report(error)
    return ending


def finish(ending: Ending) -> NoReturn:
    """End this process the way the script ended."""
    if isinstance(ending.error, KeyboardInterrupt):
        # Python dies of the signal itself, so that a shell loop around it stops too.
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(ending.code)


def _run_path(target: Target, ending: Ending) -> None:
    path = target.name
    if os.path.isdir(path):
        found = os.path.join(path, "__main__.py")
        if not os.path.isfile(found):
            _refuse(f"can't find '__main__' module in {os.path.abspath(path)!r}", 1)
        sys.path[0] = path
        path = found
    else:
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            _refuse(f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}", 2)
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.argv = [target.name, *target.arguments]
    path = os.path.abspath(path)
    main = _fresh_main(path)
    ending.globals = main.__dict__
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_module(target: Target, ending: Ending) -> None:
    sys.path[0] = os.getcwd()
    sys.argv = [target.name, *target.arguments]
    try:
        spec = importlib.util.find_spec(target.name)
    except (ImportError, AttributeError, ValueError) as error:
        _refuse(f"Error while finding module specification for {target.name!r} ({type(error).__name__}: {error})", 1)
    if spec is None:
        _refuse(f"No module named {target.name}", 1)
    ending.globals = runpy.run_module(target.name, run_name="__main__", alter_sys=True)


def _fresh_main(path: str) -> ModuleType:
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None)
    sys.modules["__main__"] = main
    return main


def _refuse(words: str, code: int) -> NoReturn:
    print(f"{sys.executable}: {words}", file=sys.stderr)
    raise SystemExit(code)


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF if request.code >= 0 else request.code % 256
    print(request.code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    error.__traceback__ = _without_our_frames(error.__traceback__)
    hook: Callable[..., object] = sys.excepthook
    try:
        hook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException:
        sys.__excepthook__(type(error), error, error.__traceback__)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; none at all if the script did not even compile."""
    own = {__file__, runpy.__file__, "<frozen runpy>", importlib.util.__file__, "<frozen importlib._bootstrap>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace
