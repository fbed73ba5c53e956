"""A script under `python` and under `surefoot run`, in real processes."""

import os
import re
import sys
from pathlib import Path

import patience

SOURCE = str(Path(__file__).parents[2] / "src")
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key != "SUREFOOT_DEBUG"},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": SOURCE,
    "PYTHONHASHSEED": "0",
}


def python(folder, *arguments, **options):
    return _run([sys.executable, *arguments], folder, **options)


def surefoot(folder, *arguments, **options):
    return _run([sys.executable, "-m", "surefoot", "run", "--out", "run", *arguments], folder, **options)


def _run(command, folder, environment=None, given=""):
    return patience.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, **(environment or {})},
        input=given,
    )


def both(folder, *arguments, **options):
    """The plain run and the watched one, after checking that the script could not tell them apart."""
    plain, watched = python(folder, *arguments, **options), surefoot(folder, *arguments, **options)
    # Options of ours among the script's arguments are told in one line, before the script runs.
    watched.stderr = re.sub(r"\Asurefoot: .* behind .* passed to it; .*\n", "", watched.stderr)
    assert watched.stdout == plain.stdout
    assert watched.returncode == plain.returncode
    assert script_errors(watched.stderr) == plain.stderr
    return plain, watched


def script_errors(text):
    """What the script itself wrote to stderr: all before surefoot's last words."""
    before, found, _ = text.partition("\nsurefoot: ")
    return before if found or not text.startswith("surefoot: ") else ""
