"""Runs are started as ordered, and none is left behind. Whole runs are in the tests of the commands."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING

from patience import HANG_SECONDS
from surefoot.experiments.changes import ORDER, options_for, take_order
from surefoot.experiments.processes import LARGEST_OUTPUT, OUTPUT, Child, Children, Subject

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def sleeping(folder: Path, name: str) -> Child:
    """A real process that would run for ten minutes."""
    scratch = folder / f"scratch-{name}"
    scratch.mkdir()
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return Child(name, folder, process, scratch, time.monotonic())


def test_a_script_below_the_working_directory_is_run_from_the_copy(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert Subject("train.py", ("--lr", "1"), folder=tmp_path).command(copy) == [
        "--",
        str(copy / "train.py"),
        "--lr",
        "1",
    ]
    assert Subject("/else/train.py", folder=tmp_path).command(copy) == ["--", "/else/train.py"]
    assert Subject("pkg.train", ("x",), is_module=True, folder=tmp_path).command(copy) == ["-m", "pkg.train", "x"]


def test_at_the_deadline_the_first_run_is_ended_and_its_copy_removed(tmp_path: Path) -> None:
    with Children(Subject("train.py", folder=tmp_path), tmp_path, threads=1) as children:
        first, second = sleeping(tmp_path, "first"), sleeping(tmp_path, "second")
        children.running += [first, second]
        assert children.wait(until=time.monotonic()) is first
        assert first.process.returncode == -9
        assert first.ended is not None
        assert not first.scratch.exists()
        assert children.running == [second]
    assert second.process.returncode == -9
    assert children.wait(until=time.monotonic()) is None


def test_a_run_that_ends_by_itself_is_returned_before_the_deadline(tmp_path: Path) -> None:
    with Children(Subject("train.py", folder=tmp_path), tmp_path, threads=1) as children:
        process = subprocess.Popen(["true"], start_new_session=True)
        child = Child("quick", tmp_path, process, tmp_path / "none", time.monotonic())
        children.running.append(child)
        assert children.wait(until=time.monotonic() + HANG_SECONDS) is child
        assert process.returncode == 0


def test_the_order_reaches_the_run_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    children = Children(Subject("train.py", folder=tmp_path, path=("/allowed",)), tmp_path, threads=3)
    found = children._environment({"change": "deterministic", "seconds": 5.0}, tmp_path)
    assert json.loads(found[ORDER]) == {"change": "deterministic", "seconds": 5.0}
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert found["PYTHONPATH"].split(os.pathsep)[0] == "/allowed"
    assert "/theirs" not in found["PYTHONPATH"]
    assert (found["OMP_NUM_THREADS"], found["TMPDIR"]) == ("3", str(tmp_path))
    monkeypatch.setenv(ORDER, found[ORDER])
    assert take_order() == {"change": "deterministic", "seconds": 5.0}
    assert take_order() is None


def test_a_run_from_an_incident_is_not_diagnosed() -> None:
    assert options_for({"incident": "x"}) == {"most_sampled_steps": 0, "folder": None}
    assert options_for({"change": "clip"}) == options_for(None) == {}


def test_an_output_that_nobody_will_read_is_emptied(tmp_path: Path) -> None:
    child = sleeping(tmp_path, "loud")
    child.process.kill()
    child.process.wait()
    (tmp_path / OUTPUT).write_text("short")
    child.shorten_output()
    assert (tmp_path / OUTPUT).read_text() == "short"
    os.truncate(tmp_path / OUTPUT, LARGEST_OUTPUT + 1)
    child.shorten_output()
    assert (tmp_path / OUTPUT).stat().st_size == 0
