"""One thread and one Hypothesis profile for every test: the same examples on every machine, every time."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch

import forked
from watched import Nursery

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests of the GPU run without it: see CONTRIBUTING.md
    settings = None

if TYPE_CHECKING:
    from collections.abc import Iterator

torch.set_num_threads(1)
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
