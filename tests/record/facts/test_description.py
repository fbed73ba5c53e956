"""`run.json` as a class: everything may be missing, and a missing exit code is not an unknown one."""

from __future__ import annotations

from surefoot.record.facts import GroupSettings, OptimizerSetup, RunDescription


def test_nothing_need_be_there() -> None:
    assert RunDescription.from_json({}) == RunDescription()


def test_a_run_that_has_not_ended_is_distinguished_from_one_that_names_no_exit_code() -> None:
    assert RunDescription.from_json({"exit_code": None}).exit_code is None
    assert RunDescription.from_json({"script": "train.py"}).exit_code == 0


def test_optimizers_are_read_and_written_back() -> None:
    setup = OptimizerSetup(type="Adam", settings=[GroupSettings(values={"lr": 0.1})], scheduler="StepLR")
    held = RunDescription(optimizers=[setup])
    assert RunDescription.from_json(held.to_json()) == held


def test_keys_of_others_are_left_alone() -> None:
    assert RunDescription.from_json({"python": "3.12", "guarded": {"checked": 3}}) == RunDescription()
