"""Runs a script as `python SCRIPT` or `python -m MODULE` would, inside this process.

The script gets a fresh `__main__` (so that pickling, multiprocessing and `if __name__ == "__main__"` work), its own
`sys.argv` and `sys.path[0]`. What it raises propagates to the interpreter, which handles it as usual: exit codes,
`sys.excepthook`, waiting for threads, `atexit`, death by SIGINT. Only surefoot's frames are removed from the traceback
first.

This module imports nothing that the interpreter has not already loaded: a file of the script may have the name of a
module of the standard library, and must take precedence as it would under `python`.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType, TracebackType
    from typing import Any

_earlier: list[ModuleType] = []
"""The previous `__main__`. It must not be deleted while its code is running."""


class Target:
    """What to run: a path or the name of a module, and its arguments."""

    def __init__(self, name: str, arguments: tuple[str, ...] = (), is_module: bool = False) -> None:
        self.name, self.arguments, self.is_module = name, arguments, is_module


class Ending:
    """How the script ended: exit code, exception (`None` after a normal end or `sys.exit`), and its globals."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.error: BaseException | None = None
        self.globals: dict[str, object] | None = None
        self.lines: list[tuple[str, int]] = []
        """File and line of every frame that what ended the script came through, the innermost last."""
        self.has_script = True
        """Whether the file of the script could be opened."""


def run(target: Target, ending: Ending) -> None:
    """Run the target to its end. An exception is recorded in `ending` and propagates."""
    try:
        if target.is_module:
            _run_module(target, ending)
        elif target.name == "-":
            _run_text(sys.stdin.read(), "<stdin>", target, ending)
        elif _is_importable(target.name):
            _run_folder(target, ending)
        else:
            _run_file(target, ending)
    except SystemExit as request:
        ending.code = exit_code(request)
        ending.lines = lines_of(request.__traceback__)
        raise
    except BaseException as error:
        ending.error = error
        ending.lines = lines_of(error.__traceback__)
        ending.code = 130 if isinstance(error, KeyboardInterrupt) else 1
        sys.excepthook = _without_surefoot(sys.excepthook)
        raise


def lines_of(trace: TracebackType | None) -> list[tuple[str, int]]:
    """File and line of every entry of a traceback, the innermost last."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _run_file(target: Target, ending: Ending) -> None:
    path = _absolute(target.name)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        ending.has_script = False
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    _run_text(source, path, target, ending)


def _run_text(source: str | bytes, path: str, target: Target, ending: Ending) -> None:
    sys.argv = [target.name, *target.arguments]
    main = _fresh_main()
    ending.globals = main.__dict__
    if path != "<stdin>":
        from importlib.machinery import SourceFileLoader

        main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_folder(target: Target, ending: Ending) -> None:
    """Run the `__main__.py` of a directory or a zip file."""
    import runpy

    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, _absolute(target.name))
    else:
        sys.path[0] = _absolute(target.name)
    sys.argv = [target.name, *target.arguments]
    ending.globals = _fresh_main().__dict__
    runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]


def _run_module(target: Target, ending: Ending) -> None:
    import runpy

    _first_on_path(os.getcwd())
    sys.argv = ["-m", *target.arguments]
    ending.globals = _fresh_main().__dict__
    runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]


def _is_importable(path: str) -> bool:
    """Whether Python would look for a `__main__.py` inside: in a folder or a zip file."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _absolute(path: str) -> str:
    """Make a path absolute as Python does for a script: joined, but not normalized."""
    if os.path.isabs(path):
        return path
    return os.path.join(os.getcwd(), path)


def _first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _fresh_main() -> ModuleType:
    earlier = sys.modules["__main__"]
    main = type(earlier)("__main__")
    main.__dict__.update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    _earlier.append(earlier)
    sys.modules["__main__"] = main
    return main


def exit_code(request: SystemExit) -> int:
    """The exit code that a request asks for."""
    if request.code is None:
        return 0
    return request.code & 0xFF if isinstance(request.code, int) else 1


def _without_surefoot(hook: Callable[..., Any]) -> Callable[..., None]:
    """An `excepthook` that shows the traceback that Python would have shown."""

    def report(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        error.__traceback__ = trace = clean(trace)
        try:
            hook(kind, error, trace)
        except SystemExit:
            raise
        except BaseException as failure:  # as the interpreter does when a hook fails
            sys.stderr.write("Error in sys.excepthook:\n")
            failure.__context__ = None
            failure.__traceback__ = failure.__traceback__.tb_next if failure.__traceback__ is not None else None
            sys.__excepthook__(type(failure), failure, failure.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(kind, error, trace)

    return report


def clean(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the script (or `runpy`) on, without surefoot's frames."""
    while trace is not None:
        at_door = trace.tb_frame.f_code.co_filename == __file__
        trace = trace.tb_next
        if at_door:
            break
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    watching = sys.modules.get("surefoot.watch.watcher")
    if watching is None or trace is None:
        return trace
    from surefoot.watch.tracebacks import without_watching

    return without_watching(trace)
