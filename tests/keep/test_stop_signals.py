"""Signals to real processes: the run is saved and left, and the next one ends where it would have ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forked
from interrupted import SENT
from patience import ended, start, wait_until
from resumed import PASS, Run
from surefoot.keep.dead_workers import DeferringHandler
from surefoot.keep.stop_signals import StopSignals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERRUPTED = Path(__file__).parents[1] / "interrupted.py"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")


class Server:
    """Starts training processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0

    def start(self, kind: str, folder: Path, seed: int, held: bool = False, whole: bool = True) -> Started:
        """`held`: it is going to get a signal, and does not end before that. `whole`: see `forked.start`."""
        self._count += 1
        out = self.folder / f"out-{self._count}"
        out.touch()
        order = json.dumps({"kind": kind, "folder": str(folder), "out": str(out), "seed": seed, "held": held})
        process = forked.start([INTERRUPTED, order], new_session=True, whole=whole)
        return Started(process.pid, out, lambda: process.end().returncode)


class Started:
    """A training process."""

    def __init__(self, pid: int, out: Path, end: Callable[[], int]) -> None:
        self.pid, self._out, self.end = pid, out, end

    @property
    def said(self) -> str:
        return self._out.read_text()

    def until(self, reached: Callable[[], bool]) -> None:
        wait_until(reached, lambda: self.said)

    def until_said(self, word: str, times: int = 1) -> None:
        self.until(lambda: self.said.count(word) >= times)

    @property
    def is_gone(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def send(self, number: signal.Signals, to: Callable[[int, int], None] = os.kill) -> None:
        """Send it a signal, and let it go on."""
        to(self.pid, number)
        Path(f"{self._out}{SENT}").touch()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tmp_path_factory.mktemp("interrupts"))


ENDS: dict[str, str] = {}


def undisturbed(server: Server, kind: str) -> str:
    """What a run of this kind tells at its end when nobody interrupts it."""
    if kind not in ENDS:
        run = server.start(kind, server.folder / f"undisturbed-{kind}", 0, whole=False)
        assert run.end() == 0, run.said
        ENDS[kind] = run.said.splitlines()[-1]
    return ENDS[kind]


def check_rerun(server: Server, kind: str, folder: Path, before: str) -> None:
    """The rerun goes on after the batches that were taken, and ends as the undisturbed run does."""
    run = server.start(kind, folder, 99, whole=False)
    assert run.end() == 0, run.said
    assert run.said.splitlines()[-1] == undisturbed(server, kind)
    assert (run.said + before).count("batch\n") == 4 * PASS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_and_the_rerun_ends_bitwise_the_same(
    server: Server, tmp_path: Path, number: signal.Signals
) -> None:
    run = server.start("plain", tmp_path, 0, held=True)
    run.until_said("batch", 9)
    run.send(number)
    assert run.end() == 128 + number
    assert f"{number.name}: saving" in run.said
    assert "Traceback" not in run.said
    check_rerun(server, "plain", tmp_path, run.said)


