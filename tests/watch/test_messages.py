"""Messages of surefoot go to the stderr of the beginning, whatever the script does to it."""

import io
import sys

from surefoot.watch import messages


def test_a_replaced_stderr_does_not_get_them(monkeypatch):
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(messages, "_stream", first)
    monkeypatch.setattr(sys, "stderr", second)
    messages.print_line("hello")
    assert messages.stream() is first
    assert (first.getvalue(), second.getvalue()) == ("hello\n", "")


def test_a_closed_or_missing_stream_is_no_error(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(messages, "_stream", stream)
        messages.print_line("lost")
