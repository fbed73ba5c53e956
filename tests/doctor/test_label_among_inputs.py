"""Step 10: a label that stands among the inputs is named, and what only looks like one is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doctor_probing import context_of
from surefoot.doctor.label_among_inputs import check_label_among_inputs


def check(x, y, loss_fn=None, *extra, model=None):
    classes = 1 if y.is_floating_point() else int(y.max()) + 1
    model = model or nn.Linear(x.shape[1], classes)
    parts = [part.split(32) for part in (x, *extra, y)]
    context = context_of(model, list(zip(*parts, strict=True)), loss_fn or nn.CrossEntropyLoss())
    (found,) = check_label_among_inputs(context)
    return found


@pytest.fixture
def inputs():
    return torch.randn(256, 5)


@pytest.fixture
def labels():
    return torch.arange(256) % 3


@pytest.mark.parametrize(
    ("written", "columns"),
    [
        (lambda y: F.one_hot(y).float(), "columns 5, 6, 7 of batch[0] are together the one-hot code of the label"),
        (lambda y: -F.one_hot(y).float()[:, [2, 0, 1]] * 3, "columns 6, 7, 5 of batch[0] are together"),
        (lambda y: y[:, None].float(), "column 5 of batch[0] corresponds one to one to the label"),
        (lambda y: (7.5 - y[:, None]) ** 2, "column 5 of batch[0] corresponds one to one to the label"),
    ],
    ids=["one-hot", "another one-hot", "number", "another number"],
)
def test_a_label_among_the_columns_is_named(inputs, labels, written, columns):
    found = check(torch.cat([inputs, written(labels)], 1), labels)
    assert (found.status, found.cause) == ("warn", "data.leakage")
    assert found.summary.startswith(columns)
    assert found.fix.startswith("Take column")


def test_a_target_of_real_numbers_among_the_columns_is_named(inputs):
    y = inputs[:, :1] * 2 + torch.randn(256, 1)
    assert check(torch.cat([inputs, y], 1), y, nn.MSELoss()).summary.startswith("column 5 of batch[0]")
    assert check(torch.cat([inputs, y * 2], 1), y, nn.MSELoss()).status == "pass"  # many a line is fitted to y = 2 x


def test_a_binary_label_among_the_columns_is_named(inputs):
    y = (torch.rand(256, 1) > 0.7).float()
    assert check(torch.cat([inputs, 1 - y], 1), y, nn.BCEWithLogitsLoss()).cause == "data.leakage"


def test_a_feature_that_correlates_is_no_leak(inputs, labels):
    nearly = labels.clone()
    nearly[0] = 2
    assert check(torch.cat([inputs, nearly[:, None].float()], 1), labels).status == "pass"
    assert check(torch.cat([inputs, labels[:, None] + 0.1 * torch.randn(256, 1)], 1), labels).status == "pass"
    assert check(inputs, labels).status == "pass"


def test_inputs_that_are_a_code_of_the_label_and_nothing_else_are_a_task_of_their_own(labels):
    assert check(torch.randn(3, 4)[labels], labels).status == "pass"
    assert check(F.one_hot(labels).float(), labels).status == "pass"
    x = torch.arange(256.0)[:, None]
    assert check(x, 2 * x + 1, nn.MSELoss()).status == "pass"


def test_a_copy_of_the_label_that_the_model_does_not_take_is_no_leak(inputs, labels):
    class TakesFirst(nn.Linear):
        def forward(self, x, code):
            return super().forward(x)

    class TakesBoth(nn.Linear):
        def forward(self, x, code):
            return super().forward(torch.cat([x, code], 1))

    code = F.one_hot(labels).float()
    for kind, width, status in ((TakesFirst, 5, "pass"), (TakesBoth, 8, "warn")):
        batches = list(zip(inputs.split(32), code.split(32), labels.split(32), strict=True))
        context = context_of(kind(width, 3), batches, nn.CrossEntropyLoss())
        (found,) = check_label_among_inputs(context)
        assert found.status == status


def test_what_cannot_be_compared_is_skipped(inputs, labels):
    assert check(inputs[:32], labels[:32]).status == "skipped"
    assert check(inputs, inputs.clone(), nn.MSELoss(), model=nn.Linear(5, 5)).status == "skipped"
