"""How a pass is started and what is read of it. Whole passes are in `test_script.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from patience import wait_until
from surefoot.replay.processes import _below_here, _environment, _RealPaths, _run, _tail

if TYPE_CHECKING:
    import pytest


def test_what_a_process_has_started_is_ended_with_it(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path / 'child'}; exit 0"
    with open(os.devnull, "wb") as nowhere:
        assert _run(["sh", "-c", script], 60.0, stdout=nowhere) == 0
    state = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")

    def is_gone() -> bool:
        try:
            return state.read_text().split()[2] == "Z"
        except OSError:
            return True

    wait_until(is_gone)


def test_a_process_that_takes_too_long_has_no_exit_code() -> None:
    with open(os.devnull, "wb") as nowhere:
        assert _run(["sleep", "600"], 0.05, stdout=nowhere) is None


def test_the_exit_code_of_a_process_is_returned() -> None:
    with open(os.devnull, "wb") as nowhere:
        assert _run(["sh", "-c", "exit 7"], 60.0, stdout=nowhere) == 7


def test_answers_name_the_real_working_directory() -> None:
    real = _RealPaths("/scratch/shadow-1", "/home/work")
    assert real({"file": "/scratch/shadow-1/train.py", "n": 3, "all": ["/scratch/shadow-1", None]}) == {
        "file": "/home/work/train.py",
        "n": 3,
        "all": ["/home/work", None],
    }


def test_a_script_below_the_working_directory_is_run_from_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _below_here("a/../train.py") == "train.py"
    assert _below_here(str(tmp_path / "b" / "train.py")) == str(Path("b") / "train.py")
    assert _below_here("/elsewhere/train.py") == "/elsewhere/train.py"


def test_a_pass_imports_this_surefoot_and_what_is_allowed(tmp_path: Path) -> None:
    found = _environment(tmp_path, ("/allowed",))
    source = str(Path(sys.modules["surefoot"].__file__ or "").parent.parent)
    assert found["PYTHONPATH"].split(os.pathsep) == [source, "/allowed"]
    assert found["TMPDIR"] == str(tmp_path)


def test_the_end_of_the_output_is_shown(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    output.write_text("".join(f"line {i}\n" for i in range(100_000)))
    lines = _tail(output).splitlines()
    assert (lines[1], lines[-1], len(lines)) == ("    line 99980", "    line 99999", 21)
    output.write_text("\n")
    assert _tail(output) == ""
