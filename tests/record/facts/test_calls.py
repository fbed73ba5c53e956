"""Calls of torch functions: flat in JSON, typed in Python."""

from __future__ import annotations

import math

from recorded import completed
from surefoot.record.facts import LossCall, SampledCalls, SoftmaxCall, TensorSummary


def test_a_summary_of_integers_keeps_them_whole() -> None:
    value = {"shape": [3], "dtype": "int64", "grad": False, "min": 0, "max": 2}
    held = TensorSummary.from_json(value)
    assert held.to_json() == value
    assert type(held.max) is int


def test_kinds_without_calls_are_left_out() -> None:
    assert SampledCalls().to_json() == {}


def test_what_a_loss_has_not_is_left_out_and_what_it_could_not_measure_is_null() -> None:
    plain = LossCall.from_json(completed(LossCall, {"op": "mse_loss"}) | {"step": 0}).to_json()
    assert "accuracy" not in plain
    assert "unit_spread" not in plain
    value = completed(LossCall, {"op": "cross_entropy", "accuracy": 0.5}) | {"step": 0}
    assert LossCall.from_json(value).to_json()["unit_spread"] is None


def test_a_softmax_that_is_not_finite_is_a_number_inside() -> None:
    held = SoftmaxCall.from_json(completed(SoftmaxCall, {"entropy": "nan"}) | {"step": 0})
    assert math.isnan(held.entropy or 0.0)