def test_a_program_of_its_own_leaves_the_same_way(tmp_path: Path) -> None:
    """The whole interpreter, not forked from anything."""
    out = tmp_path / "out"
    command = json.dumps({"kind": "plain", "folder": str(tmp_path / "run"), "out": str(out), "seed": 0, "held": True})
    process = start([sys.executable, INTERRUPTED, command], env=forked.environment())
    run = Started(process.pid, out, lambda: ended(process))
    run.until(lambda: out.exists() and out.read_text().count("batch") > 3)
    run.send(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    assert "Traceback" not in out.read_text()


@pytest.mark.parametrize("kind", ["accumulating", "workers", "epochs", "writing"])
def test_it_may_come_at_any_moment(server: Server, tmp_path: Path, kind: str) -> None:
    run = server.start(kind, tmp_path, 0, held=True)
    if kind == "epochs":
        run.until_said("evaluation", 2)
    else:
        run.until_said("batch", 10)
    if kind == "writing":
        is_writing = lambda: any(name.endswith(".part") for name in os.listdir(tmp_path / "checkpoints"))  # noqa: E731
        run.until(lambda: is_writing() or "held" in run.said)
    run.send(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.said
    assert "Traceback" not in run.said
    assert not any(name.startswith(".") for name in os.listdir(tmp_path / "checkpoints"))
    check_rerun(server, kind, tmp_path, run.said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_workers_too_is_no_error(server: Server, tmp_path: Path, number: signal.Signals) -> None:
    """As a terminal sends it at Ctrl-C, and a scheduler at the end of the time."""
    run = server.start("workers", tmp_path, 0, held=True)
    run.until_said("batch", 9)
    run.send(number, os.killpg)
    assert run.end() == 128 + number, run.said
    assert "Traceback" not in run.said
    assert run.said.count("saving") == 1
    check_rerun(server, "workers", tmp_path, run.said)


def test_a_worker_that_is_killed_with_the_lock_of_its_loader_does_not_keep_the_run_from_ending(
    server: Server, tmp_path: Path
) -> None:
    """Torch's iterator waits for that lock when it is deleted."""
    run = server.start("locked_worker", tmp_path, 0)
    run.until_said("locked")
    run.until_said("batch", 2)  # a worker loads ahead
    os.killpg(run.pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.said
    assert "Traceback" not in run.said
    check_rerun(server, "locked_worker", tmp_path, run.said)


def test_a_second_signal_leaves_at_once(server: Server, tmp_path: Path) -> None:
    run = server.start("long_step", tmp_path, 0)
    run.until_said("asleep")
    os.kill(run.pid, signal.SIGTERM)
    run.until_said("saving")
    os.kill(run.pid, signal.SIGTERM)
    assert run.end() == -signal.SIGTERM


@pytest.mark.parametrize("kind", ["stalled", "stalled_worker"])
def test_a_loader_that_stalls_does_not_keep_the_run_from_stopping(server: Server, tmp_path: Path, kind: str) -> None:
    """And the rerun is bitwise the undisturbed one, though half of the batch had been drawn."""
    run = server.start(kind, tmp_path, 0)
    run.until_said("stalled")
    run.until_said("batch", 2)  # a worker loads ahead
    os.kill(run.pid, signal.SIGTERM)
    try:
        run.until(lambda: run.is_gone)
    except AssertionError:
        os.killpg(run.pid, signal.SIGKILL)
    assert run.end() == 128 + signal.SIGTERM, run.said
    assert "Traceback" not in run.said
    assert run.said.count("batch\n") == 2
    check_rerun(server, kind, tmp_path, run.said)


def test_a_program_with_a_handler_of_its_own_keeps_it(server: Server, tmp_path: Path) -> None:
    run = server.start("own_handler", tmp_path, 0, held=True)
    run.until_said("batch", 3)
    run.send(signal.SIGTERM)
    assert run.end() == 0
    assert "mine" in run.said
    assert run.said.splitlines()[-1] == undisturbed(server, "plain")


def test_processes_that_are_started_in_the_loop_can_still_be_ended(server: Server, tmp_path: Path) -> None:
    run = server.start("with_child", tmp_path, 0)
    assert run.end() == 0, run.said
    assert f"child {-signal.SIGTERM}" in run.said
    assert "saving" not in run.said


# ---- without processes --------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture
def _python_handlers() -> Iterator[None]:
    """Whatever started the tests may have had others."""
    before = handlers()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("_python_handlers")
def test_a_worker_that_ends_together_with_the_signal_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes the signal first, and then finds that SIGCHLD has arrived."""
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    before = signal.signal(signal.SIGCHLD, DeferringHandler(lambda number, frame: None))
    both = {signal.SIGTERM, signal.SIGCHLD}
    stopping = StopSignals([signal.SIGTERM])
    try:
        with stopping.installed():
            signal.pthread_sigmask(signal.SIG_BLOCK, both)
            for number in both:
                os.kill(os.getpid(), number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert stopping.received == signal.SIGTERM
    assert errors == []


@pytest.mark.usefixtures("_python_handlers")
def test_handlers_are_back_after_the_loop_after_a_break_and_after_an_error(tmp_path: Path) -> None:
    before = handlers()
    run = Run(tmp_path)
    run.train()
    assert handlers() == before
    for _ in Run(tmp_path / "other").batches():
        assert handlers() != before
        break
    assert handlers() == before
    third = Run(tmp_path / "third", loader=lambda: [(1, 2)])
    with pytest.raises(TypeError):
        third.train()
    assert handlers() == before


@pytest.mark.usefixtures("_python_handlers")
def test_in_another_thread_nothing_is_installed(tmp_path: Path) -> None:
    before, seen = handlers(), []

    def train() -> None:
        for _ in Run(tmp_path).batches():
            seen.append(handlers())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen
    assert all(each == before for each in seen)
