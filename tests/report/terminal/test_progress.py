"""Progress in a real terminal, and where there is none: what the script writes stays as it was."""

import io
import logging
import os
import re
import signal
import sys
import time

import pytest
from terminals import SOURCE, InTerminal

import patience
import surefoot as sf
from surefoot.errors import SettingError
from surefoot.record.messages import Batch, Event, Sink, StepRow

TRAINING = """
import os, sys, time
from surefoot.record.messages import Batch, StepRow
from surefoot.report.terminal.progress import ProgressSink
how = sys.argv[1]
progress = ProgressSink(total_steps=60)
for step in range(60):
    print(f"user line {step}", flush=True)
    if step % 10 == 0:
        os.write(1, f"straight to the descriptor {step}\\n".encode())
    progress.write(Batch(steps=[StepRow(step, time.time(), loss=1.0 / (step + 1), grad_norm=2.5)]))
    if how == "raise" and step == 40:
        raise ValueError("oh")
    if how == "unfinished" and step == 40:
        print("half a line", end="", flush=True)
        break
    if how == "wait" and step == 40:
        while True:
            time.sleep(0.05)  # a signal that arrives just before a sleep does not end it
if how != "exit":
    progress.close()
"""
EXPECTED = [
    line
    for step in range(60)
    for line in [f"user line {step}", *([f"straight to the descriptor {step}"] if step % 10 == 0 else [])]
]
UNTIL_40 = EXPECTED[: EXPECTED.index("straight to the descriptor 40") + 1]


def is_waiting(screen):
    return any("steps 41 / 60" in row for row in screen.rows)


def is_given_back(screen):
    return screen.whole_screen_scrolls and not screen.cursor_hidden and "── surefoot" not in "\n".join(screen.rows)


def user_lines(screen):
    return [line for line in screen.everything if line.startswith(("user", "straight"))]


@pytest.mark.parametrize("how", ["end", "exit"])
def test_everything_the_script_wrote_is_there_in_order_and_the_terminal_is_given_back(how):
    with InTerminal(TRAINING, arguments=[how]) as terminal:
        assert terminal.read_to_end() == 0
        screen = terminal.screen
    assert user_lines(screen) == EXPECTED
    assert is_given_back(screen)
    assert any(line.startswith("surefoot: steps 60/60") for line in screen.everything) == (how == "end")


LOGGED = """
import sys, time
import surefoot as sf
from surefoot.record.messages import StepRow
log = sf.RunLog(sys.argv[1], sinks=[sf.ProgressSink()])
for step in range(200):
    log.take(StepRow(step, time.time(), loss=1.0))
    time.sleep(0.01)
"""
PROGRESS_FIRST = LOGGED.replace("sinks=[sf.ProgressSink()]", "sinks=[progress]").replace(
    "log =", "progress = sf.ProgressSink()\nlog ="
)


@pytest.mark.parametrize("script", [LOGGED, PROGRESS_FIRST])
def test_a_log_that_is_closed_by_the_end_of_the_program_has_the_last_word(tmp_path, script):
    with InTerminal(script, arguments=[tmp_path / "run"]) as terminal:
        assert terminal.read_to_end() == 0
    assert is_given_back(terminal.screen)
    assert any(line.startswith("surefoot: step 199 · loss 1") for line in terminal.screen.everything)


def test_without_the_strip_the_bytes_are_the_scripts_own():
    with InTerminal(TRAINING, arguments=["exit"]) as terminal:
        terminal.read_to_end()
    text = re.sub(r"\x1b7.*?\x1b8|\x1bD|\x1b\[\d*[AJ]", "", terminal.raw.decode(), flags=re.DOTALL)
    assert text.startswith("".join(f"{line}\r\n" for line in EXPECTED))


def test_while_it_runs_the_strip_is_at_the_bottom_and_the_output_above_it():
    with InTerminal(TRAINING, arguments=["wait"]) as terminal:
        terminal.read_until(is_waiting)
        rows = terminal.screen.rows
    bar = next(index for index, row in enumerate(rows) if row.startswith("── surefoot"))
    assert "steps 41 / 60" in rows[bar + 1]
    assert "grad 2.5" in "\n".join(rows[bar:])
    assert not [row for row in rows[bar:] if "user line" in row]
    assert user_lines(terminal.screen) == UNTIL_40


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_it_follows_the_size_of_the_terminal(columns):
    with InTerminal(TRAINING, columns=columns, lines=30, arguments=["wait"]) as terminal:
        terminal.read_until(is_waiting)
        rows = terminal.screen.rows
    assert len(next(row for row in rows if row.startswith("── surefoot"))) == columns - 1


def test_ctrl_c_gives_the_terminal_back():
    with InTerminal(TRAINING, arguments=["wait"]) as terminal:
        terminal.read_until(is_waiting)
        terminal.type(b"\x03")
        assert terminal.read_to_end() == -signal.SIGINT
        screen = terminal.screen
    assert is_given_back(screen)
    assert "KeyboardInterrupt" in screen.everything
    assert user_lines(screen) == UNTIL_40


def test_an_exception_gives_the_terminal_back():
    with InTerminal(TRAINING, arguments=["raise"]) as terminal:
        assert terminal.read_to_end() == 1
    assert is_given_back(terminal.screen)
    assert "ValueError: oh" in terminal.screen.everything


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_leaves_the_terminal_as_it_was(blow):
    with InTerminal(TRAINING, arguments=["wait"]) as terminal:
        terminal.read_until(is_waiting)
        os.kill(terminal.process.pid, blow)
        assert terminal.read_to_end() == -blow
        assert is_given_back(terminal.screen)
        assert user_lines(terminal.screen) == UNTIL_40


def test_a_line_that_is_not_finished_is_not_written_over():
    with InTerminal(TRAINING, arguments=["unfinished"]) as terminal:
        terminal.read_to_end()
    lines = terminal.screen.everything
    last = next(index for index, line in enumerate(lines) if line.startswith("surefoot: steps 41/60"))
    assert lines[last - 1] == "half a line"


def test_stdout_in_a_file_has_the_scripts_bytes_alone(tmp_path):
    out = tmp_path / "out"
    with out.open("wb") as file, InTerminal(TRAINING, stdout=file, arguments=["end"]) as terminal:
        assert terminal.read_to_end() == 0
    assert out.read_text() == "".join(f"{line}\n" for line in EXPECTED)
    assert "surefoot: steps 60/60" in terminal.raw.decode()


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"PYTHONIOENCODING": "ascii"}])
def test_a_poor_terminal_gets_what_it_can_show(environment):
    with InTerminal(TRAINING, arguments=["end"], **environment) as terminal:
        assert terminal.read_to_end() == 0
    assert b"\x1b" not in terminal.raw if "TERM" in environment else terminal.raw.isascii()


def test_only_the_first_rank_speaks():
    with InTerminal(TRAINING, arguments=["end"], RANK="1") as terminal:
        assert terminal.read_to_end() == 0
    assert terminal.raw.decode() == "".join(f"{line}\r\n" for line in EXPECTED)


def test_in_a_pipe_there_are_plain_lines_on_stderr():
    done = patience.run(
        [sys.executable, "-c", TRAINING, "end"],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "utf-8"},
        check=True,
    )
    assert done.stdout == "".join(f"{line}\n" for line in EXPECTED)
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    assert "steps 60/60 · loss 0.01667" in done.stderr.splitlines()[-1]


# ---- in this process ------------------------------------------------------------------------------------------------


def a_batch(step=1, events=()):
    return Batch(steps=[StepRow(step, 1e9 + step, loss=0.5)], events=events)


def test_it_is_a_sink():
    assert isinstance(sf.ProgressSink(stream=io.StringIO()), Sink)


def test_it_is_fed_by_the_run_log(tmp_path):
    stream = io.StringIO()
    with sf.RunLog(tmp_path / "run", sinks=[sf.ProgressSink(stream=stream)]) as log:
        for step in range(100):
            log.take(StepRow(step, time.time(), loss=1.0))
        log.event("skip", 99, "a NaN in the gradient", severity="warning")
    lines = stream.getvalue().splitlines()
    assert any("step 99 · warning · skip · a NaN in the gradient" in line for line in lines)
    assert "step 99 · loss 1 ·" in lines[-1]


def test_a_tqdm_bar_that_left_its_line_open_is_not_continued():
    bars = pytest.importorskip("tqdm")
    stream = io.StringIO()
    progress = sf.ProgressSink(stream=stream)
    with bars.tqdm(total=10, file=stream):
        progress.write(a_batch())
        assert "\nsurefoot " in stream.getvalue()
    progress.close()


def test_a_second_close_and_a_write_after_it_do_nothing():
    stream = io.StringIO()
    progress = sf.ProgressSink(stream=stream)
    progress.write(a_batch())
    progress.close()
    said = stream.getvalue()
    progress.close()
    progress.write(a_batch(2))
    progress.tick()
    assert stream.getvalue() == said


def test_a_run_without_steps_says_nothing():
    stream = io.StringIO()
    progress = sf.ProgressSink(stream=stream)
    progress.tick()
    progress.close()
    assert stream.getvalue() == ""


def test_a_stream_that_fails_is_warned_about_once_and_never_raises(caplog):
    stream = io.StringIO()
    progress = sf.ProgressSink(stream=stream)
    stream.close()
    with caplog.at_level(logging.WARNING, "surefoot"):
        for step in range(3):
            progress.write(a_batch(step, [Event("alarm", step, "a spike", 1e9)]))
        progress.close()
    assert len(caplog.records) == 1
    assert "progress is no longer shown" in caplog.text


def test_a_row_that_makes_no_sense_does_not_raise(caplog):
    progress = sf.ProgressSink(stream=io.StringIO())
    with caplog.at_level(logging.WARNING, "surefoot"):
        progress.write(Batch(steps=[StepRow("no number", None)]))
        progress.close()
    assert "progress is no longer shown" in caplog.text


def test_wrong_settings_are_refused():
    with pytest.raises(SettingError, match="`every_seconds` must be greater than 0; got 0"):
        sf.ProgressSink(every_seconds=0)
    with pytest.raises(SettingError, match="`total_steps` must be at least 1; got -5"):
        sf.ProgressSink(total_steps=-5)
