"""Which streams can carry status lines; how they are drawn is in test_progress.py, in real terminals."""

import io
import os
import pty
import sys

from surefoot.report.terminal.status_lines import terminal_of


def test_a_file_a_pipe_and_text_in_memory_have_no_terminal(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        assert terminal_of(stream) is None
    assert terminal_of(io.StringIO()) is None
    assert terminal_of(None) is None


def test_a_terminal_of_another_session_is_not_ours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        assert stream.isatty()
        assert terminal_of(stream) is None
    os.close(master)


def test_a_dumb_terminal_and_an_interactive_session_are_left_alone(monkeypatch):
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        monkeypatch.setenv("TERM", "dumb")
        assert terminal_of(stream) is None
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        assert terminal_of(stream) is None
    os.close(master)
