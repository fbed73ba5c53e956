"""Triton is loaded in the background, and used once it is there. A module of the test stands in for it."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from surefoot.core import device
from surefoot.watch import triton_loading
from surefoot.watch.triton_loading import load_in_background

if TYPE_CHECKING:
    from pathlib import Path

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SLOW = """
import pathlib, time

def triton_key():
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.01)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library whose hash is known once the returned file exists."""
    go = tmp_path / "go"
    (tmp_path / "slow_library.py").write_text(SLOW.format(go=str(go)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(triton_loading, "_LIBRARY", "slow_library")
    monkeypatch.setattr(device, "_loading_triton", [])
    yield go
    go.touch()
    sys.modules.pop("slow_library", None)


def test_until_it_is_loaded_only_a_guard_uses_it(library: Path) -> None:
    observing = [True]
    thread = load_in_background([CPU, CUDA], lambda: observing[0], ("slow_library",))
    assert thread is not None
    assert not device.runs_triton(CUDA)
    observing[0] = False
    assert device.runs_triton(CUDA)
    observing[0] = True
    library.touch()
    thread.join()
    assert device.runs_triton(CUDA)
    assert not device.runs_triton(CPU)


def test_without_a_cuda_device_and_where_it_is_known_nothing_is_loaded(library: Path) -> None:
    assert load_in_background([CPU], lambda: True, ("slow_library",)) is None
    sys.modules["slow_library"] = sys
    assert load_in_background([CUDA], lambda: True, ("slow_library",)) is None


def test_a_library_that_cannot_be_imported_changes_nothing(library: Path) -> None:
    thread = load_in_background([CUDA], lambda: True, ("no_such_library",))
    assert thread is not None
    thread.join()
    assert device.runs_triton(CUDA)


def test_a_fork_waits_until_nothing_is_being_imported(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_loading, "_LONGEST_JOIN", 0.3)
    thread = load_in_background([CUDA], lambda: True, ("slow_library",))
    assert thread is not None
    began = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert time.monotonic() - began >= 0.3
    library.touch()
    thread.join()
