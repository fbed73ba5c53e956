"""What goes into a compiled call is known when a loss turns bad, and nothing is kept alive for it."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from surefoot.record.facts import NonFiniteLoss
from surefoot.watch.compiled_inputs import MOST_TENSORS, CompiledInputs, may_hold_data
from surefoot.watch.context import WatchContext, WatchOptions

LOSS = NonFiniteLoss(value=math.nan, kind="operation", op="LogSoftmax", nan=6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, image, mask=None):
        return self.layer(image)


class Calls:
    """A few compiled calls of one line, each followed by a backward."""

    def __init__(self):
        self.context, self.model = WatchContext(WatchOptions()), Net()
        self.inputs = CompiledInputs(self.context)

    def __call__(self, *args, **kwargs):
        self.inputs.take(self.model, args, kwargs)
        self.context.state.backwards += 1
        return self.context.state.backwards

    def explain(self, backward, **more):
        return self.inputs.explain(LOSS, backward, **more)


def row_of_nan():
    batch = torch.randn(8, 4)
    batch[5] = math.nan
    return batch


def test_a_batch_that_is_not_finite_after_finite_ones_is_named_with_its_rows():
    calls, batches = Calls(), [torch.randn(8, 4), torch.randn(8, 4), row_of_nan()]
    for batch in batches:
        last = calls(batch)
    found = calls.explain(last)
    assert (found.kind, found.argument, found.call) == ("data", "image", "Net")
    assert (found.nan, found.rows, found.bad_rows, found.shape) == (4, [5], 1, [8, 4])
    assert calls.explain(last - 1) == LOSS  # the batch before was finite


def test_on_a_cpu_the_rows_are_known_although_the_batch_is_gone():
    calls = Calls()
    found = calls.explain(calls(row_of_nan() + 0))
    assert (found.kind, found.argument, found.rows) == ("data", "image", [5])


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_batch_that_is_gone_or_was_written_to_is_known_by_its_range_alone(is_gone):
    """As on a GPU, where a range arrives later."""
    calls, kept = Calls(), row_of_nan()
    last = calls(kept)
    given = calls.inputs._calls[0].inputs[0]
    given.counts = None
    if is_gone:
        calls.inputs.forget_tensors()
    else:
        kept.zero_()
    found = calls.explain(last, is_late=True)
    assert (found.kind, found.argument, found.rows) == ("data", "image", None)
    assert math.isnan(found.largest)


def test_tensors_are_found_inside_of_what_the_call_is_given():
    calls = Calls()
    last = calls({"ids": torch.arange(3), "views": [torch.ones(3), row_of_nan()]}, 3, None)
    assert calls.explain(last).argument == "image['views'][1]"


def test_a_mask_that_is_infinite_on_purpose_explains_nothing():
    calls, mask = Calls(), torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    assert calls.explain(calls(torch.randn(8, 4), mask=mask)) == LOSS  # at the first call nothing is known yet
    assert calls.explain(calls(torch.randn(8, 4), mask=mask)) == LOSS


def test_a_mark_that_was_there_before_a_bad_loss_explains_nothing():
    calls = Calls()
    for _ in range(3):
        last = calls(row_of_nan())
    assert calls.explain(last) == LOSS


def test_what_gradients_flow_into_or_is_called_without_them_is_no_data():
    calls = Calls()
    assert calls.explain(calls(row_of_nan().requires_grad_())) == LOSS
    with torch.no_grad():
        last = calls(row_of_nan())
    assert calls.explain(last) == LOSS
    assert calls.explain(calls(torch.arange(4), torch.full((2,), True))) == LOSS


def test_a_sample_of_a_model_whose_weights_are_broken_is_no_data():
    calls = Calls()
    record = calls.context.registry.add(calls.model.layer.weight)
    record.optimizers.add(0)
    last = calls(row_of_nan())
    assert calls.explain(last).kind == "data"
    nn.init.constant_(calls.model.layer.weight, math.nan)
    assert calls.explain(last) == LOSS
    assert calls.explain(last, is_late=True).kind == "data"  # the weights are those of later steps


@pytest.mark.parametrize("kind", ["parameter", "data"])
def test_what_the_graph_shows_counts_more(kind):
    calls, shown = Calls(), NonFiniteLoss(value=math.nan, kind=kind)
    assert calls.inputs.explain(shown, calls(row_of_nan())) == shown


def test_no_input_lives_longer_for_being_looked_at():
    calls, batch = Calls(), torch.randn(8, 4)
    calls(batch)
    held = weakref.ref(batch)
    del batch
    gc.collect()
    assert held() is None


def test_few_tensors_of_a_call_are_measured():
    calls = Calls()
    last = calls([*(torch.ones(2) for _ in range(MOST_TENSORS)), row_of_nan()])
    assert calls.explain(last) == LOSS


def test_calls_without_data_cost_one_question():
    assert not may_hold_data((torch.arange(3), 1, None), {"x": torch.ones(2, requires_grad=True)})
    assert may_hold_data((torch.ones(2),), {})
    assert may_hold_data(({"x": torch.arange(3)},), {})


COMPILED = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(2048, 8)
y = x[:, :3].argmax(1)
x[1500, 2] = float("nan")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, features):
        return self.head(torch.relu(self.hidden(features)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""
STEPS = """
for step in range(70):
    rows = slice(32 * step % 2048, 32 * step % 2048 + 32)
    loss = F.cross_entropy(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("net = torch.compile(model, backend='aot_eager')", "Net"),
        ("model.compile(backend='aot_eager')\nnet = model", "Net"),
        ("net = torch.compile(lambda features: model(features), backend='aot_eager')", "<lambda>"),
    ],
    ids=["model", "in place", "function"],
)
def test_a_bad_row_is_named_that_goes_into_a_compiled_call(watch, how, name):
    ran = watch(COMPILED, how, STEPS)
    found = ran.names_first("data.nonfinite-input", step=46, at="|net(x[rows])", evidence={"rows", "argument"})
    assert found.evidence["argument"] == "features"
    assert found.evidence["rows"] == [1500 - 46 * 32]
    assert f"compiled `{name}`" in found.summary


def test_a_rate_that_is_too_high_stays_one_when_the_model_is_compiled(watch):
    steep = COMPILED.replace("Adam(model.parameters(), lr=1e-2)", "SGD(model.parameters(), lr=1.0)")
    steep = steep.replace('x[1500, 2] = float("nan")\n', "")
    ran = watch(
        steep,
        "net = torch.compile(model, backend='aot_eager')",
        STEPS.replace("F.cross_entropy(net(x[rows]), y[rows])", "(net(x[rows]).sum(1) - y[rows]).square().mean()"),
    )
    assert ran.first.cause == "lr.too-high", ran.first.summary
