"""Python programs in processes of their own, forked from one that has imported torch, which takes seconds.

    forked.run(["-m", "surefoot", "run", "--out", "run", "train.py"], cwd=folder)

does what `python -m surefoot run --out run train.py` would do, and gives its exit code and output. One server per test
process imports torch and surefoot once, computes nothing (so that it has no threads), and forks a child for each
program. A child has the arguments, environment, working directory, import path and random state that a fresh
interpreter would give it, waits for its threads and runs its exit functions. What differs from a fresh interpreter:

- `torch` and `surefoot` are imported already, with one thread, so what is read at their import cannot be changed;
- the hash seed is 0, and interpreter options other than `-W` are not understood;
- `surefoot run` finds what it computes first, the same in every run, already computed: see `_prepare_watching`;
- sampled steps may take any time: the same steps are sampled on every machine;
- `torch.manual_seed` keeps no stacks: see `keep_no_stacks`;
- the interpreter is not taken down at the end unless `whole` is given: modules are not cleared, which takes 0.4 s, and
  torch does not deregister its operators, which takes 0.03 s.

Programs may find further modules imported: see `imported` of `start`.

A test about imports, interpreter options or the end of an interpreter needs a fresh one: see `patience.run`.

`surefoot replay`, `surefoot bisect` and `surefoot zoo` start processes themselves, by `sys.executable`. With
`starts_forks`, a program finds a small one there that has the server fork instead: the fork gets its arguments,
environment, open files and working directory, is confined to the same folders, and is killed with it. This includes the
processes that `multiprocessing` spawns.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOURCE = str(Path(__file__).parents[1] / "src")
_FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
COMPILER = ("torch._inductor.compile_fx", "torch._dynamo.backends.debugging")
"""What the first compiled call imports, with every backend: two seconds."""
_BOUND = "names of surefoot bound"
"""Stands among imported modules where every program is a watched run: see `_bind`."""
_servers: dict[tuple[str, ...], Server] = {}
"""By the modules that their programs find imported; each is forked from an earlier one."""


def environment(**more: str) -> dict[str, str]:
    """What programs get unless they are given another one: ours, with surefoot to import."""
    kept = {key: value for key, value in os.environ.items() if key != "SUREFOOT_DEBUG"}
    return {**kept, "PYTHONPATH": SOURCE, **_FIXED, **more}


def run(
    arguments: Sequence[Any], *, check: bool = False, input: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` says, once it has ended. See `start` for the options."""
    return start(arguments, input=input, **options).end(check)


def start(
    arguments: Sequence[Any],
    *,
    cwd: Any = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    new_session: bool = False,
    whole: bool = False,
    starts_forks: bool = False,
    imported: tuple[str, ...] = (),
) -> Program:
    """Start `python ARGUMENTS` (`[-W ACTION] -c CODE | -m MODULE | SCRIPT`, and what follows).

    `new_session`: it leads a process group of its own. `whole`: the interpreter is taken down at the end.
    `starts_forks`: the programs that it starts by `sys.executable` are forked, too. `imported`: modules that several
    programs would import, which takes each a second or more; here they are imported once.
    """
    order = {
        "arguments": list(map(str, arguments)),
        "folder": str(cwd or os.getcwd()),
        "environment": dict(environment() if env is None else env),
        "new_session": new_session,
        "whole": whole,
        "starts_forks": starts_forks,
    }
    if not starts_forks and order["arguments"][:3] == ["-m", "surefoot", "run"]:
        imported = (*imported, _BOUND)
    return _server_with(imported).start(order, input)


def executable() -> str:
    """What may stand for `sys.executable` in this process, so that what is started by it is forked."""
    from patience import wait_until

    client = _server_with(()).client
    wait_until(lambda: os.access(client, os.X_OK))  # the server writes it when it has started
    return client


class _NoStacks:
    """Stands for the module `traceback` where torch would keep the stack of every `torch.manual_seed`."""

    @staticmethod
    def format_stack() -> list[str]:
        return []


