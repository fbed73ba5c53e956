"""What a run that continues from an incident knows of it. Whole runs are in `test_experiments.py`."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import surefoot as sf
from surefoot.record.incidents.reading import StoredIncident
from surefoot.record.incidents.values import encode
from surefoot.replay.continued_run import _broken_batch, _broken_state, _without_guard, continue_from_incident


def incident(weights: dict[str, torch.Tensor], drawn: Any = None, call: Any = None) -> StoredIncident:
    one = {
        "drawn": [] if drawn is None else [encode(drawn, str, [])],
        "given": None,
        "calls": [] if call is None else [encode(call, str, [])],
    }
    gradients = {f"0.{name}": {} for name in weights if name != "mean"}
    facts: Any = {"fingerprints": {"gradients": gradients}}
    return StoredIncident(Path(), facts, {"models": [weights], "window": {"microbatches": [one]}})


def test_weights_that_were_not_finite_are_counted_and_buffers_are_not() -> None:
    bad = torch.tensor([1.0, math.nan, math.inf])
    assert _broken_state(incident({"weight": bad, "bias": torch.zeros(2), "mean": bad})) == {"weight": 2}


def test_values_of_the_batch_count_before_those_of_the_models_inputs() -> None:
    bad = torch.tensor([math.nan, 1.0])
    found = _broken_batch(incident({}, drawn=[bad, torch.tensor([1, 2])], call=torch.full((3,), math.inf)))
    assert (found.nonfinite, found.handed_out) == (1, True)
    found = _broken_batch(incident({}, call=torch.full((3,), math.inf)))
    assert (found.nonfinite, found.handed_out) == (3, False)


def test_a_stabilizer_of_a_continued_run_applies_what_it_would_have_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stabilizer = sf.TrainingStabilizer(model, optimizer, **_without_guard())
    stabilizer.backward(model(torch.ones(1, 2)).sum() * math.nan)
    assert stabilizer.step().applied
    assert model.weight.isnan().all()


def test_an_incident_that_cannot_be_read_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(order={"incident": str(tmp_path), "follow": 3}, problem="")
    assert continue_from_incident(run)
    assert "is not an incident" in run.problem
