"""Keys that are typed into the full-screen view."""

import os
import pty
import signal

import pytest

from surefoot.report.terminal.keyboard import Keys, ended_by_signal, keys_of_terminal


def test_q_ends_the_waiting_and_other_keys_do_not():
    reading, writing = os.pipe()
    try:
        os.write(writing, b"xyz")
        assert Keys(reading).asked_to_quit(0.05) is False
        os.write(writing, b"aQ")
        assert Keys(reading).asked_to_quit(60.0) is True
    finally:
        os.close(writing)
        assert Keys(reading).asked_to_quit(60.0) is True  # a terminal that is gone
        os.close(reading)


def test_without_a_terminal_nothing_is_read(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with keys_of_terminal() as keys:
        assert keys.asked_to_quit(0.01) is False


def test_the_terminal_is_as_it_was_afterwards(monkeypatch):
    import termios

    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    with os.fdopen(slave, "r") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        with keys_of_terminal() as keys:
            assert not termios.tcgetattr(slave)[3] & termios.ICANON
            os.write(master, b"q")
            assert keys.asked_to_quit(60.0) is True
        assert termios.tcgetattr(slave) == before
    os.close(master)


def test_a_request_to_end_unwinds_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ending, ended_by_signal():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ending.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
