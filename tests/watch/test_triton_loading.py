"""Triton is loaded in the background, and used once it is there. A module of the test stands in for it."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from patience import wait_until
from surefoot.core import device
from surefoot.watch import triton_loading
from surefoot.watch.triton_loading import TritonLoader

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
    monkeypatch.setattr(device, "_postponed_triton", [])
    yield go
    go.touch()
    sys.modules.pop("slow_library", None)


def loader(may_import: bool = True, module: str = "slow_library") -> TritonLoader:
    return TritonLoader(lambda: may_import, (module,))


def test_until_it_is_loaded_only_a_guard_uses_it(library: Path) -> None:
    observing, triton = [True], loader()
    device.postpone_triton(triton.is_loaded, lambda: observing[0])
    assert not device.runs_triton(CUDA)
    observing[0] = False
    assert device.runs_triton(CUDA)
    observing[0] = True
    assert not device.runs_triton(CUDA)
    library.touch()
    wait_until(lambda: device.runs_triton(CUDA))
    assert not device.runs_triton(CPU)


def test_it_is_imported_only_once_it_may_be_unless_the_script_has_imported_it(library: Path) -> None:
    library.touch()
    early = loader(may_import=False)
    assert not early.is_loaded()
    time.sleep(0.05)
    assert not early.is_loaded()
    assert "slow_library" not in sys.modules
    sys.modules["slow_library"] = sys  # as the script's own import, which has no such function
    assert not early.is_loaded()
    wait_until(early.is_loaded)


def test_a_library_that_cannot_be_imported_changes_nothing(library: Path) -> None:
    missing = loader(module="no_such_library")
    device.postpone_triton(missing.is_loaded, lambda: True)
    wait_until(lambda: device.runs_triton(CUDA))


def test_when_nothing_is_observed_any_more_nothing_is_postponed(library: Path) -> None:
    device.postpone_triton(loader(may_import=False).is_loaded, lambda: True)
    assert not device.runs_triton(CUDA)
    device.stop_postponing_triton()
    assert device.runs_triton(CUDA)


def test_a_fork_waits_until_nothing_is_being_imported(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_loading, "_LONGEST_JOIN", 0.3)
    triton = loader()
    assert not triton.is_loaded()
    began = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert time.monotonic() - began >= 0.3
    library.touch()
    wait_until(triton.is_loaded)
