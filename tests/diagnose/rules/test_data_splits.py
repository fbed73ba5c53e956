"""Training against evaluation data."""

from __future__ import annotations

from typing import Any

from recorded import SITE, look, run
from surefoot.diagnose.rules import data_splits


def a_pass(rows: list[int], grad: bool, step: int, mean: float = 0.0, std: float = 1.0, **more: Any) -> dict[str, Any]:
    features = {"count": len(rows), "mean": [mean] * 4, "std": [std] * 4}
    base = {"model": "model", "step": step, "grad": grad, "grad_mode": grad, "site": SITE, "rows": rows}
    return base | {"features": features, "inputs": [{"shape": [len(rows), 4], "grad": False}], "outputs": []} | more


def split_run(evaluated: list[list[int]], trained: int = 200, **changes: float) -> Any:
    prints = list(range(trained))
    stream = {"notes": [], "rows": {"0": {"prints": prints, "first": prints, "whole": True}}}
    looks = [look(s, passes=[a_pass(prints[s * 20 : s * 20 + 20], True, s)]) for s in range(8)]
    evaluations = [a_pass(rows, False, 50, block=1, block_passes=1, **changes) for rows in evaluated]
    return run(stream=stream, looks=looks, evaluations=evaluations)


def test_an_evaluation_that_shares_some_rows_with_training_leaks() -> None:
    claim = data_splits.leakage(split_run([list(range(180, 240))]))
    assert claim is not None
    assert claim.evidence["shared"] == 20


def test_an_evaluation_of_other_rows_does_not_leak() -> None:
    assert data_splits.leakage(split_run([list(range(300, 360))])) is None


def test_the_accuracy_on_the_training_set_is_no_leak() -> None:
    assert data_splits.leakage(split_run([list(range(200)), list(range(300, 360))])) is None
    assert data_splits.leakage(split_run([list(range(200))])) is None


def test_a_validation_set_within_the_training_set_leaks() -> None:
    assert data_splits.leakage(split_run([list(range(40, 90))])) is not None


def test_rows_that_all_look_alike_tell_nothing() -> None:
    held = split_run([list(range(180, 240))])
    for seen in held.looks:
        seen["passes"][0]["rows"] = [1] * 20
    assert data_splits.leakage(held) is None


def test_inputs_of_another_scale_are_another_pipeline() -> None:
    claim = data_splits.split_mismatch(split_run([list(range(300, 360))], mean=5.0, std=6.0))
    assert claim is not None


def test_a_mild_shift_between_the_splits_is_fine() -> None:
    assert data_splits.split_mismatch(split_run([list(range(300, 360))], mean=0.6, std=1.4)) is None
