"""`surefoot bisect` and `surefoot replay`: what is refused before anything runs."""

import pytest


def test_an_export_and_experiments_exclude_each_other(command, tmp_path):
    answer = command("replay", tmp_path, "--experiments", "--export", tmp_path / "out")
    assert answer.code == 2
    assert "--export and --experiments cannot be combined" in answer.error


@pytest.mark.parametrize(
    "option", [("--budget", 5), ("--jobs", 1), ("--only", "clip"), ("--out", "here")], ids=lambda pair: pair[0]
)
def test_an_option_of_experiments_alone_is_refused(command, tmp_path, option):
    answer = command("replay", tmp_path, *option)
    assert (answer.code, answer.out) == (2, "")
    assert f"{option[0]} can be used only with --experiments" in answer.error


def test_a_folder_without_an_incident_is_refused(command, tmp_path):
    answer = command("replay", tmp_path)
    assert answer.code == 2
    assert len(answer.error.splitlines()) == 1


def test_a_script_that_is_not_there_is_refused(command, tmp_path):
    answer = command("bisect", "--out", tmp_path / "out", tmp_path / "nothing.py")
    assert answer.code == 2
    assert "nothing.py" in answer.error
