"""The examination as a whole: order, refusals, and errors that do not end it."""

import pytest
import torch
from torch import nn

from surefoot.doctor.checks import STEPS
from surefoot.doctor.examine import examine
from surefoot.errors import SettingError, UsageError

BATCHES = [(torch.linspace(-1, 1, 32).reshape(8, 4), torch.arange(8) % 3)] * 2


def test_every_step_answers_and_in_order():
    model = nn.Linear(4, 3)
    found = examine(model, BATCHES, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), seconds=0.1)
    steps = [check.step for check in found.checks]
    assert set(steps) == set(STEPS)
    assert steps == sorted(steps)
    assert len({check.name for check in found.checks}) == len(found.checks)


def test_without_an_optimizer_what_needs_it_is_skipped():
    found = examine(nn.Linear(4, 3), BATCHES, nn.CrossEntropyLoss(), seconds=0.1)
    assert found["learning rate"].status == "skipped"
    assert found["forward"].status == "pass"


def test_a_loader_that_is_an_iterator_and_a_wrapped_model_are_noted():
    model = nn.DataParallel(nn.Linear(4, 3))
    found = examine(model, iter(BATCHES), nn.CrossEntropyLoss(), seconds=0.1)
    assert any("cannot be rewound" in note for note in found.notes)
    assert any("inside the DataParallel" in note for note in found.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no model", BATCHES), "torch.nn.Module"),
        ((nn.Linear(4, 3), 3), "give batches"),
        ((nn.Linear(4, 3), []), "gave no batch"),
        ((nn.Linear(4, 3), BATCHES, None, "adam"), "torch optimizer"),
    ],
)
def test_wrong_use_says_what_was_got(arguments, message):
    with pytest.raises((UsageError, SettingError), match=message):
        examine(*arguments)
    with pytest.raises((UsageError, SettingError), match="seconds"):
        examine(nn.Linear(4, 3), BATCHES, seconds=0)
