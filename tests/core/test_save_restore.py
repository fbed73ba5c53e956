"""Whatever a probe does to model, optimizer and random streams is undone, bit for bit and in the same objects."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.core.nested import equal
from surefoot.core.random_state import read_streams
from surefoot.core.save_restore import (
    is_writable,
    may_have_changed,
    save_gradients,
    save_modes,
    save_optimizer,
    save_slots,
    save_streams,
    save_tensors,
    untouched,
    write,
    write_all,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()


def contents(model, optimizer):
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "state": [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in optimizer.state.values()
        ],
        "lr": [group["lr"] for group in optimizer.param_groups],
        "modes": [module.training for module in model.modules()],
        "streams": read_streams(),
    }


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_probe_that_trains_leaves_nothing_behind(model, kind, trained_before):
    optimizer = kind(model.parameters(), lr=0.1)
    if trained_before:
        train(model, optimizer)
    before, tensors = contents(model, optimizer), [*model.parameters(), *model.buffers()]
    with untouched(model, optimizer):
        train(model, optimizer)
        model.eval()
        optimizer.param_groups[0]["lr"] = 3.0
        optimizer.param_groups[0]["counter"] = 1
        model[1].running_mean = torch.full((4,), 7.0)
        random.random(), np.random.rand(), torch.rand(1)
    assert equal(contents(model, optimizer), before)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
    assert "counter" not in optimizer.param_groups[0]


def test_a_probe_that_raises_is_undone_too(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def probe():
        with untouched(model), torch.no_grad():
            model[0].weight.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        probe()
    assert equal(dict(model.state_dict()), before)


def test_the_scheduler_does_not_learn_of_steps_that_were_undone(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with untouched(model, optimizer):
        train(model, optimizer)
    assert not getattr(optimizer, "_opt_called", False)


def test_a_graph_that_waits_for_its_backward_survives():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    (expected,) = torch.autograd.grad(model(x).mean(), model[0].weight)
    loss = model(x).mean()
    with untouched(model):
        model(torch.randn(5, 3))
    loss.backward()
    assert torch.equal(model[0].weight.grad, expected)


def test_a_write_through_data_is_undone(model):
    weight, before = model[0].weight, model[0].weight.detach().clone()
    put_back = save_tensors([weight])
    weight.data.mul_(2)  # does not count as a write
    put_back()
    assert torch.equal(weight, before)


def test_nan_is_overwritten_not_blended(model):
    put_back = save_tensors(list(model.parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    put_back()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_gradients_come_back_as_the_same_objects(model):
    model(torch.randn(5, 3)).mean().backward()
    gradient = model[0].weight.grad
    kept = gradient.clone()
    put_back = save_gradients(list(model.parameters()))
    gradient.zero_()
    model[0].weight.grad = None
    model[3].bias.grad = None
    put_back()
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, kept)
    assert model[3].bias.grad is not None


def test_a_list_in_the_state_of_an_optimizer_is_copied(model):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state[next(iter(model.parameters()))]
    directions, count = [each.clone() for each in state["old_dirs"]], state["n_iter"]
    put_back = save_optimizer(optimizer)
    optimizer.step(closure)
    put_back()
    state = optimizer.state[next(iter(model.parameters()))]
    assert state["n_iter"] == count
    assert equal(state["old_dirs"], directions)


def test_the_state_of_an_optimizer_may_hold_anything(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_graph = torch.ones(2, requires_grad=True) * 3
    history, generator = [with_graph, {"a": (torch.zeros(2),)}], torch.Generator().manual_seed(1)
    optimizer.state["count"] = 1
    optimizer.state["history"] = history
    optimizer.state["lock"] = lock = threading.Lock()
    optimizer.param_groups[0]["generator"] = generator
    put_back = save_optimizer(optimizer)
    first = torch.rand(3, generator=generator)
    optimizer.state["count"] += 1
    history[1]["a"][0].fill_(7)
    history.append(5)
    put_back()
    assert optimizer.state["count"] == 1
    assert optimizer.state["history"] is history
    assert history[0] is with_graph
    assert equal(history[1:], [{"a": (torch.zeros(2),)}])
    assert optimizer.state["lock"] is lock
    assert optimizer.param_groups[0]["generator"] is generator
    assert equal(first, torch.rand(3, generator=generator))
    with_graph.sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_compressed_sparse_tensor_is_put_back():
    tensor = torch.eye(3).to_sparse_csr()
    put_back = save_tensors([tensor])
    tensor.values().fill_(7)
    put_back()
    assert tensor.values().tolist() == [1, 1, 1]


def test_a_generator_is_rewound():
    generator = torch.Generator().manual_seed(3)
    put_back = save_streams([generator])
    first = torch.rand(4, generator=generator), torch.rand(4)
    put_back()
    assert equal(first, (torch.rand(4, generator=generator), torch.rand(4)))


def test_modes_and_slots_are_put_back_per_module(model):
    model[1].eval()
    undo = save_modes(model.modules()), save_slots(list(model.modules()))
    mean = model[1].running_mean
    model.train()
    model[1].running_mean = None
    model[0].register_buffer("new", torch.zeros(1))
    for put_back in undo:
        put_back()
    assert model[0].training
    assert not model[1].training
    assert model[1].running_mean is mean
    assert "new" not in dict(model.named_buffers())


def test_an_expanded_tensor_is_written_without_its_repeats():
    expanded = torch.zeros(3, 1).expand(3, 4)
    write(expanded, torch.arange(3.0)[:, None].expand(3, 4))
    assert expanded[:, 2].tolist() == [0, 1, 2]
    assert not is_writable(expanded)
    with torch.inference_mode():
        assert not is_writable(torch.zeros(2))
    assert not is_writable(torch.zeros(2).to_sparse())
    assert is_writable(torch.zeros(2, 3).T)


def test_many_tensors_of_different_kinds_are_written_together():
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(2, 2).T]
    sources = [torch.full_like(each, 1.5) for each in targets]
    write_all(targets, sources)
    assert equal(targets, sources)


def test_batch_norm_may_change_without_being_written():
    norm = nn.BatchNorm1d(2)
    assert may_have_changed(norm, was_written=False)
    assert not may_have_changed(norm.eval(), was_written=False)
    assert may_have_changed(nn.Linear(1, 1), was_written=True)
