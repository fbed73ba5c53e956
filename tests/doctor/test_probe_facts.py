"""A probe leaves the facts of a watched step, and the rules of `diagnose` judge them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.doctor.loss_of_batch import loss_taker
from surefoot.doctor.model_copy import ModelCopy
from surefoot.doctor.probe_facts import facts_of, judge
from surefoot.record.facts import RunFacts


def looked_at(model, loss_of, batch):
    return ModelCopy(model, None, None, loss_taker(loss_of)).look(batch)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(8, 4), torch.randint(3, (8,))


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_pass_is_a_sampled_step(batch):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    facts = facts_of([looked_at(model, classify, batch)])
    calls = facts.sampled_steps[0].calls
    assert [call.op for call in calls.losses] == ["cross_entropy"]
    assert list(calls.losses[0].label_range) == [int(batch[1].min()), int(batch[1].max())]
    assert calls.normalizations[0].module == "1"
    assert calls.normalizations[0].per_statistic == 8
    assert facts.crash is None
    assert RunFacts.from_json(facts.to_json()).steps == 1


def test_a_healthy_pass_gets_no_claim_above_info(batch):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    found = judge([looked_at(model, classify, batch)])
    assert [code for code, finding in found.items() if finding.severity != "info"] == []


@pytest.mark.parametrize(
    ("cause", "loss_of"),
    [
        ("loss.softmax-before-cross-entropy", lambda m, b: F.cross_entropy(m(b[0]).softmax(-1), b[1])),
        ("loss.logits-into-probability-loss", lambda m, b: F.nll_loss(m(b[0]), b[1])),
        ("loss.sign-flipped", lambda m, b: -F.cross_entropy(m(b[0]), b[1])),
        ("loss.broadcast", lambda m, b: F.mse_loss(m(b[0])[:, :1], b[1].float())),
        ("loss.broadcast", lambda m, b: (m(b[0])[:, :1] - b[1].float()).square().mean()),
        ("data.label-out-of-range", lambda m, b: F.cross_entropy(m(b[0]), b[1] + 3)),
        ("loss.no-valid-targets", lambda m, b: F.cross_entropy(m(b[0]), torch.full_like(b[1], -100))),
        ("mask.fully-masked-row", lambda m, b: (m(b[0]) * 0 - torch.inf).softmax(-1).sum()),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_fault_in_one_pass_is_claimed_by_its_rule(batch, cause, loss_of):
    found = judge([looked_at(nn.Linear(4, 3), loss_of, batch)])
    assert found[cause].severity == "error"
    assert "None" not in found[cause].summary


def test_ids_beyond_a_table_are_claimed(batch):
    model = nn.Embedding(3, 2)
    found = judge([looked_at(model, lambda m, b: m(b[1] + 5).sum(), batch)])
    assert "data.token-mismatch" in found
