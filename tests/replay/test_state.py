"""Captured state is put into live objects, or what does not fit is named."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from surefoot.errors import UsageError
from surefoot.replay.state import fits, put_in_place, set_modes


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("seen", torch.zeros(3), persistent=False)


def incident(**state):
    return SimpleNamespace(folder="incidents/7", state=state)


def test_weights_moments_and_buffers_come_back():
    then = Counting()
    optimizer = torch.optim.Adam(then.parameters(), lr=0.1)
    then(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {
        "models": [{name: value.clone() for name, value in then.state_dict().items()}],
        "buffers": [{"seen": torch.arange(3.0), "other": torch.ones(1)}],
        "optimizer": optimizer.state_dict(),
    }
    now = Counting()
    other = torch.optim.Adam(now.parameters(), lr=0.5)
    assert put_in_place(incident(**state), [now], other) == []
    assert torch.equal(now.weight, then.weight)
    assert now.seen.tolist() == [0, 1, 2]
    assert other.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.state[now.weight]["exp_avg"], optimizer.state[then.weight]["exp_avg"])


def test_what_is_not_needed_for_a_replay_may_fail():
    model = nn.Linear(2, 1)
    state = {"models": [model.state_dict()], "optimizer": {"param_groups": [], "state": {}}, "scheduler": {"a": 1}}

    class Schedule:
        def load_state_dict(self, state):
            raise KeyError("b")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    notes = put_in_place(incident(**state), [model], optimizer, Schedule())
    assert any("schedule" in note for note in notes)


def test_other_weights_are_refused_by_name():
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="'weight' is \\(1, 2\\) here and was \\(1, 3\\)"):
        put_in_place(incident(models=[nn.Linear(3, 1).state_dict()]), [model], None)
    with pytest.raises(UsageError, match="has 2 models, and 1 were built"):
        put_in_place(incident(models=[model.state_dict()] * 2), [model], None)
    with pytest.raises(UsageError, match="no weights"):
        put_in_place(incident(), [model], None)
    assert fits([model], [model.state_dict()])
    assert not fits([model], [nn.Linear(3, 1).state_dict()])
    assert not fits([model], [])


def test_modes_and_frozen_parameters_are_set_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model.eval()
    set_modes([model], [{"eval": ["1"], "frozen": ["0.bias"]}])
    assert model.training
    assert model[0].training
    assert not model[1].training
    assert model[0].weight.requires_grad
    assert not model[0].bias.requires_grad
