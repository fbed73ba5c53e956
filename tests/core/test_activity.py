"""Work of a process: its CPU time and bytes, those of its children too, and what has become of another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

import patience
from surefoot.core.activity import own_work, started_at, state_of, work_of

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")

SPINNING = "import sys\nsys.stdout.write('begun\\n')\nsys.stdout.flush()\nwhile True:\n    pass\n"


def test_bytes_and_cpu_time_of_other_threads_count_and_those_of_the_watching_thread_do_not(tmp_path):
    before = own_work()
    (tmp_path / "mine").write_bytes(bytes(4_000_000))
    middle = own_work()
    thread = threading.Thread(target=(tmp_path / "theirs").write_bytes, args=(bytes(4_000_000),))
    thread.start()
    thread.join()
    after = own_work()
    assert middle.bytes_moved - before.bytes_moved < 2_000_000
    assert after.bytes_moved - middle.bytes_moved > 3_900_000  # less what threads that have ended since had moved


def test_a_child_that_works_is_work_and_its_stop_and_end_are_seen():
    child = subprocess.Popen([sys.executable, "-S", "-c", SPINNING], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        started = started_at(child.pid)
        before = own_work().cpu_seconds
        patience.wait_until(lambda: own_work().cpu_seconds > before + 0.1)
        assert work_of(child.pid) is not None
        assert state_of(child.pid, started) == "runs"
        child.send_signal(signal.SIGSTOP)
        patience.wait_until(lambda: state_of(child.pid, started) == "stopped")
        assert state_of(child.pid, (started or 0) + 1) == "gone"  # another process with its number
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert state_of(child.pid, started) == "gone"
    assert work_of(child.pid) is None
