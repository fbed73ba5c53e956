"""States in memory to return to."""

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from surefoot.keep.snapshots import SnapshotRing, TrainedState
from surefoot.keep.staging import stage
from trained import OPTIMIZERS, Run


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_return_is_exact_and_training_continues_from_there(optimizer):
    run = Run(optimizer)
    ring = SnapshotRing(run.state, every_steps=1, keep=2, device_bytes=None)
    run.train(5)
    ring.take(5)
    before = run.bits()
    run.train(4)
    after = run.bits()
    run.steps = 5
    assert ring.return_to(before=5, tried=0, keep_present=False) == 5
    assert same(run.bits(), before)
    run.train(4)
    assert same(run.bits(), after)


def test_a_return_to_before_the_first_step_forgets_the_moments():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    ring.take(0)
    run.train(3)
    ring.return_to(0, 0, keep_present=False)
    assert not run.optimizer.state
    run.steps = 0
    run.train(3)


def test_tensors_stay_the_same_objects():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    run.train(2)
    ring.take(2)
    pointers = [p.data_ptr() for p in run.model.parameters()]
    moments = [state["exp_avg"].data_ptr() for state in run.optimizer.state.values()]
    run.train(2)
    ring.return_to(2, 0, keep_present=False)
    assert [p.data_ptr() for p in run.model.parameters()] == pointers
    assert [state["exp_avg"].data_ptr() for state in run.optimizer.state.values()] == moments


def test_moments_that_were_forgotten_come_back_in_the_memory_layout_of_their_parameter():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    state = TrainedState([model], optimizer, list, lambda rules: None)
    expected = optimizer.state[model.weight]["exp_avg"].clone()
    taken = stage(state.tree(state.live()))
    state.reset_moments()
    state.put_back(taken.tree)
    moment = optimizer.state[model.weight]["exp_avg"]
    assert torch.equal(moment, expected)
    assert moment.stride() == model.weight.stride() != (27, 9, 3, 1)


def test_learning_rates_are_left_alone():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    ring.take(0)
    run.optimizer.param_groups[0]["lr"] = 0.007
    ring.return_to(0, 0, keep_present=False)
    assert run.optimizer.param_groups[0]["lr"] == 0.007


def test_states_are_taken_when_due_and_the_oldest_goes():
    run = Run()
    ring = SnapshotRing(run.state, every_steps=10, keep=2, device_bytes=None)
    for step in range(1, 36):
        ring.take_if_due(step)
    assert ring.steps == [21, 31]


def test_while_later_states_are_in_doubt_the_last_one_before_them_is_kept():
    run = Run()
    ring = SnapshotRing(run.state, every_steps=10, keep=2, device_bytes=None)
    kept = {}
    for step in range(1, 82):
        ring.hold_before = 25 if 25 <= step < 55 else None
        ring.take_if_due(step)
        kept[step] = ring.steps
    assert [kept[step] for step in (21, 31, 51, 61, 81)] == [[11, 21], [21, 31], [21, 51], [51, 61], [71, 81]]


def test_each_try_goes_one_older_and_what_is_younger_than_the_trouble_is_dropped():
    run = Run()
    ring = SnapshotRing(run.state, 1, 3, None)
    for step in (10, 20, 30):
        run.train(1)
        ring.take(step)
    assert ring.return_to(25, 0, keep_present=False) == 20
    assert ring.steps == [10, 20]
    assert ring.return_to(25, 1, keep_present=False) == 10
    assert ring.return_to(25, 2, keep_present=False) is None


def test_without_one_old_enough_the_oldest_serves():
    ring = SnapshotRing(Run().state, 1, 2, None)
    ring.take(3)
    assert ring.return_to(1, 0, keep_present=False) == 3


def test_a_return_can_be_taken_back():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    run.train(2)
    ring.take(2)
    run.train(3)
    left = run.bits()
    ring.return_to(2, 0, keep_present=True)
    assert not same(run.bits(), left)
    run.train(1)
    assert ring.abandoned.take_back()
    assert same(run.bits(), left)
    assert not ring.abandoned.take_back()


def test_a_settled_return_cannot():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    ring.take(0)
    ring.return_to(0, 0, keep_present=True)
    ring.settle()
    assert not ring.abandoned.take_back()


def prune_a_layer(model):
    torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.3)


def add_a_frozen_layer(model):
    model.append(nn.BatchNorm1d(1, affine=False))


def replace_a_layer(model):
    model[2] = nn.Linear(8, 1)


@pytest.mark.parametrize("change", [prune_a_layer, add_a_frozen_layer, replace_a_layer])
def test_states_from_before_the_model_was_rebuilt_are_dropped(change):
    run = Run()
    ring = SnapshotRing(run.state, every_steps=1, keep=2, device_bytes=None)
    run.train(1)
    ring.take(1)
    change(run.model)
    ring.note_trouble(2, 2)
    assert ring.return_to(before=2, tried=0, keep_present=False) is None
    ring.take(2)
    assert ring.steps == [2]


@pytest.mark.parametrize("change", [prune_a_layer, add_a_frozen_layer, replace_a_layer])
def test_a_return_is_not_taken_back_into_a_model_that_was_rebuilt(change):
    run = Run()
    ring = SnapshotRing(run.state, every_steps=1, keep=2, device_bytes=None)
    ring.take(0)
    run.train(1)
    ring.return_to(0, 0, keep_present=True)
    change(run.model)
    assert not ring.abandoned.take_back()


def test_a_buffer_that_has_grown_stays_as_it_is_in_a_return():
    run = Run()
    run.model.register_buffer("cache", torch.zeros(3))
    ring = SnapshotRing(run.state, every_steps=1, keep=2, device_bytes=None)
    run.train(1)
    ring.take(1)
    before = run.model[0].weight.detach().clone()
    run.model.cache = torch.ones(5)
    run.train(1)
    assert ring.return_to(before=1, tried=0, keep_present=False) == 1
    assert torch.equal(run.model[0].weight, before)
    assert torch.equal(run.model.cache, torch.ones(5))


def test_without_memory_for_a_copy_the_others_are_dropped_with_one_warning(monkeypatch, caplog):
    run = Run()
    ring = SnapshotRing(run.state, 1, 3, None)
    ring.take(0)
    run.train(1)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("surefoot.keep.snapshots.stage", full)
    ring.take(1)
    ring.take(2)
    assert ring.steps == []
    assert ring.return_to(5, 0, keep_present=False) is None
    assert caplog.text.count("there was not enough memory") == 1


def test_the_norm_of_parameters_of_several_types_is_that_in_float64():
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    values = [(300 * torch.randn(400, 300)).to(kind) for kind in kinds]  # norms beyond the largest fp16 number
    model = nn.ParameterList([nn.Parameter(each.clone()) for each in values])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainedState([model], optimizer, list, lambda saved: None)
    wide = torch.cat([torch.view_as_real(each).flatten() if each.is_complex() else each.flatten() for each in values])
    assert float(state.norm()) == pytest.approx(float(torch.linalg.vector_norm(wide)), rel=1e-5)