def keep_no_stacks() -> None:
    """Have `torch.manual_seed` keep no stacks in this process.

    Without a device it keeps one for each kind of device, to show it if the device cannot be initialized later. That
    takes milliseconds, and thousands of tests, programs and trials set seeds. `torch.cuda.is_available()` would keep
    the forks of this process from using a device.
    """
    import torch

    if torch.accelerator.current_accelerator() is None:  # a build of torch for the CPU
        for kind in ("cuda", "xpu", "mtia"):
            if hasattr(module := import_module(f"torch.{kind}"), "traceback"):
                module.traceback = _NoStacks


def close() -> None:
    """End the servers, and with them whatever still runs. The next program starts another one."""
    while _servers:
        _servers.popitem()[1].close()  # the newest first: it was forked from an older one


def _server_with(imported: tuple[str, ...]) -> Server:
    if () not in _servers:
        _servers[()] = Server()
    if imported not in _servers:
        shared = imported[:-1] if imported[-1] == _BOUND else ()  # programs that are not watched find the same imported
        _servers[imported] = Server(_server_with(shared), imported[len(shared) :])
    return _servers[imported]


class Program:
    """A program that was started."""

    def __init__(self, arguments: list[str], told: Any, out: Any, errors: Any) -> None:
        self.arguments, self._told, self._out, self._errors = arguments, told, out, errors
        self.pid = int(self._answer())
        self.returncode: int | None = None

    @property
    def stdout(self) -> str:
        """All that it has printed so far."""
        return _text(self._out)

    @property
    def stderr(self) -> str:
        """All that it has written to stderr so far."""
        return _text(self._errors)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Its exit status, or `None` while it runs."""
        if self.returncode is None and select([self._told], [], [], 0)[0]:
            self.returncode = int(self._answer())
        return self.returncode

    def end(self, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Wait for its end. One that hangs is aborted, and shows its stacks."""
        from patience import HANG_SECONDS

        hangs = self.returncode is None and not select([self._told], [], [], HANG_SECONDS)[0]
        if hangs:
            os.kill(self.pid, signal.SIGABRT)  # faulthandler prints where every thread is
        if self.returncode is None:
            self.returncode = int(self._answer())
        ended = subprocess.CompletedProcess(self.arguments, self.returncode, self.stdout, self.stderr)
        for file in (self._told, self._out, self._errors):
            file.close()
        words = f"python {' '.join(self.arguments)}"
        said = f"\nstdout: {ended.stdout}\nstderr: {ended.stderr}"
        assert not hangs, f"{words} hangs.{said}"
        assert not check or ended.returncode == 0, f"{words} ended with {ended.returncode}.{said}"
        return ended

    def _answer(self) -> bytes:
        answer: bytes = self._told.readline()
        assert answer, f"the server is gone that runs python {' '.join(self.arguments)}"
        return answer


