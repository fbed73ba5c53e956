"""What the hooks of a replay read from an incident. That they replace a step is shown by `test_script.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from surefoot.replay.hooks import Turn, _model_for, _trains


def test_the_turn_of_an_optimizer_is_read_as_it_was_written() -> None:
    said = {"optimizer": 1, "after": 0, "trained_by": [[0], [0, 1]]}
    assert Turn.read(said) == Turn(1, 0, [[0], [0, 1]])
    assert Turn.read(said | {"after": None}) == Turn(1, None, [[0], [0, 1]])


@pytest.mark.parametrize("said", [None, {}, {"optimizer": 1}, "x", {"optimizer": "a", "after": None, "trained_by": []}])
def test_an_incident_that_does_not_say_has_no_turn(said: Any) -> None:
    assert Turn.read(said) is None


def test_a_model_is_found_by_the_names_and_shapes_of_its_weights() -> None:
    wanted, other = nn.Linear(7, 13), nn.Linear(7, 13)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    state = {name: value.clone() for name, value in wanted.state_dict().items()}
    assert _trains(optimizer, wanted)
    assert not _trains(optimizer, other)
    assert _model_for(state, lambda model: _trains(optimizer, model), []) is wanted
    assert _model_for(state, lambda model: _trains(optimizer, model), [wanted]) is None
    assert _model_for({"weight": torch.zeros(3)}, lambda model: model is wanted, []) is None
