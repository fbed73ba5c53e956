"""Processes of `torch.multiprocessing.spawn` are observed like ranks, and nothing changes for them."""

import json
import re
import shutil
from pathlib import Path

import pytest

import forked
import surefoot
from surefoot.diagnose.engine import diagnose_folder


@pytest.fixture
def script(tmp_path):
    shutil.copy(Path(__file__).with_name("spawning.py"), tmp_path / "spawning.py")

    def start(how, *command):
        place = tmp_path / f"{how}-{len(command)}"
        # One of them spawns a fresh interpreter, which begins without torch.
        words = [*command, "spawning.py", how, place]
        return forked.run(words, cwd=tmp_path, starts_forks=how != "alone"), place

    return start


WATCHED = ("-m", "surefoot", "run", "--out", "run")


def test_every_spawned_rank_has_a_log_and_the_run_has_one_verdict(tmp_path, script):
    plain, before = script("trains")
    watched, after = script("trains", *WATCHED)
    assert (plain.returncode, watched.returncode) == (0, 0), watched.stderr
    for rank in range(2):
        assert Path(f"{after}-{rank}.txt").read_text() == Path(f"{before}-{rank}.txt").read_text()
        facts = json.loads((tmp_path / "run" / f"rank{rank}" / "facts.json").read_text())
        assert facts["steps"] == 4
    assert sorted(each.name for each in (tmp_path / "run").glob("rank*")) == ["rank0", "rank1"]  # no loading worker
    assert watched.stderr.count("surefoot: ") == 1  # one diagnosis, which the parent prints
    assert "4 steps · run" in watched.stderr
    assert diagnose_folder(tmp_path / "run").steps == 4


def test_a_failing_rank_is_named_and_its_traceback_is_that_of_the_script(tmp_path, script):
    ended, _ = script("fails", *WATCHED)
    assert ended.returncode == 1
    told = ended.stderr[ended.stderr.index("-- Process 1 terminated with the following error:") :]
    trace = told[: told.index("surefoot: ")]
    files = [Path(file).name for file in re.findall(r'File "([^"]+)"', trace)]
    assert files[:2] == ["spawn.py", "spawning.py"]
    assert str(Path(surefoot.__file__).parent) not in trace
    diagnosis = " ".join(told[told.index("surefoot: ") :].split())
    assert re.search("[Rr]ank 1.* mat1 and mat2 shapes cannot be multiplied", diagnosis)


def test_a_single_spawned_process_is_the_run(tmp_path, script):
    ended, _ = script("alone", *WATCHED)
    assert ended.returncode == 0
    assert json.loads((tmp_path / "run" / "facts.json").read_text())["steps"] == 8
    assert "8 steps · run" in ended.stderr


def test_a_spawned_process_that_does_not_train_leaves_the_run_to_its_parent(tmp_path, script):
    ended, _ = script("computes", *WATCHED)
    assert "computed 6" in ended.stdout
    assert json.loads((tmp_path / "run" / "facts.json").read_text())["steps"] == 8
    assert not list((tmp_path / "run").glob("rank*"))
    assert "8 steps · run" in ended.stderr
