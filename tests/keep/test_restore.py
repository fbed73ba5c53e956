"""Saved states go into models and optimizers exactly, or nothing is changed and what does not fit is named."""

import copy

import pytest
import torch
from torch import nn

from surefoot.errors import CheckpointError
from surefoot.keep.restore import (
    as_gradient,
    describe_optimizer,
    load_models,
    load_optimizer,
    model_faults,
    optimizer_faults,
    refuse,
    scheduler_kind,
)


def trained(width=3, kind=torch.optim.Adam, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    for _ in range(2):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_state_comes_back_bit_for_bit():
    model, optimizer = trained()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, fresh = trained()
    model_before = nn.Linear(2, 1)  # not involved
    load_models([other], [saved[0]])
    load_optimizer(fresh, saved[1])
    assert all(torch.equal(value, saved[0][name]) for name, value in other.state_dict().items())
    for number, parts in fresh.state_dict()["state"].items():
        assert all(torch.equal(part, saved[1]["state"][number][name]) for name, part in parts.items())
    assert model_before.weight.grad is None


def test_moments_keep_the_dtype_they_were_saved_in():
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    model.to(torch.bfloat16)
    load_optimizer(optimizer, saved)
    assert next(iter(optimizer.state.values()))["exp_avg"].dtype == torch.float32


def test_names_that_wrappers_add_make_no_difference():
    model, _ = trained()
    wrapped = {f"_orig_mod.module.{name}": value for name, value in model.state_dict().items()}
    assert model_faults(model, wrapped) == []


def test_every_misfit_of_a_model_is_named():
    model, _ = trained()
    saved = dict(model.state_dict())
    saved["0.weight"] = torch.zeros(5, 2)
    saved["0.bias"] = saved["0.bias"].double()
    saved["2.weight"] = saved.pop("1.weight")
    assert model_faults(model, saved) == [
        "it has no '1.weight'",
        "the model has no '2.weight'",
        "its '0.weight' has shape (5, 2), and the model's (3, 2)",
        "its '0.bias' is float64, and the model's is float32",
    ]


def test_an_optimizer_of_another_kind_or_over_other_parameters_is_refused():
    model, optimizer = trained()
    then = describe_optimizer(optimizer, [model])
    assert then["groups"][0][0] == {"name": "0.weight", "shape": [3, 2], "dtype": "float32"}
    assert optimizer_faults(optimizer, optimizer.state_dict(), then, [model]) == []
    _, sgd = trained(kind=torch.optim.SGD)
    assert optimizer_faults(sgd, optimizer.state_dict(), then, [model]) == [
        "its optimizer is Adam, and the run's is SGD"
    ]
    wider, other = trained(width=4)
    assert optimizer_faults(other, optimizer.state_dict(), then, [wider])


def test_a_moment_of_another_shape_never_reaches_a_kernel():
    _, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(7)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"its 'exp_avg' of parameter .* is of shape \(7,\)"):
        load_optimizer(optimizer, saved)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])


def test_a_gradient_is_laid_out_like_its_parameter():
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    saved = torch.randn(2, 3, 4, 4)
    gradient = as_gradient(saved, weight)
    assert torch.equal(gradient, saved)
    assert gradient.stride() == weight.stride()


def test_schedulers_are_named_with_what_they_are_made_of():
    _, optimizer = trained()
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, constant], milestones=[2])
    assert scheduler_kind(both) == "SequentialLR(ConstantLR, ConstantLR)"
    assert scheduler_kind(None) is None


def test_five_misfits_are_shown_and_the_rest_counted():
    refuse([])
    with pytest.raises(CheckpointError, match=r"a; b; c; d; e; and 1 more. Nothing was loaded"):
        refuse(["a", "b", "c", "d", "e", "f", "a"])
