"""Step 10: labels that say something help on rows held out."""

import torch
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.shuffled_labels import check_control


def check(y_of, rows=512, overfits=True, classes=2):
    torch.manual_seed(0)
    x = torch.randn(rows, 6)
    y = y_of(x)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, classes))
    batches = list(zip(x.split(32), y.split(32), strict=True))
    context = context_of(model, batches, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()), seconds=60)
    context.measured(overfits=overfits)
    (found,) = check_control(context)
    return found


def test_labels_that_follow_from_the_inputs_pass():
    assert check(lambda x: (x[:, 0] > 0).long()).status == "pass"


def test_random_labels_are_named_although_they_are_not_learnt_by_heart():
    for classes in (2, 10):
        found = check(lambda x, classes=classes: torch.randint(classes, (len(x),)), classes=classes)
        assert (found.status, found.cause) == ("warn", "data.labels-uninformative")


def test_labels_that_are_hard_to_learn_are_not_called_random():
    assert check(lambda x: (x[:, 0] * x[:, 1] * x[:, 2] > 0).long()).status == "pass"


def test_what_cannot_be_judged_is_skipped():
    assert check(lambda x: (x[:, 0] > 0).long(), rows=64).status == "skipped"
    assert check(lambda x: (x[:, 0] > 0).long(), overfits=False).status == "skipped"
