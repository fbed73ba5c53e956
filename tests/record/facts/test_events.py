"""Events are distinguished by their kind; an unknown kind comes from a newer version."""

from __future__ import annotations

from typing import get_args

import pytest

from surefoot.record.facts import Event, NonFiniteLoss, RunFacts, SpikeEvent
from surefoot.record.facts.codec import FactsError


def test_every_event_has_a_kind_of_its_own() -> None:
    tags = [cls.TAG for cls in get_args(Event)]
    assert len(set(tags)) == len(tags)
    assert {key for key, _ in tags} == {"event"}


def test_an_event_of_a_newer_version_is_left_out() -> None:
    assert RunFacts.from_json({"events": [{"event": "newer", "step": 1}]}).events == []


def test_an_event_without_its_step_is_named_by_its_path() -> None:
    with pytest.raises(FactsError, match=r"facts\.json: events\[0\]: expected the key 'step', which is missing"):
        RunFacts.from_json({"events": [{"event": "model-loaded", "site": "train.py:1"}]})


def test_a_spike_is_written_with_its_kind() -> None:
    spike = SpikeEvent(step=3, value=9.0, level=1.0, data=[], backward=4, began=2.0)
    assert spike.to_json()["event"] == "spike"
    assert RunFacts.from_json({"events": [spike.to_json()]}).events == [spike]


def test_a_loss_that_backward_never_saw_has_no_step_and_no_kind_of_event() -> None:
    loss = NonFiniteLoss(name="loss", value=float("inf"), kind="unknown")
    assert loss.to_json() == {"name": "loss", "value": "inf", "kind": "unknown"}
