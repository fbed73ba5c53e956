"""Gradients, moments and updates are measured together, and each number is that of the tensor alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from surefoot.watch import deferred
from surefoot.watch.deferred import read
from surefoot.watch.optimizer_record import least, left_share
from surefoot.watch.optimizer_updates import OptimizerUpdates, gradient_facts, moment_facts
from surefoot.watch.parameter_registry import ParameterRegistry


@pytest.fixture(params=["at once", "later"])
def reading(request, monkeypatch):
    if request.param == "later":
        monkeypatch.setattr(deferred, "READ_AT_ONCE", set())
    return request.param


def wide(tensor):
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().reshape(-1)


GRADIENTS = {
    "fp32": torch.randn(40, 30),
    "fp16": torch.randn(100).half(),
    "bf16": torch.randn(100).bfloat16(),
    "float64": torch.randn(7, 3, dtype=torch.float64),
    "complex": torch.randn(9, dtype=torch.complex64),
    "zeros": torch.zeros(50),
    "half zeros": torch.tensor([0.0, 1.0, 0.0, -3.0]),
    "not contiguous": torch.randn(30, 20).t(),
    "one number": torch.tensor(2.0),
    "empty": torch.zeros(0),
    "sparse": torch.sparse_coo_tensor([[1, 3, 1]], [1.0, 2.0, 3.0], (5,), check_invariants=True),
}


def test_each_gradient_has_its_own_numbers(reading):
    found = [read(facts) for facts in gradient_facts([None, *GRADIENTS.values()])]
    assert found[0] == {}
    for (name, grad), facts in zip(GRADIENTS.items(), found[1:], strict=True):
        values = wide(grad)
        assert facts["grad"] == pytest.approx(float(values.norm()), rel=1e-3), name
        if not grad.is_sparse:
            assert facts["largest"] == pytest.approx(float(values.abs().max()) if len(values) else 0.0), name
            assert facts["zeros"] == pytest.approx(float((values == 0).double().mean()) if len(values) else 0.0), name
            assert facts["nonfinite"] == 0, name


def test_broken_entries_are_counted(reading):
    (facts,) = read(gradient_facts([torch.tensor([1.0, math.nan, -math.inf, 0.0])]))
    assert facts["nonfinite"] == 2
    assert facts["zeros"] == 0.25
    assert not math.isfinite(facts["grad"])
    assert math.isnan(facts["largest"])


def test_moments_of_the_same_size_are_measured_together(reading):
    group = {"betas": (0.9, 0.99)}
    states = []
    for step, size in enumerate([5, 6, 5, 100_000], 1):
        second = torch.rand(size)
        states.append(({"exp_avg": torch.randn(size), "exp_avg_sq": second, "step": torch.tensor(float(step))}, group))
    found = read(moment_facts([({}, group), *states]))
    assert found[0] == {}
    for facts, (state, _) in zip(found[1:], states, strict=True):
        second = state["exp_avg_sq"]
        second = second[:: 1 if len(second) < 65_536 else 2]
        unbiased = math.sqrt(1 - 0.99 ** float(state["step"]))
        assert facts["age"] == float(state["step"])
        assert facts["root_second_moment"] == pytest.approx(float(second.sqrt().median()) / unbiased)
        assert facts["second_moment"] == pytest.approx(float(second.mean().sqrt()))


def test_what_a_step_did_is_known_of_each_parameter(reading):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.5)
    model[0](torch.ones(2, 4)).sum().backward()
    registry = ParameterRegistry()
    updates = OptimizerUpdates(registry)
    for _ in range(2):
        before = [tensor.detach().clone() for tensor in model[0].parameters()]
        updates.before_step(0, optimizer)
        optimizer.step()
        updates.after_step(0)
    rows = read(updates.steps)[-1].rows
    after = [tensor.detach() for tensor in model[0].parameters()]
    for row, old, new in zip(rows[:2], before, after, strict=True):
        assert row.update == pytest.approx(float((new - old).norm()))
        assert row.ratio == pytest.approx(float((new - old).norm() / old.norm()))
        assert row.stuck == 0.0
    assert [row.stuck for row in rows[2:]] == [1.0, 1.0]
    facts = [record.as_facts("") for record in registry.parameters]
    assert [(each.changed, each.unchanged, each.trained_by) for each in facts] == [(2, 0, [0])] * 2 + [(0, 2, [])] * 2
    assert not any(each.rewritten for each in facts)
    assert facts[0].last.norm == pytest.approx(float(after[0].norm()))


def test_the_slopes_at_both_ends_of_a_path_are_those_of_the_script_s_own_gradients(reading):
    weight = nn.Parameter(torch.tensor([[2.0, -4.0]]))
    optimizer, registry = torch.optim.SGD([weight], lr=0.1), ParameterRegistry()
    paths = []
    for step in range(6):
        optimizer.zero_grad()
        (0.5 * weight.square().sum()).backward()
        if step in (0, 5):
            updates = OptimizerUpdates(registry, step)
            updates.before_step(0, optimizer)
            paths += [each.path for each in read(updates.steps)]
        optimizer.step()
    start, left = torch.tensor([2.0, -4.0]), 0.9**5
    path = (left - 1) * start
    assert paths[0] is None
    assert paths[1].since == 0
    assert paths[1].start == pytest.approx(float(start @ path))
    assert paths[1].end == pytest.approx(left * paths[1].start)
    assert paths[1].length == pytest.approx(float(path.norm()))


def test_the_share_of_gradients_that_are_left(reading):
    tensors = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    assert left_share(tensors) == 0.0
    tensors[0].grad, tensors[1].grad = torch.zeros(3), torch.tensor([0.0, math.nan, 0.0])
    share = left_share(tensors)
    assert isinstance(share, torch.Tensor) == (reading == "later")
    assert float(share) == 0.25
    assert float(least([share, 0.5])) == 0.25
