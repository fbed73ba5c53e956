"""The state of a guard: versioned, and the same part in a stabilizer and in an attachment."""

from __future__ import annotations

import pytest
import torch

import surefoot as sf
from surefoot.errors import SettingError


def test_an_attachment_and_a_stabilizer_save_the_same_parts():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = sf.attach(model, optimizer).state_dict()
    stabilized = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.1)).state_dict()
    assert set(stabilized) - set(attached) == {"window"}
    assert attached["schema"] == stabilized["schema"]


def test_a_state_of_another_version_is_refused():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = sf.attach(model, optimizer)
    with pytest.raises(SettingError, match="the state of the guard is of schema 99"):
        attachment.load_state_dict(attachment.state_dict() | {"schema": 99})
