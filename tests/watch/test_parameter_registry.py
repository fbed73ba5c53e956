"""How parameters are named: by their model where there are several, and once where models share them."""

from __future__ import annotations

from torch import nn

from surefoot.watch.parameter_registry import ParameterRegistry


def test_names_have_the_model_in_front_once_two_models_have_parameters():
    registry = ParameterRegistry()
    encoder, empty, decoder = nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2, bias=False)
    registry._enter(encoder, "encoder")
    registry._enter(empty, "activation")
    weight = registry.parameters[0]
    assert registry.label(weight) == "weight"
    registry._enter(decoder, "decoder")
    assert [registry.label(each) for each in registry.parameters] == [
        "encoder.weight",
        "encoder.bias",
        "decoder.weight",
    ]


def test_a_shared_parameter_belongs_to_the_first_model_and_makes_no_second_one():
    registry = ParameterRegistry()
    inner = nn.Linear(2, 2)
    registry._enter(inner, "inner")
    registry._enter(nn.Sequential(inner, nn.ReLU()), "whole")
    assert [registry.label(each) for each in registry.parameters] == ["weight", "bias"]


def test_a_tensor_without_a_name_is_described_by_its_shape():
    registry = ParameterRegistry()
    loose = nn.Parameter(nn.Linear(4, 5).weight.detach())
    assert registry.label(registry.add(loose)) == "tensor of shape (5, 4)"
