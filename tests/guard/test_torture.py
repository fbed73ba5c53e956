"""A training process that is really killed comes back each time: a short run of `make torture`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import forked

HERE = Path(__file__).parents[1]
UNHURRIED = ["--minutes=1000"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_had_been() -> None:
    driver = HERE.parent / "benchmarks" / "torture.py"
    done = forked.run([driver, "--kills=12", "--seed=1", "--epochs=5", *UNHURRIED])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^kills +12$", done.stdout, re.MULTILINE)
    assert re.search(r"in the middle of writing a checkpoint +[1-9]", done.stdout)
    assert re.search(r"claims that did not hold +0$", done.stdout, re.MULTILINE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")
def test_a_run_that_is_killed_while_it_repeats_steps_ends_as_if_it_never_had_been() -> None:
    driver = HERE.parent / "benchmarks" / "torture.py"
    done = forked.run([driver, "--repeat", "--kills=8", "--seed=1", "--epochs=8", *UNHURRIED])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"while steps were being repeated +[1-9]", done.stdout)
    assert re.search(r"claims that did not hold +0$", done.stdout, re.MULTILINE)
