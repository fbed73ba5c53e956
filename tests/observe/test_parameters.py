import pytest
import torch

from surefoot.observe.parameters import (
    BackwardOrder,
    Layout,
    learning_rate,
    named_parameters,
    optimizer_parameters,
    plain_name,
)
from surefoot.observe.tensors import TensorMeter


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("layer.weight", "layer.weight"),
        ("module.layer.weight", "layer.weight"),
        ("_orig_mod.layer.weight", "layer.weight"),
        ("module._orig_mod.layer.weight", "layer.weight"),
        ("blocks.0._checkpoint_wrapped_module.weight", "blocks.0.weight"),
        ("_fsdp_wrapped_module.blocks.3._fsdp_wrapped_module.weight", "blocks.3.weight"),
    ],
)
def test_names_are_those_the_user_wrote(wrapped, plain):
    assert plain_name(wrapped) == plain


def test_a_compiled_model_keeps_its_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert [name for name, _ in named_parameters([torch.compile(model, backend="eager")])] == ["0.weight", "0.bias"]


def test_several_models_are_numbered_and_shared_parameters_come_once():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    assert [name for name, _ in named_parameters([first, second])] == ["0.weight", "0.bias", "1.bias"]


def test_a_parameter_the_model_does_not_know_is_named_by_group_and_place():
    model, stray = torch.nn.Linear(2, 2, bias=False), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [stray]}], lr=0.1)
    names = {id(parameter): name for name, parameter in named_parameters([model])}
    assert [name for name, _ in optimizer_parameters(optimizer.param_groups, names)] == ["weight", "optimizer.group1.0"]


def test_the_gradient_nearest_the_loss_is_the_first_to_break():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    order = BackwardOrder(named_parameters([model]))
    model(torch.ones(1, 3)).sum().backward()
    order.stop()
    assert order.first(["0.weight", "0.bias", "2.weight"]) == "2.weight"
    assert order.first(["0.bias", "unknown"]) == "0.bias"


def test_the_order_is_learned_once_and_its_hooks_are_taken_off():
    model = torch.nn.Linear(3, 1)
    order = BackwardOrder(named_parameters([model]))
    model(torch.ones(1, 3)).sum().backward()
    order.stop()
    learned = dict(order.rank)
    assert set(learned) == {"weight", "bias"}
    assert not model.weight._post_accumulate_grad_hooks
    model(torch.ones(1, 3)).sum().backward()
    assert order.rank == learned


def test_a_layout_knows_where_gradients_are_missing():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    layout = Layout([model], torch.optim.SGD(model.parameters(), lr=0.1))
    model[1](torch.ones(1, 2)).sum().backward()
    named, gradients = layout.with_gradient()
    assert [name for name, _ in named] == ["1.weight", "1.bias"]
    assert layout.positions.tolist() == [2, 3]
    model[0](torch.ones(1, 2)).sum().backward()
    assert len(layout.with_gradient()[1]) == 4
    assert layout.positions is None
    assert len(gradients) == 2


def test_a_layout_follows_parameters_that_are_added_later():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    layout = Layout([model], optimizer)
    assert len(layout.parameters) == 2
    optimizer.add_param_group({"params": list(model[1].parameters())})
    layout.refresh()
    assert [name for name, _ in layout.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_sparse_gradients_are_measured_added_up_and_left_as_they_are():
    model = torch.nn.Embedding(5, 2, sparse=True)
    layout = Layout([model], torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1, 1])).sum().backward()
    _, (gradient,) = layout.with_gradient()
    assert gradient is model.weight.grad
    assert not gradient.is_coalesced()
    assert TensorMeter().measure([gradient]).norm.tolist() == [pytest.approx(8**0.5)]


@pytest.mark.parametrize(
    ("given", "rate"),
    [(0.5, 0.5), (1, 1.0), (torch.tensor(0.25), 0.25), (torch.ones(1), 1.0), (None, None), ("auto", None)],
)
def test_the_learning_rate_is_a_number_or_none(given, rate):
    assert learning_rate({"lr": given}) == rate
    assert learning_rate({}) is None


def test_a_learning_rate_on_a_device_is_not_read():
    rate = learning_rate({"lr": torch.ones((), device="meta", requires_grad=True)})
    assert isinstance(rate, torch.Tensor)
    assert not rate.requires_grad
