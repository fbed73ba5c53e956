"""Steps that are not measured tell whether their gradients are finite."""

import pytest
import torch
from torch import nn

from surefoot.record.facts import NonFiniteGradientEvent
from surefoot.watch.context import WatchContext, WatchOptions
from surefoot.watch.nonfinite_gradients import NonFiniteGradients
from surefoot.watch.step_observer import UnmeasuredSteps, first_gradient


@pytest.fixture
def context() -> WatchContext:
    return WatchContext(WatchOptions())


def events(context: WatchContext) -> list[NonFiniteGradientEvent]:
    return [event for event in context.events.events if isinstance(event, NonFiniteGradientEvent)]


def test_the_first_gradient_that_there_is_tells_of_what_is_not_finite_above_it():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    assert first_gradient(optimizer) is None
    model(torch.ones(2, 3)).square().sum().backward()
    largest = first_gradient(optimizer)
    assert largest is not None
    assert not largest.requires_grad
    assert largest.item() == model[1].weight.grad.abs().max().item()
    optimizer.zero_grad()
    (model(torch.ones(2, 3)) * 0).sqrt().sum().backward()  # the derivative at 0 is infinite
    assert not first_gradient(optimizer).isfinite()


def test_a_large_gradient_in_half_precision_is_finite_and_a_sparse_one_is_passed_over():
    table, layer = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 100, bias=False).half()
    table(torch.tensor([1])).sum().backward()
    layer.weight.grad = torch.full((100, 2), 60_000.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()])
    assert first_gradient(optimizer).item() == pytest.approx(60_000.0, rel=1e-3)


@pytest.mark.parametrize("column", ["first_gradient", "clip_norm"])
def test_a_number_that_is_not_finite_becomes_the_norm_and_an_event(context: WatchContext, column: str):
    steps = UnmeasuredSteps(context, NonFiniteGradients(context))
    rows = [
        {"at": 1, "first_gradient": None, "grad_norm": None, "loss": 0.5, column: 3.0},
        {"at": 2, "grad_norm": 2.0, "loss": 0.5, "clip_norm": torch.inf},  # was measured
        {"at": 3, "first_gradient": None, "grad_norm": None, "loss": 0.5, column: torch.nan},
        {"at": 4, "first_gradient": None, "grad_norm": None, "loss": torch.nan, column: torch.nan},
    ]
    for row in rows:
        steps.take(row)
        assert "first_gradient" not in row
    assert [row["grad_norm"] for row in rows[:2]] == [None, 2.0]
    assert rows[2]["grad_norm"] != rows[2]["grad_norm"]
    (event,) = events(context)
    assert (event.step, event.loss_finite) == (3, True)


def test_the_norm_that_the_script_clips_by_is_enough_unless_it_may_have_overflowed(context: WatchContext):
    steps, layer = UnmeasuredSteps(context, NonFiniteGradients(context)), nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(layer.parameters())
    for clip, is_asked in (
        (None, True),
        ({"clip_norm": torch.tensor(1.0)}, False),
        ({"clip_norm": torch.tensor(1.0, dtype=torch.float16)}, True),
        ({"clip_by_value": True}, True),
    ):
        context.calls.last_clip = clip
        row = {}
        steps.begin(row, optimizer)
        assert isinstance(row["first_gradient"], torch.Tensor) == is_asked
    context.state.scaler.enabled = True
    row = {}
    steps.begin(row, optimizer)
    assert row == {}


def test_a_norm_that_the_script_clips_by_lets_more_steps_go_unmeasured(context: WatchContext):
    steps = UnmeasuredSteps(context, NonFiniteGradients(context))
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters())
    for clip, is_known in (({"clip_norm": 1.0}, True), (None, False)):
        context.calls.last_clip = clip
        steps.begin({}, optimizer)
        assert context.measuring.norms_are_known is is_known
