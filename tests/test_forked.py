"""A program that is forked from a process with torch does what it would do in a fresh interpreter."""

import os
import signal
import sys
import tempfile

import pytest

import forked
import patience

PROGRAMS = {
    "arguments_path_and_main": (
        "import sys; print(sys.argv, sys.path[0], sys.path[1], __name__, sorted(globals()), sys.stdin.read())"
    ),
    "an_exception": "def inner():\n    raise ValueError('what')\nprint('before')\ninner()",
    "words_on_leaving": "import sys; sys.exit('no such file')",
    "a_number_on_leaving": "import sys; sys.exit(259)",
    "nothing_on_leaving": "raise SystemExit",
    "leaving_at_once": "import os; print('lost'); os._exit(3)",
    "exit_functions_and_threads": (
        "import atexit, threading, time; atexit.register(print, 'bye')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start(); print('main')"
    ),
    "an_interrupt": "raise KeyboardInterrupt",
    "a_signal": "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "a_child": "import os, sys\nprint('once', flush=True)\nif not os.fork(): sys.exit(0)\nos.wait(); print('parent')",
    "a_file_beside_it": "import beside; print(beside.x, beside.__file__)",
    "the_environment": "import os; os.chdir('/'); print(os.environ['GIVEN'], 'GONE' in os.environ, os.getcwd())",
}


@pytest.mark.parametrize("way", ["script", "module", "code"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_and_prints_as_in_a_fresh_interpreter(tmp_path, monkeypatch, name, way):
    monkeypatch.setenv("GONE", "1")
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    (tmp_path / "beside.py").write_text("x = 5")
    words = {"script": ["program.py"], "module": ["-m", "program"], "code": ["-c", PROGRAMS[name]]}[way]
    environment = {**forked.environment(GIVEN="5"), "PYTHONDONTWRITEBYTECODE": "1"}
    del environment["GONE"]
    options = {"cwd": tmp_path, "env": environment, "input": "typed"}
    fresh, ours = patience.run([sys.executable, *words, "a b"], **options), forked.run([*words, "a b"], **options)
    assert (ours.returncode, ours.stdout) == (fresh.returncode, fresh.stdout)
    assert ours.stderr == fresh.stderr


def test_one_that_is_ended_says_so_and_what_it_said_can_be_read_meanwhile():
    program = forked.start(["-c", "import time; print('here', flush=True); time.sleep(1e6)"])
    patience.wait_until(lambda: program.stdout == "here\n")
    assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    assert program.end().returncode == -signal.SIGTERM


def test_random_numbers_are_new_in_every_process():
    draw = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    first, second = (forked.run(["-c", draw], check=True).stdout.split() for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))
    seeded = "import torch; torch.manual_seed(3); print(torch.rand(1).item(), torch.get_num_threads())"
    assert forked.run(["-c", seeded]).stdout == forked.run(["-c", seeded]).stdout


def test_warnings_can_be_errors():
    warn = "import warnings; warnings.warn('careful')"
    assert forked.run(["-c", warn]).returncode == 0
    assert forked.run(["-W", "error", "-c", warn]).returncode == 1


def test_an_option_that_only_a_fresh_interpreter_understands_is_refused():
    assert "is not understood here" in forked.run(["-X", "importtime", "-c", ""]).stderr


STARTS = """
import os, subprocess, sys
from surefoot.experiments.sandbox import confined

def started(code, *before):
    ended = subprocess.run([*before, sys.executable, "-c", code, "word"], capture_output=True, text=True)
    return ended.returncode, ended.stdout.strip(), ended.stderr.strip().rpartition("\\n")[2].partition(":")[0]

code = "import os, sys; assert 'torch' in sys.modules; print(sys.argv[1], os.getppid()); sys.exit(5)"
print(started(code), os.getpid())
print(started("import os; os.kill(os.getpid(), 9)"))
inside = confined(["allowed"])
if inside:
    print(started("open('no', 'w')", *inside), started("open('allowed/yes', 'w')", *inside))
hangs = subprocess.Popen([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(1e6)"],
                         stdout=subprocess.PIPE, text=True)
print(hangs.stdout.readline())
hangs.kill()
"""


def test_what_a_program_starts_is_forked_as_well_confined_and_killed_with_it(tmp_path):
    (tmp_path / "allowed").mkdir()
    told = forked.run(["-c", STARTS], cwd=tmp_path, starts_forks=True, check=True).stdout.split("\n")
    first, parent = told[0].rsplit(" ", 1)
    assert first == f"(5, 'word {parent}', '')"
    assert told[1] == "(-9, '', '')"
    if len(told) > 5:
        assert told[2] == "(1, '', 'PermissionError') (0, '', '')"
    with pytest.raises(ProcessLookupError):
        patience.wait_until(lambda: os.kill(int(told[-3]), 0))


SPAWNS = """
import multiprocessing, sys

def tell(pipe, word):
    pipe.send((word, "torch" in sys.modules))
    sys.exit(3)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(theirs, "word"))
    process.start()
    print(*ours.recv())
    process.join()
    print(process.exitcode)
"""


def test_what_a_program_spawns_is_forked_with_the_files_that_it_inherits(tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    told = [forked.run(["spawns.py"], cwd=tmp_path, starts_forks=each, check=True).stdout for each in (True, False)]
    assert told == ["word True\n3\n", "word False\n3\n"]


def test_programs_find_modules_imported_that_were_asked_for_and_others_do_not():
    code = "import os, sys; print('imaplib' in sys.modules, sys.argv[1:], input(), os.getppid())"
    options = {"input": "given\n", "check": True}
    *first, parent = forked.run(["-c", code, "word"], imported=("imaplib",), **options).stdout.split()
    assert first == ["True", "['word']", "given"]
    assert forked.run(["-c", code], imported=("imaplib",), **options).stdout.split()[-1] == parent
    assert forked.run(["-c", code], **options).stdout.split()[0] == "False"
    starting = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    again = forked.run(["-c", starting, code], imported=("imaplib",), starts_forks=True, **options).stdout.split()
    assert again[0] == "True"
    forked._servers.pop(("imaplib",)).close()
    with pytest.raises(ProcessLookupError):
        patience.wait_until(lambda: os.kill(int(parent), 0))


def test_a_server_that_cannot_start_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        forked.Server()
    assert list(tmp_path.iterdir()) == []
