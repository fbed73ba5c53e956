"""Step 1: one batch goes through, or the reason is named."""

import torch
import torch.nn.functional as F
from torch import nn

from doctor_probing import context_of, only


def labelled(change=lambda y: y):
    torch.manual_seed(0)
    return [(torch.randn(8, 4), change(torch.randint(3, (8,))))]


def test_a_batch_that_runs_is_described():
    context = context_of(nn.Linear(4, 3), labelled(), nn.CrossEntropyLoss())
    assert only(context.checks, "forward").status == "pass"
    assert "loss_fn(model(batch[0]), batch[1])" in only(context.checks, "forward").summary
    assert only(context.checks, "labels").summary.endswith("3 outputs")
    assert context.convention.name == "loss_fn(model(batch[0]), batch[1])"


def test_a_label_beyond_the_classes_is_named_in_both_checks():
    context = context_of(nn.Linear(4, 3), labelled(lambda y: y + 1), nn.CrossEntropyLoss())
    assert {check.cause for check in context.checks} == {"data.label-out-of-range"}
    assert context.refusal


def test_a_binary_target_beyond_0_and_1_is_named():
    context = context_of(nn.Linear(4, 3), labelled(lambda y: F.one_hot(y, 3).float() * 5), nn.BCEWithLogitsLoss())
    assert only(context.checks, "labels").cause == "data.label-out-of-range"


def test_a_batch_without_targets_is_named():
    context = context_of(nn.Linear(4, 3), labelled(lambda y: torch.full_like(y, -100)), nn.CrossEntropyLoss())
    assert only(context.checks, "labels").cause == "loss.no-valid-targets"


def test_batch_norm_over_one_row_is_known_by_its_message():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    context = context_of(model, [(torch.randn(1, 4), torch.tensor([0]))], nn.CrossEntropyLoss())
    assert only(context.checks, "forward").cause == "model.batchnorm-tiny-batch"


def test_a_shape_that_does_not_fit_gets_a_hint():
    context = context_of(nn.Linear(5, 3), labelled(), nn.CrossEntropyLoss())
    check = only(context.checks, "forward")
    assert (check.status, check.cause) == ("fail", None)
    assert "in_features" in check.fix


def test_a_model_that_cannot_be_copied_is_not_run():
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("this cannot be copied")

    context = context_of(Stubborn(4, 3), labelled(), nn.CrossEntropyLoss())
    assert only(context.checks, "forward").status == "skipped"
    assert "cannot be copied" in context.refusal
