"""`surefoot watch` on runs that really run, and are really killed."""

import json
import os
import pty
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest
from terminals import SOURCE, InTerminal
from typer.testing import CliRunner

import patience
import surefoot as sf
from surefoot.cli import app
from surefoot.record.messages import StepRow
from surefoot.report.terminal.watch import Keys, ended_by_signal, keys_of_terminal

RUN = """
import sys, time
import surefoot as sf
from surefoot.record.messages import StepRow
folder, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
log = sf.RunLog(folder)
log.event("resume" if first else "start", first, f"from step {first}")
for step in range(first, first + count):
    log.take(StepRow(step, time.time(), loss=1.0 / (step + 1), grad_norm=1.0, skipped=step == 5))
    time.sleep(0.02)
log.event("end", step, "the loop is over")
log.close()
"""
WATCH = "import sys; from surefoot.cli import main; main(['watch', *sys.argv[1:]])"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}


class Watching:
    """`surefoot watch` with its lines in a pipe."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCH, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            env=ENVIRONMENT,
        )
        self.lines, self._queue = [], queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def _read(self):
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))

    def until(self, words):
        """Wait for a line with these words."""
        end = time.monotonic() + patience.HANG_SECONDS
        while not any(words in line for line in self.lines):
            try:
                self.lines.append(self._queue.get(timeout=max(0.01, end - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"no {words!r} in {self.lines}") from None


def start_run(folder, first, count):
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), str(first), str(count)], env=ENVIRONMENT)


def write_run(folder, steps=20, end=True):
    with sf.RunLog(folder) as log:
        log.event("start", 0, "from the beginning", evidence={"total_steps": 40})
        for step in range(steps):
            log.take(StepRow(step, time.time() - 0.1 * (steps - step), loss=2.0, grad_norm=1.0, skipped=step == 5))
        if end:
            log.event("end", steps - 1, "the loop is over")


def once(folder):
    return CliRunner().invoke(app, ["watch", "--once", str(folder)])


def test_it_waits_for_the_run_survives_its_death_and_ends_with_it(tmp_path):
    folder = tmp_path / "not" / "yet"
    with Watching(folder) as watching:
        watching.until("waiting for it to begin")
        run = start_run(folder, 0, 100_000)
        try:
            watching.until("· loss ")
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
        run = start_run(folder, 3, 20)
        watching.until("step 3 · resume")
        assert patience.ended(run) == 0
        watching.until("ended")
        assert patience.ended(watching.process) == 0
    assert sum("start · from step 0" in line for line in watching.lines) == 1
    events = [line for line in watching.lines if "· loss " not in line]  # on where it stands there is one every 10 s
    assert len(events) < 20


def test_ctrl_c_is_quiet(tmp_path):
    with Watching(tmp_path / "nothing") as watching:
        watching.until("waiting")
        watching.process.send_signal(signal.SIGINT)
        assert patience.ended(watching.process) == 0
    assert len(watching.lines) == 2


def test_on_a_screen_it_moves_with_the_run_and_q_leaves_it_in_order(tmp_path):
    folder = tmp_path / "run"
    run = start_run(folder, 0, 100_000)
    try:
        with InTerminal(WATCH, lines=15, arguments=[folder]) as terminal:
            terminal.read_until(lambda screen: any("steps/s" in row for row in screen.rows))
            before = terminal.screen.rows
            moved = lambda screen: screen.rows[1] != before[1] and screen.rows[2].startswith("loss ")  # noqa: E731
            terminal.read_until(moved)  # it may be seen half drawn
            terminal.type(b"q")
            assert terminal.read_to_end() == 0
            assert not terminal.screen.cursor_hidden
            assert terminal.raw.count(b"\x1b[?1049h") == terminal.raw.count(b"\x1b[?1049l") == 1
    finally:
        run.kill()
        run.wait()


def test_once_prints_one_view(tmp_path):
    write_run(tmp_path / "run")
    said = once(tmp_path / "run")
    assert said.exit_code == 0
    for words in ("steps 20 / 40", "loss 2", "skips 1", "ended", "the loop is over"):
        assert words in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 100


def test_the_verdict_is_shown_with_its_findings(tmp_path):
    write_run(tmp_path / "run", end=False)
    finding = {"cause": "lr.too-high", "severity": "error", "summary": "the rate\nis \x1b[31m0.9"}
    (tmp_path / "run" / "findings.json").write_text(json.dumps({"verdict": "broken", "findings": [finding]}))
    said = once(tmp_path / "run").stdout
    assert "finished: broken" in said
    assert "lr.too-high: the rate is [31m0.9" in said
    assert "\x1b" not in said


def test_a_folder_that_holds_a_diagnosis_alone_is_a_finished_run(tmp_path):
    (tmp_path / "findings.json").write_text(json.dumps({"verdict": "healthy", "findings": []}))
    said = once(tmp_path)
    assert said.exit_code == 0
    assert "finished: healthy" in said.stdout


def test_a_verdict_on_what_came_before_is_not_the_end_of_a_resumed_run(tmp_path):
    write_run(tmp_path / "run", end=False)
    path = tmp_path / "run" / "findings.json"
    path.write_text(json.dumps({"verdict": "healthy", "findings": []}))
    os.utime(path, (1e9, 1e9))
    assert "finished" not in once(tmp_path / "run").stdout


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"verdict": 3, "findings": "none"}'])
def test_findings_that_cannot_be_read_are_no_obstacle(tmp_path, damage):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "findings.json").write_text(damage)
    assert "step 19" in once(tmp_path / "run").stdout


def test_each_rank_has_a_line(tmp_path):
    for rank in range(3):
        write_run(tmp_path / "run" / f"rank{rank}", steps=20 + rank)
    said = once(tmp_path / "run").stdout
    assert "step 19" in said
    assert "rank1  step 20  loss 2  skips 1  ended" in said
    assert "rank2  step 21" in said


def test_the_numbers_of_ranks_are_below_each_other(tmp_path):
    for rank in range(11):
        write_run(tmp_path / "run" / f"rank{rank}", steps=20)
    said = once(tmp_path / "run").stdout
    assert "rank9   step 19" in said
    assert "rank10  step 19" in said


def test_the_slowest_rank_is_named_while_ranks_run(tmp_path):
    logs = [sf.RunLog(tmp_path / "run" / f"rank{rank}", device_seconds=None) for rank in range(3)]
    for rank, log in enumerate(logs):
        log.event("start", 0, "begins")
        for step in range(40 if rank != 1 else 25):
            log.take(StepRow(step, 1e9 + step, loss=1.0))
        log.flush()
    said = once(tmp_path / "run").stdout
    for log in logs:
        log.close()
    assert "slowest: rank1, step 24, 15 steps behind" in said


def test_the_verdict_of_several_ranks_is_one_for_all_of_them(tmp_path):
    for rank in range(2):
        write_run(tmp_path / "run" / f"rank{rank}", steps=20)
        finding = {"cause": "loss.broadcast", "severity": "error", "summary": "Shapes differ.", "step": 3}
        held = {"schema": 1, "verdict": "broken" if rank else "healthy", "steps": 20, "findings": [finding] * rank}
        (tmp_path / "run" / f"rank{rank}" / "findings.json").write_text(json.dumps(held))
    said = once(tmp_path / "run").stdout
    assert "finished: broken" in said
    assert "On rank 1: Shapes differ." in said


@pytest.mark.parametrize(("make", "words"), [("nothing", "no run at"), ("file", "is a file")])
def test_wrong_use_is_one_line_and_code_2(tmp_path, make, words):
    path = tmp_path / make
    if make == "file":
        path.write_text("")
    done = patience.run([sys.executable, "-c", WATCH, "--once", str(path)], env=ENVIRONMENT)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_an_output_it_says_so_and_ends(tmp_path):
    command = f"exec {sys.executable} -c '{WATCH.replace(chr(39), chr(34))}' --once {tmp_path} >&-"
    done = patience.run(["sh", "-c", command], stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "output is closed" in done.stderr


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
