"""New weights are recognised by their values; others are not called new."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from surefoot.diagnose.engine import diagnose
from surefoot.diagnose.initial_weights import look_new, look_trained
from surefoot.record.facts import TRAINING, ParameterFacts
from surefoot.watch.parameter_registry import weight_facts
from watched import CLASSES, LOOP

if TYPE_CHECKING:
    from watched import Nursery


def facts_of(model: nn.Module) -> list[ParameterFacts]:
    owners = {id(p): type(part).__name__ for part in model.modules() for p in part.parameters(recurse=False)}
    held = list(model.parameters())
    return [
        ParameterFacts(id=i, shape=list(p.shape), dtype="float32", label=str(i), module_type=owners[id(p)], first=scale)
        for i, (p, scale) in enumerate(zip(held, weight_facts(held), strict=True))
    ]


def as_transformers_does(layer: nn.Linear) -> nn.Linear:
    """Weights from a normal distribution, and a bias of zeros."""
    nn.init.normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.parametrize(
    ("make", "new"),
    [
        (lambda: nn.Linear(32, 32), True),
        (lambda: nn.Conv2d(3, 16, 3), True),
        (lambda: nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16)), True),
        (lambda: as_transformers_does(nn.Linear(32, 32)), True),
        (lambda: as_transformers_does(nn.Linear(32, 32, bias=False)), False),  # it cannot be told
        (lambda: nn.Embedding(50, 16), False),  # nor here
    ],
    ids=["linear", "convolution", "norm", "normal", "normal-unbiased", "embedding"],
)
def test_default_weights_are_new_and_trained_ones_are_not(make, new):
    torch.manual_seed(0)
    model = make()
    assert (look_new(facts_of(model)), look_trained(facts_of(model))) == (new, False)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * p.std().nan_to_num(0.1).clamp(min=0.1))
    assert not look_new(facts_of(model))


LEFT_OUT = """
loss_of = F.cross_entropy
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
WEIGHTS
optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-2)
"""


def test_weights_that_may_have_been_loaded_before_the_training_are_not_missing_from_the_optimizer(
    watch: Nursery,
) -> None:
    drawn = "nn.init.normal_(model[0].weight)"
    for weights, named in (("", True), (drawn, False)):
        facts, description = watch(CLASSES, LEFT_OUT.replace("WEIGHTS", weights), LOOP).loaded
        assert "optim.parameters-missing" in causes(facts, description)
        assert ("optim.parameters-missing" in causes(replace(facts, scope=TRAINING), description)) == named


def causes(facts, description) -> list[str]:
    return [each.cause for each in diagnose(facts, description, strict=True).findings]
