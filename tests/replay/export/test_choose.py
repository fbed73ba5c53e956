"""How much of what came before goes into the script."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recorded_calls import captured
from surefoot.replay.export.call_text import NotWritable, value
from surefoot.replay.export.choose import MOST_CALLS, drafts, fewest
from surefoot.replay.export.script import literal


def test_cheap_calls_before_the_failure_are_shown_and_the_weights_are_not():
    weight, x = torch.ones(200, 200), -torch.ones(200)

    def step():
        return torch.relu(weight @ x).mul(0).log()

    found = captured(step, weight=weight, x=x)
    grown, small, alone = drafts(found, backward=False, fixed=set())
    assert small.program.operations == alone.program.operations == 1
    assert small.program.bytes < alone.program.bytes
    assert 1 < grown.program.operations <= MOST_CALLS
    assert "@" not in grown.program.text
    assert grown.seen.kinds == alone.seen.kinds


def test_a_call_that_does_not_fail_alone_gives_no_draft():
    x = torch.ones(2)
    assert list(drafts(captured(lambda: x * 2), backward=False, fixed=set())) == []


@given(st.sets(st.integers(0, 63), min_size=1, max_size=4), st.integers(64, 200))
def test_every_item_that_is_needed_is_kept_and_little_else(needed, size):
    asked = []

    def fails(part):
        asked.append(part)
        return needed <= set(part)

    assert needed <= set(fewest(list(range(size)), fails))
    if len(needed) == 1:
        assert fewest(list(range(size)), fails) == sorted(needed)
        assert len(asked) < 60


def test_nothing_is_taken_away_where_everything_is_needed():
    assert fewest(list(range(300)), lambda part: len(part) == 300) == list(range(300))


@given(st.lists(st.floats(width=32), max_size=8), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_a_tensor_comes_back_bit_for_bit(numbers, dtype):
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    again = eval(literal(tensor), {"torch": torch})
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    kept = ~tensor.isnan()
    assert torch.equal(again.isnan(), ~kept)
    assert torch.equal(again[kept].view(torch.uint8), tensor[kept].view(torch.uint8))


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(300, 4), "torch.zeros(300, 4)"),
        (torch.ones(2, 3, dtype=torch.float16), "torch.ones(2, 3, dtype=torch.float16)"),
        (torch.full((9,), -100), "torch.full((9,), -100)"),
        (torch.tensor(0.1), "torch.tensor(0.1)"),
        (torch.zeros(0, 3), "torch.zeros(0, 3)"),
        (torch.tensor([True, False]), "torch.tensor([True, False])"),
        (torch.tensor([-0.0, 1e-45]), "torch.tensor([-0.0, 1e-45])"),
        (torch.arange(40), None),
    ],
)
def test_few_values_and_constants_are_written_out(tensor, text):
    assert literal(tensor) == text


def test_what_cannot_be_written_down_is_refused():
    assert value([1, (2.5,), {"dim": None}, torch.float16, float("-inf")], str) == (
        "[1, (2.5,), {'dim': None}, torch.float16, float(\"-inf\")]"
    )
    with pytest.raises(NotWritable, match="an argument of type Generator"):
        value([torch.Generator()], str)
