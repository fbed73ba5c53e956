"""Waiting for what must happen, on a machine of any speed.

No test may fail because a machine is slow or busy, so none of them measures seconds. A test waits for an event; the
only limit is `HANG_SECONDS`, which ends what would otherwise never end, and shows where it hangs.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HANG_SECONDS = 900.0
"""Far beyond what anything in the tests takes, on any machine."""
_POLL_SECONDS = 0.005


def wait_until(reached: Callable[[], Any], told: Callable[[], str] = lambda: "") -> None:
    """Wait until `reached()` is true. After `HANG_SECONDS` it fails with what `told()` says, and prints all stacks."""
    deadline = time.monotonic() + HANG_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            faulthandler.dump_traceback(file=sys.__stderr__)
            raise AssertionError(f"still waiting after {HANG_SECONDS:g} s. {told()}")
        time.sleep(_POLL_SECONDS)


def run(
    command: Sequence[Any], *, check: bool = False, input: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a Python program, with its output as text. One that hangs is ended and shows its stacks."""
    pipes = dict.fromkeys(("stdout", "stderr", *(("stdin",) if input is not None else ())), subprocess.PIPE)
    process = start(command, **{**pipes, **options})
    with process:
        try:
            out, errors = process.communicate(input, timeout=HANG_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler prints where every thread is
            out, errors = process.communicate()
            raise AssertionError(f"{command} hangs.\nstdout: {out}\nstderr: {errors}") from None
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0 or not check, f"{command} ended with {process.returncode}.\n{out}\n{errors}"
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def start(command: Sequence[Any], *, env: Any = None, **options: Any) -> subprocess.Popen[str]:
    """`subprocess.Popen` of a Python program, with its output as text, that shows its stacks when it is aborted."""
    environment = {**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen([*map(str, command)], text=True, env=environment, **options)


def ended(process: subprocess.Popen[Any]) -> int:
    """The exit status of a process, once it has ended. One that hangs is aborted, and shows its stacks."""
    try:
        return process.wait(HANG_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        process.wait()
        raise AssertionError(f"{process.args} hangs; its stacks are on its stderr") from None


class Clock:
    """Stands in for `time` in one module of ours: there, time passes when the test says so."""

    sleep = staticmethod(time.sleep)
    strftime = staticmethod(time.strftime)

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic
