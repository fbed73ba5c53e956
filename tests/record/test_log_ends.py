"""How a log ends: forgotten, with an error or without, and where no thread can be had."""

import gc
import threading

import pytest

from patience import HANG_SECONDS, wait_until
from quiet_log import QuietLog
from runlogs import run, step_row
from surefoot import load_run


def writers():
    return [thread for thread in threading.enumerate() if thread.name == "surefoot-run-log"]


def test_a_log_without_references_ends_by_itself_and_is_whole(tmp_path):
    before = len(writers())
    log = QuietLog(tmp_path)
    critic = log.part("critic")
    del log
    gc.collect()
    critic.take(step_row(0))
    assert critic.flush(HANG_SECONDS)
    assert len(writers()) == before + 1, "a part still writes into it"
    critic.take(step_row(1))
    del critic
    gc.collect()
    wait_until(lambda: len(writers()) == before)
    tables = load_run(tmp_path)
    assert tables.scalars.num_rows == 2
    assert [event.event for event in tables.events] == ["end"]


def test_a_program_that_forgets_its_log_and_ends_at_once_loses_nothing(tmp_path):
    code = """
    log = RunLog(sys.argv[1])
    for step in range(1000):
        log.take(step_row(step))
    del log
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_run(tmp_path).scalars.num_rows == 1000


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("raise ValueError('no more data')", ("error", "the program ended with ValueError: no more data")),
        ("with log: raise ValueError('inside')", ("error", "the program ended with ValueError: inside")),
        ("sys.last_value = NameError('a slip in a notebook'); log.close()", ("info", "the log was closed")),
        ("sys.last_value = NameError('a slip in a notebook'); sys.ps1 = '>>> '", ("info", "the log was closed")),
        ("sys.exit(3)", ("info", "the log was closed")),
    ],
)
def test_only_what_ended_the_program_is_reported_as_its_error(tmp_path, lines, said):
    code = f"""
    log = RunLog(sys.argv[1])
    log.take(step_row(0))
    {lines}
    """
    run(code, tmp_path)
    [end] = [event for event in load_run(tmp_path).events if event.event == "end"]  # the machine may raise an alarm
    assert (end.severity, end.summary) == said


def test_where_there_is_no_thread_training_continues_without_a_log(tmp_path):
    code = """
    import threading
    threading.stack_size(1 << 46)  # more than there is of memory
    class Sink:
        def write(self, batch): ...
        def close(self): ...
    log = RunLog(sys.argv[1], sinks=[Sink()])
    log.take(step_row(0))
    print(log.dropped, log.closed, log.flush(HANG_SECONDS))
    log.close()
    """
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "True", "False"]), done.stderr
    assert done.stderr.count("can't start new thread") == 2, "the log and the sink say so, once each"
