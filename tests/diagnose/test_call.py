"""`surefoot.diagnose(folder)`: the diagnosis of a recorded run, as an object."""

import json

import pytest

import surefoot as sf


def test_the_package_can_be_called_with_a_run_folder(tmp_path):
    (tmp_path / "facts.json").write_text("{}")
    (tmp_path / "run.json").write_text(json.dumps({"script": "train.py", "exit_code": 0}))
    diagnosis = sf.diagnose(tmp_path)
    assert isinstance(diagnosis, sf.Diagnosis)
    assert (diagnosis.verdict, diagnosis.steps, diagnosis.findings) == ("unknown", 0, ())


def test_what_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(sf.UsageError, match="no run folder at"):
        sf.diagnose(tmp_path / "nothing")
