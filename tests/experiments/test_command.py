"""What the command checks first, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.errors import UsageError
from surefoot.experiments.command import Options, _answer, _folder, ended_by_signals, run
from surefoot.experiments.results import Report, Row

if TYPE_CHECKING:
    from pathlib import Path


def report(answer: str) -> Report:
    found = Diagnosis("broken", 10, (Finding("lr.too-high", "error", 0.9, "It diverges."),))
    return Report(answer, "LR / 3 cures it.", [Row("lr-3", "LR / 3", "cure", "cures")], found, "train.py")


@pytest.mark.parametrize(("answer", "code"), [("cured", 0), ("healthy", 0), ("no harm", 0), ("flaky", 1)])
def test_the_exit_code_says_whether_something_is_left_to_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: str, code: int
) -> None:
    assert _answer(report(answer), tmp_path, as_json=False) == code
    assert "LR / 3" in capsys.readouterr().out


def test_the_json_is_that_of_the_file_and_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report("cured")
    assert _answer(made, tmp_path, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    made.write(tmp_path)
    assert {key: found[key] for key in found if key != "findings"} == json.loads((tmp_path / "bisect.json").read_text())
    assert list(found)[-1] == "findings"
    assert found["findings"][0]["cause"] == "lr.too-high"


def test_a_folder_with_a_bisection_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _folder(None, "train").parent == tmp_path / "runs"
    assert _folder(tmp_path / "new" / "deep", "train").is_dir()
    (tmp_path / "bisect.json").write_text("{}")
    with pytest.raises(UsageError, match="already contains a bisection"):
        _folder(tmp_path, "train")
    with pytest.raises(UsageError, match="cannot make the folder"):
        _folder(tmp_path / "bisect.json" / "below", "train")


def test_a_script_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no script at nowhere\.py"):
        run("nowhere.py", (), False, Options())
    assert not (tmp_path / "runs").exists()


def test_a_request_to_end_is_an_exception_so_that_nothing_is_left_running() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, ended_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
