"""What the demo prints for the user to type."""

import sys
from pathlib import Path

from surefoot.demo.command import _surefoot


def test_the_command_is_named_by_its_path_where_the_shell_does_not_find_it(tmp_path, monkeypatch):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.with_name("surefoot").write_text("")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert _surefoot() == str(Path(".venv/bin/surefoot"))
    python.with_name("surefoot").unlink()
    assert _surefoot() == "python -m surefoot"


def test_where_the_shell_finds_it_its_name_is_enough(tmp_path, monkeypatch):
    command = tmp_path / "surefoot"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _surefoot() == "surefoot"
