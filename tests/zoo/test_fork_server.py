"""Runs in forks are as in processes of their own: their output, exit code, folder, random numbers, and end."""

from pathlib import Path

from surefoot.zoo.fork_server import ForkedRun, ForkServer

PRINTS = """
import atexit, os, random, sys, threading, time
import numpy as np, torch
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print(os.getcwd(), *sys.argv[1:], __name__, torch.get_num_threads())
print("numbers", random.random(), np.random.rand(), torch.rand(()).item())
print(f"left out: {os.read(0, 1)}", file=sys.stderr)
sys.exit(sys.argv[1] if sys.argv[1] != "7" else 7)
"""
LEAVES_A_CHILD = """
import subprocess, sys
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(started.pid)
"""


def test_a_fork_is_like_a_process_of_its_own(tmp_path):
    def a_run(name, text, *arguments, **options):
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / name).mkdir()
        paths = (str(tmp_path / f"{name}.py"), arguments, str(tmp_path / name), str(tmp_path / f"{name}.txt"))
        return ForkedRun(*paths, **options)

    runs = [
        a_run("seven", PRINTS, "7"),
        a_run("words", PRINTS, "no data"),
        a_run("child", LEAVES_A_CHILD),
        a_run("loop", "import time\ntime.sleep(600)", timeout_s=1),
    ]
    with ForkServer(jobs=2) as server:
        for each in runs:
            server.submit(each)
        assert dict(server.ended()) == dict(zip(runs, (7, 1, 0, None), strict=True))
        server.submit(runs[0])
        assert list(server.ended()) == [(runs[0], 7)]
    seven, words = ((tmp_path / f"{name}.txt").read_text().splitlines() for name in ("seven", "words"))
    assert f"{tmp_path / 'seven'} 7 __main__ 1" in seven
    assert {"at exit", "thread", "left out: b''"} < set(seven)
    assert "no data" in words
    numbers = [line.split() for lines in (seven, words) for line in lines if line.startswith("numbers")]
    assert all(one != other for one, other in zip(numbers[0][1:], numbers[1][1:], strict=True))
    left = int((tmp_path / "child.txt").read_text())
    state = Path(f"/proc/{left}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
