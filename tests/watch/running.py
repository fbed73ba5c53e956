"""A script under `python` and under `surefoot run`, in real processes.

They are forked from one that has imported torch, unless a test is about what only a `fresh` interpreter shows.
"""

import re
import sys

import forked
import patience

ENVIRONMENT = forked.environment()


def python(folder, *arguments, fresh=False, given="", environment=None, imported=()):
    options = {"cwd": folder, "env": {**ENVIRONMENT, **(environment or {})}, "input": given}
    if fresh:
        return patience.run([sys.executable, *arguments], **options)
    return forked.run(arguments, imported=imported, **options)


def surefoot(folder, *arguments, **options):
    return python(folder, "-m", "surefoot", "run", "--out", "run", *arguments, **options)


def rank_of(number, count):
    """The environment that a launcher gives to a rank."""
    return {"RANK": str(number), "WORLD_SIZE": str(count)}


def both(folder, *arguments, **options):
    """The plain run and the watched one, after checking that the script could not tell them apart."""
    plain, watched = python(folder, *arguments, **options), surefoot(folder, *arguments, **options)
    # Options of ours among the script's arguments are told in one line, before the script runs.
    watched.stderr = re.sub(r"\Asurefoot: .* after .* passed to the script; .*\n", "", watched.stderr)
    assert watched.stdout == plain.stdout
    assert watched.returncode == plain.returncode
    assert script_errors(watched.stderr) == plain.stderr
    return plain, watched


def script_errors(text):
    """What the script itself wrote to stderr: all before surefoot's last words."""
    before, found, _ = text.partition("\nsurefoot: ")
    return before if found or not text.startswith("surefoot: ") else ""
