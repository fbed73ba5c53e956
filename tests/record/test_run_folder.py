"""The run folder: its name, and JSON without NaN and without secrets."""

import json
import time

from surefoot.record.run_folder import as_json, describe_run, folder_for, write_json

BEGAN = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))


def test_the_folder_is_the_one_asked_for_or_named_after_script_and_time(tmp_path):
    here = str(tmp_path)
    assert folder_for("out", "train.py", here, BEGAN, 0, 1) == tmp_path / "out"
    made = folder_for(None, "code/train.py", here, BEGAN, 0, 1)
    assert made == tmp_path / "runs" / "train-20260102-030405"
    made.mkdir(parents=True)
    assert folder_for(None, "train.py", here, BEGAN, 0, 1).name == "train-20260102-030405-1"


def test_ranks_share_a_folder_and_have_one_each_in_it(tmp_path):
    folders = [folder_for(None, "train.py", str(tmp_path), BEGAN, rank, 2) for rank in (0, 1)]
    assert [folder.name for folder in folders] == ["rank0", "rank1"]
    assert folders[0].parent == folders[1].parent


def test_numbers_that_are_not_finite_are_written_as_words():
    assert json.loads(as_json({"loss": float("nan"), "list": [1.5, float("-inf")]})) == {
        "loss": "nan",
        "list": [1.5, "-inf"],
    }
    assert json.loads(as_json({(1, 2): object}))  # whatever it is, it is written


def test_a_file_is_written_whole_and_without_secrets(tmp_path):
    write_json(tmp_path / "run.json", {"arguments": ["--api-key=sk-0123456789abcdef0123456789abcdef"], "steps": 3})
    text = (tmp_path / "run.json").read_text()
    assert json.loads(text)["steps"] == 3
    assert "0123456789abcdef0123456789abcdef" not in text


def test_a_run_is_described_by_what_was_started(tmp_path):
    facts = describe_run("train.py", ("--lr", "0.1"), False, True, BEGAN)
    assert (facts["script"], facts["module"], facts["guard"]) == ("train.py", False, True)
    assert facts["arguments"] == ["--lr", "0.1"]
