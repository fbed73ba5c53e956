"""One thread and one Hypothesis profile for every test: the same examples on every machine, every time."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forked
from watched import Nursery

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests of the GPU run without it: see CONTRIBUTING.md
    settings = None

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

torch.set_num_threads(1)
os.environ.setdefault("SUREFOOT_STRICT", "1")  # a rule of the diagnosis that fails raises
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes that tests start share the cores with other tests
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as under `nohup`: the programs that tests interrupt would be deaf
    signal.signal(signal.SIGINT, signal.default_int_handler)
if settings is not None:
    settings.register_profile(
        "surefoot",
        derandomize=True,
        deadline=None,
        max_examples=30,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("surefoot")


forked.keep_no_stacks()


@pytest.fixture(scope="session")
def watch() -> Iterator[Nursery]:
    """Runs a script under the watcher: `watch(source).first` is the first finding."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    """What programs were forked from ends with the tests."""
    yield
    forked.close()


@pytest.fixture
def starts_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What surefoot starts by `sys.executable` in this test is forked (see `forked`)."""
    monkeypatch.setattr(sys, "executable", forked.executable())


_LONGEST = ("watch", "replay", "experiments", "demo", "guard", "trainers", "diagnose", "keep", "report", "zoo")
"""The folders with files that take 20 s or more: workers begin with them, so that none is left with one at the end."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected stays to the end: looking through it again and again would take seconds in every worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        folders = [f"tests/{name}/" for name in _LONGEST]
        items.sort(key=lambda item: not any(item.nodeid.startswith(folder) for folder in folders))


_modules = [0]
"""How many modules were loaded when the collector was last told to leave them alone."""


@pytest.fixture(autouse=True)
def _collector_leaves_modules_alone() -> None:
    """A full collection takes 0.3 s with all of torch on the heap, and surefoot and its tests collect often.

    Only what modules hold is left alone: what a test makes is collected as ever.
    """
    if len(sys.modules) > _modules[0] + 100:
        gc.collect()
        gc.freeze()
        _modules[0] = len(sys.modules)


# ---- tests that start no process: `make test-fast` ------------------------------------------------------------------

_PROCESSES = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
"""The events by which Python tells of a process that is about to start."""
_in_a_test = [False]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-processes", action="store_true", help="leave out the tests that start a process, a browser included"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-processes"):
        sys.addaudithook(_leave_out)


def _leave_out(event: str, arguments: Any) -> None:
    if _in_a_test[0] and event in _PROCESSES:
        pytest.skip("starts a process, which --no-processes leaves out")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    _in_a_test[0] = True
    try:
        return (yield)
    finally:
        _in_a_test[0] = False
