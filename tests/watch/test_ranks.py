"""Watching is nobody's collective: what several ranks train is the same bit for bit, and none of them waits forever."""

import json
import shutil
from pathlib import Path

import pytest
from running import rank_of

import forked


def two_ranks(folder, *command):
    """Run a command as both ranks; returns what each wrote to its file, and to stderr."""
    place = folder / ("watched" if "surefoot" in command else "plain")
    place.mkdir()
    words = [*command, "script.py", place]
    started = [forked.start(words, cwd=folder, env=forked.environment(**rank_of(rank, 2))) for rank in range(2)]
    errors = [process.end(check=True).stderr for process in started]
    return [(place / f"rank{rank}.txt").read_text().splitlines() for rank in range(2)], errors


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copy(Path(__file__).with_name("ranks.py"), folder / "script.py")
    plain, _ = two_ranks(folder)
    watched, errors = two_ranks(folder, "-m", "surefoot", "run", "--out", "run")
    return folder, plain, watched, errors


def test_losses_and_the_number_of_collectives_are_those_of_the_script(runs):
    _, plain, watched, errors = runs
    assert watched == plain
    assert not any("stopped watching" in words for words in errors)


def test_a_wrapper_that_the_script_lets_go_is_gone(runs):
    assert all(any("wrappers alive 0" in line for line in lines) for lines in runs[2])


def test_every_step_of_every_rank_is_seen(runs):
    for rank in range(2):
        facts = json.loads((runs[0] / "run" / f"rank{rank}" / "facts.json").read_text())
        norms = [norm for held in facts["optimizers"] for norm in held["series"]["grad_norm"]]
        assert len(norms) == sum("0x" in line or "nan" in line for line in runs[1][rank])
        assert None not in norms


def test_the_step_that_is_not_finite_is_kept_by_the_rank_that_had_it(runs):
    kept = [list((runs[0] / "run" / f"rank{rank}").glob("incidents/*/incident.json")) for rank in range(2)]
    assert kept[0]