def _text(file: Any) -> str:
    """All of it, wherever the program writes next."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


class Server:
    """The process that programs are forked from: a fresh one, or a fork of another that imports more."""

    def __init__(self, parent: Server | None = None, imported: tuple[str, ...] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self.client = os.path.join(self._folder.name, "python")
        with ExitStack() as undo:
            undo.callback(self._folder.cleanup)
            self._channel, theirs = map(undo.enter_context, socket.socketpair())
            if parent is None:
                self._process: Any = self._fresh(theirs.fileno())
            else:
                order = {"arguments": ["import", *imported], "serves": self._folder.name}
                self._process = parent._order(order, theirs)
            undo.pop_all()
        theirs.close()

    def _fresh(self, channel: int) -> subprocess.Popen[bytes]:
        bare = environment(JE_ARROW_MALLOC_CONF="background_thread:false")  # pyarrow's own thread would miss in forks
        del bare["PYTHONPATH"]
        return subprocess.Popen(
            [sys.executable, __file__, str(channel), self._folder.name],
            env=bare,
            pass_fds=[channel],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the tests, which then end it
        )

    def start(self, order: dict[str, Any], given: str) -> Program:
        """Fork a program."""
        with tempfile.TemporaryFile() as entered:
            entered.write(given.encode())
            entered.seek(0)
            return self._order(order, entered)

    def _order(self, order: dict[str, Any], entered: Any) -> Program:
        """Have a child forked that does what the order says, with this file as its standard input.

        A server gets the socket there that its own orders come through.
        """
        out, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        reading, writing = os.pipe()
        with tempfile.TemporaryFile() as paper:
            paper.write(json.dumps(order).encode())
            paper.seek(0)
            files = [file.fileno() for file in (paper, entered, out, errors)]
            socket.send_fds(self._channel, [b"."], [*files, writing])
        os.close(writing)
        return Program(order["arguments"], os.fdopen(reading, "rb", buffering=0), out, errors)

    def close(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)  # a process that a test has left behind may hold a copy of it
        self._channel.close()
        ended = self._process.end() if isinstance(self._process, Program) else None
        assert ended is None or ended.returncode == 0, ended.stderr
        if ended is None:
            self._process.wait()
        self._folder.cleanup()


# ---- in the server -------------------------------------------------------------------------------------------------


def _serve(channel: socket.socket, listener: socket.socket) -> None:
    """Fork a child for each order; tell its number at once, and its exit status when it has ended."""
    children: dict[int, int] = {}
    asked: dict[socket.socket, int] = {}
    waking, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select([channel, listener, waking, *asked], [], [])
        for client in [each for each in asked if each in ready]:  # it has ended, and its child must not outlive it
            child = asked.pop(client)
            if child in children:
                _kill_session(child)
            client.close()
        if waking in ready:
            os.read(waking, 4096)
            _tell_ends(children, set(asked.values()))
        if channel in ready or listener in ready:
            asking = channel if channel in ready else listener.accept()[0]
            message, descriptors, _, _ = socket.recv_fds(asking, 1, 64)
            if not message:
                if asking is channel:
                    break
                asking.close()  # it was killed before it could ask
                continue
            paper, *files, told = descriptors
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in {channel, listener, asking, *asked}:
                    end.close()
                for descriptor in (waking, wake, told, *children.values()):
                    os.close(descriptor)
                order = json.loads(_all_of(paper))
                if folder := order.get("serves"):
                    _become_server(order["arguments"][1:], folder, files)
                _become(order, files)
                return
            children[child] = told
            if asking is not channel:
                asked[asking] = child
            _tell(told, child)
            for descriptor in (paper, *files):
                os.close(descriptor)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _tell_ends(children: dict[int, int], of_clients: set[int]) -> None:
    """Tell the exit status of the children that have ended. What those of clients have started ends with them."""
    for child in list(children):
        if child in of_clients and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            _kill_session(child)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _tell(children[child], os.waitstatus_to_exitcode(status))
            os.close(children.pop(child))


def _kill_session(leader: int) -> None:
    """Kill what is left of the session of a child that was not waited for yet: nobody else has its number."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _tell(told: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for this one
        os.write(told, f"{number}\n".encode())


