"""A state from its JSON value and tensors: what is not of our making is refused, and nothing is ever called."""

from collections import Counter, OrderedDict

import pytest
import torch

from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.plain import DEEPEST, MARK, unflatten
from surefoot.keep.checkpoint.tree import flatten


@pytest.mark.parametrize(
    "state",
    [
        (1, "two", None, 3.5),
        {"a": {1, 2}, "b": frozenset({3})},
        OrderedDict(z=1, a=2),
        Counter("abca"),
        {1: "number", (2, 3): "pair"},
        {MARK: "a key of its own"},
        b"\x00\xff",
        complex(1, -2),
        float("-inf"),
        torch.float16,
        torch.device("cpu"),
    ],
)
def test_what_was_flattened_comes_back_as_it_was(state):
    back = unflatten(*flatten(state))
    assert back == state
    assert type(back) is type(state)


def test_one_tensor_under_two_names_comes_back_as_one():
    weight = torch.randn(2)
    back = unflatten(*flatten({"encoder": weight, "decoder": weight}))
    assert back["encoder"] is back["decoder"]


@pytest.mark.parametrize(
    "forged",
    [
        {MARK: "os.system", "value": "true"},
        {MARK: "tensor", "name": "missing"},
        {MARK: "tuple"},
        {MARK: "torch.dtype", "value": "torch.load"},
        {MARK: "numpy.scalar", "dtype": "|O", "hex": "00"},
        {MARK: "dict", "items": [[1]]},
    ],
)
def test_a_value_that_flatten_cannot_have_made_is_refused(forged):
    with pytest.raises(CheckpointError):
        unflatten(forged, {})


def test_nesting_beyond_all_measure_is_refused():
    nested = []
    for _ in range(DEEPEST + 10):
        nested = [nested]
    with pytest.raises(CheckpointError):
        unflatten(nested, {})
