"""`build_guard`: the parts of a guard, connected when they are built."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.guard.context import GuardSettings, build_guard
from surefoot.guard.step_results import call_each
from surefoot.observe.parameters import Layout
from surefoot.types import Signals


def built(**settings: Any) -> Any:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, build_guard([model], optimizer, Layout([model], optimizer), GuardSettings(**settings))


def test_incidents_reach_the_log_and_the_caller(tmp_path):
    seen: list[sf.Incident] = []
    _, _, guard = built(log=tmp_path, on_event=seen.append)
    guard.history.note(Signals(3), "spike", "warning", "the loss rose")
    guard.log.close()
    assert [each.kind for each in seen] == ["spike"]
    assert [each.cause for each in sf.load_run(tmp_path).events] == ["spike"]


def test_an_observer_has_no_budgets_and_no_hooks_on_parameters():
    model, _, guard = built(mode="watch", escalation=sf.Escalation())
    assert guard.history.budgets.escalation is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_the_history_keeps_no_parameter_alive():
    model, optimizer, guard = built()
    history, alive = guard.history, weakref.ref(model.weight)
    gc.disable()
    try:
        del model, optimizer, guard
        assert alive() is None
    finally:
        gc.enable()
    assert not history.budgets.weights_broken()


@pytest.mark.parametrize(
    ("settings", "refused"),
    [({}, 3), ({"clip": sf.ClipByNorm(1.0)}, 1), ({"recovery": sf.TrainingRecovery()}, 1)],
    ids=["nothing", "clipper", "recovery"],
)
def test_a_burst_of_explosions_is_refused_as_a_whole_unless_its_harm_is_limited(settings, refused):
    model = nn.Linear(2, 1)
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=1e-6), **settings)
    for step in range(120):
        stabilizer.backward(model(torch.ones(4, 2)).sum() * (500.0 if 100 <= step < 103 else 1.0))
        stabilizer.step()
    assert sum(record.skipped for record in stabilizer.history) == refused


def test_several_functions_become_one_and_none_stays_none():
    seen: list[tuple[str, int]] = []
    assert call_each(None, None) is None
    both = call_each(lambda value: seen.append(("a", value)), None, lambda value: seen.append(("b", value)))
    both(1)
    assert seen == [("a", 1), ("b", 1)]