def _all_of(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _become_server(imported: list[str], folder: str, files: list[int]) -> None:
    """In the child: another server, to its end, whose programs find these modules imported."""
    global _CLIENT
    channel, *files = files
    for place, descriptor in enumerate(files, 1):
        os.dup2(descriptor, place)
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in imported:
            if name == _BOUND:
                _bind()
            else:
                importlib.import_module(name)
    _check_threads()
    gc.freeze()
    listener, _CLIENT = _listen(Path(folder))
    _serve(socket.socket(fileno=channel), listener)
    os._exit(0)


def _check_threads() -> None:
    if os.path.exists("/proc/self/task"):
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing after a fork"


def _become(order: dict[str, Any], files: list[int]) -> None:
    """In the child: the program, to its end."""
    import numpy as np
    import torch

    if order["new_session"]:
        os.setsid()
    if order["starts_forks"]:
        sys.executable = _CLIENT
        multiprocessing.spawn.set_executable(_CLIENT)
    if parent := order.get("parent"):
        os.getppid = lambda: parent
    places = [0, 1, 2, *order.get("open", [])]
    free = max(*places, *files) + 1  # no file is put where another one still waits
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for descriptor in files]
    for descriptor in files:
        os.close(descriptor)
    for place, descriptor in zip(places, moved, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_INSTALLED]
    for seed_anew in (np.random.seed, torch.default_generator.seed):  # as their imports do; `random` does it by itself
        seed_anew()
    if order["whole"]:
        _execute(order["arguments"])
        return
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # those that torch's import has made: one for each library of operators
    leave = os._exit
    code = _run_as_python_does(order["arguments"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if code < 0:  # as Python does after an interrupt that nobody caught
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    leave(code)


def _run_as_python_does(arguments: list[str]) -> int:
    """The exit code; tracebacks and the words of `sys.exit` are printed."""
    try:
        _execute(arguments)
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return (request.code or 0) & 0xFF
        print(request.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _execute(arguments: list[str]) -> None:
    """`python ARGUMENTS`, up to its end."""
    words = list(arguments)
    if words[:3] == ["-I", "-S", sandbox.__file__]:
        sandbox.confine(json.loads(words[3]))
        del words[:6]
    if words[0] == "-B":  # what multiprocessing gives to an interpreter if this one writes no bytecode
        del words[0]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings.filterwarnings(words[1])
        # Behind what torch has put there at its import, which a fresh interpreter does later.
        warnings.filters.insert(len(warnings.filters) - _FILTERS, warnings.filters.pop(0))  # type: ignore[attr-defined]
        del words[:2]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    kind, words = words[0], words[1:]
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        sys.path.insert(0, "")
        exec(compile(words[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    elif kind == "-m":
        sys.argv = ["-m", *words[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
    elif kind.startswith("-"):
        raise ValueError(f"{kind} is not understood here: {__doc__}")
    else:
        path = os.path.join(os.getcwd(), kind)
        sys.argv = [kind, *words]
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        source = Path(path).read_bytes()
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


CLIENT = """
import contextlib, json, os, signal, socket, sys, tempfile
words = sys.argv[1:]
if words[0].startswith("-I") and not words[2].endswith("sandbox.py"):
    os.execv(sys.executable, [sys.executable, *words])
def is_inherited(descriptor):
    with contextlib.suppress(OSError):
        return os.get_inheritable(descriptor)
inherited = [number for number in map(int, os.listdir("/dev/fd")) if number > 2 and is_inherited(number)]
order = {"arguments": words, "folder": os.getcwd(), "environment": dict(os.environ), "new_session": True,
         "whole": False, "starts_forks": True, "parent": os.getppid(), "open": inherited}
paper, (reading, writing) = tempfile.TemporaryFile(), os.pipe()
paper.write(json.dumps(order).encode())
paper.seek(0)
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(__file__), "socket"))
socket.send_fds(server, [b"."], [paper.fileno(), 0, 1, 2, *inherited, writing])
os.close(writing)
with os.fdopen(reading, "rb", buffering=0) as told:
    told.readline()
    code = int(told.readline() or -signal.SIGKILL)
if code < 0:
    with contextlib.suppress(OSError):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""Stands for `python` where a program starts others: the server forks, with the files and the end of this process."""


def _listen(folder: Path) -> tuple[socket.socket, str]:
    """Where clients ask for forks, and the program that does."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    (folder / "client.py").write_text(CLIENT)
    client = folder / "python"
    client.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {folder}/client.py "$@"\n')
    client.chmod(0o755)
    return listener, str(client)


def _import_all() -> None:
    """Torch, and all of surefoot that any run imports sooner or later."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import surefoot

    # Torch 2.13 imports the first at an optimizer's first step, typer the second (and pydantic) at every command.
    for name in ("torch.profiler._cupti_monitor", "typer._adapters"):
        with suppress(ImportError):
            importlib.import_module(name)
    for module in pkgutil.walk_packages(surefoot.__path__, "surefoot."):
        # The adapters import their frameworks, which no other run does.
        left_out = ("surefoot.zoo", "surefoot.trainers.")
        if not module.name.startswith(left_out) and not module.name.endswith("__main__"):
            with suppress(ImportError):  # what not everybody has installed
                importlib.import_module(module.name)
    # How many steps are sampled would depend on how fast the machine is; here it depends on their number alone.
    surefoot.watch.sampling_budget.SECONDS_AT_FIRST = 1e6


def _prepare_watching() -> None:
    """The code of the functions that `surefoot run` hooks, and the names in surefoot's own code: 0.1 s in each run.

    The code is built by a child, in which the hooks stay.
    """
    from surefoot.core import function_hooks
    from surefoot.watch.originals import names_used_in

    for name, module in list(sys.modules.items()):
        if name.startswith("surefoot."):
            names_used_in(module)
    build = function_hooks._instrumented
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "wb") as file:
            marshal.dump(_hooked_codes(function_hooks), file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        built = {tuple(key): code for *key, code in marshal.load(file)}
    os.waitpid(child, 0)

    def find(function: Any, hook: Any, how: Any) -> Any:
        code = built.get((function.__code__, how.always, how.listed))
        if code is None:
            return build(function, hook, how)
        return code.replace(co_consts=tuple(hook if value == "@hook" else value for value in code.co_consts))

    function_hooks._instrumented = find


def _bind() -> None:
    """Give surefoot's modules their own names, as every watched run does first: 0.04 s."""
    from surefoot.watch import probe_runner

    originals = probe_runner.Originals()
    originals.bind()
    probe_runner.Originals = lambda: originals  # type: ignore[assignment, misc]


def _hooked_codes(function_hooks: Any) -> list[tuple[Any, ...]]:
    """In a child: the code of every function that is hooked, how it is, and its new code, without the hook itself."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from surefoot.commands.spawned_run import SpawnedRuns
    from surefoot.watch.context import WatchOptions
    from surefoot.watch.patches import install
    from surefoot.watch.watcher import Watcher

    build, built = function_hooks._instrumented, []

    def note(function: Any, hook: Any, how: Any) -> Any:
        code = build(function, hook, how)
        bare = code.replace(co_consts=tuple("@hook" if value is hook else value for value in code.co_consts))
        built.append((function.__code__, how.always, how.listed, bare))
        return code

    function_hooks._instrumented = note
    install(Watcher(WatchOptions(folder=Path)))
    SpawnedRuns(request=None, folder=Path)  # type: ignore[arg-type]
    function_hooks.add_hook(_BaseDataLoaderIter.__next__, function_hooks.Hook(print), always=True)  # by the run log
    return built


if __name__ == "__main__":
    import atexit
    import builtins
    import faulthandler
    import fcntl
    import gc
    import importlib
    import marshal
    import multiprocessing.spawn
    import pkgutil
    import runpy
    import shlex
    import threading
    import types
    import warnings
    import weakref
    from importlib.machinery import SourceFileLoader

    _FILTERS = len(warnings.filters)
    _INSTALLED = sys.path[1:]
    sys.path[0] = SOURCE
    faulthandler.enable()
    _import_all()
    _prepare_watching()
    keep_no_stacks()
    _check_threads()
    gc.freeze()  # what is imported needs no second look, and its pages stay shared
    from surefoot.experiments import sandbox

    _listener, _CLIENT = _listen(Path(sys.argv[2]))
    _serve(socket.socket(fileno=int(sys.argv[1])), _listener)
