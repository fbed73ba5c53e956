"""Scripts for several ranks: those that hang are ended with their stacks, and the other halves do not know them."""

from __future__ import annotations

import subprocess
import sys

import patience
from surefoot.zoo import HALVES, RANKS, find, rank_runs, specimens


def test_the_scripts_for_ranks_are_no_part_of_the_other_halves():
    assert all(each.half in HALVES for each in specimens())
    assert all(each.half == RANKS for each in specimens(RANKS))
    assert find("digits_inner_module").half == RANKS


def test_a_rank_that_hangs_prints_its_stacks_and_is_ended(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text("import pathlib, time\npathlib.Path('begun').touch()\nwhile True:\n    time.sleep(0.01)\n")
    with open(tmp_path / "output.txt", "wb") as output:
        command = [sys.executable, "-X", "faulthandler", str(script)]
        rank = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
        patience.wait_until((tmp_path / "begun").exists)
        assert rank_runs._wait([rank], timeout_s=0.0) == 1
    assert rank.poll() is not None
    assert "hangs.py" in (tmp_path / "output.txt").read_text()


def test_a_script_that_does_not_train_leaves_one_folder_per_rank(tmp_path, starts_forks):
    script = tmp_path / "says.py"
    script.write_text("import os, sys\nsys.stdout.write('rank %(RANK)s of %(WORLD_SIZE)s, ' % os.environ)\n")  # at once
    assert rank_runs.run_ranks(script, 7, tmp_path / "run", patience.HANG_SECONDS) == ""
    said = (tmp_path / "run" / "output.txt").read_text()
    assert "rank 0 of 2" in said
    assert "rank 1 of 2" in said
    assert all((tmp_path / "run" / f"rank{rank}" / "facts.json").exists() for rank in range(2))


def test_a_rank_without_facts_is_reported(tmp_path, starts_forks):
    script = tmp_path / "dies.py"
    script.write_text("import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    trouble = rank_runs.run_ranks(script, 7, tmp_path / "run", patience.HANG_SECONDS)
    assert "ranks [1] left no facts" in trouble


def test_a_rank_that_a_library_aborts_is_part_of_the_run(tmp_path, starts_forks):
    script = tmp_path / "aborts.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    os.abort()\n")
    assert rank_runs.run_ranks(script, 7, tmp_path / "run", patience.HANG_SECONDS) == ""
    script.write_text("import os\nos.abort()\n")
    assert "ranks [0, 1] left no facts" in rank_runs.run_ranks(script, 7, tmp_path / "both", patience.HANG_SECONDS)
