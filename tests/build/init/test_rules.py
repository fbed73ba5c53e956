"""Which recipe each kind of parameter gets."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from surefoot.build.init.rules import is_weight_norm, rule_for, weight_norm_rule
from surefoot.build.init.trace import Role, Trace


def rule(module, attribute="weight", role=None, tied=False):
    parameter = getattr(module, attribute)
    found = Trace() if role is None else Trace(roles={parameter: role})
    return rule_for(module, attribute, parameter, found=found, tied=tied)


def test_a_layer_before_relu_is_drawn_with_hes_standard_deviation():
    found = rule(nn.Linear(50, 10), role=Role("relu"))
    assert found.recipe == "he"
    assert found.std == pytest.approx((2 / 50) ** 0.5)


def test_a_norm_has_gain_one_and_shift_zero():
    norm = nn.LayerNorm(4)
    for attribute, value in (("weight", 1.0), ("bias", 0.0)):
        target = torch.full((4,), 7.0)
        rule(norm, attribute).fill(target, None)
        assert torch.equal(target, torch.full((4,), value))


def test_the_padding_row_of_an_embedding_is_zero():
    embedding = nn.Embedding(5, 3, padding_idx=2)
    rule(embedding).fill(embedding.weight, None)
    assert not embedding.weight[2].any()
    assert embedding.weight[1].all()


def test_a_module_without_a_rule_is_left_and_named():
    found = rule(nn.PReLU())
    assert (found.recipe, found.fill) == ("left", None)
    assert "PReLU" in found.why


def test_weight_norm_is_written_through_the_product():
    layer = parametrizations.weight_norm(nn.Linear(8, 4))
    assert is_weight_norm(layer.parametrizations.weight)
    assert not is_weight_norm(layer)
    assert "written through weight_norm" in weight_norm_rule(layer, "weight", Trace()).why
