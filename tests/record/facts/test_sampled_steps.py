"""Sampled steps: what is written once, what is written beside something else, and how old values are read."""

from __future__ import annotations

from recorded import completed
from surefoot.record.facts import BackwardCall, ParameterUpdate, SampledStep


def test_cuts_are_written_where_calls_were_recorded() -> None:
    assert "breaks" not in SampledStep(step=0).to_json()
    assert SampledStep(step=0, operations=3).to_json()["breaks"] == []


def test_a_ratio_that_is_not_defined_is_written_beside_the_update() -> None:
    assert ParameterUpdate(parameter=0).to_json() == {"id": 0, "grad": None}
    assert ParameterUpdate(parameter=0, update=0.5).to_json()["ratio"] is None


def test_the_step_of_a_call_is_written_once() -> None:
    held = SampledStep.from_json(completed(SampledStep, {"step": 4, "notes": {"ratios": [{"op": "exp"}]}}))
    assert held.calls.ratios[0].step == 4
    assert "step" not in held.to_json()["notes"]["ratios"][0]


def test_a_loss_that_was_written_as_the_text_of_a_tensor_was_not_read() -> None:
    value = completed(BackwardCall, {"value": "tensor(0.5, device='cuda:0')"})
    assert BackwardCall.from_json(value).value is None
