"""One walker for every nesting: what it enters, what it keeps, where it stops."""

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.core import nested


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    note: str = "kept"


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    more: list = field(default_factory=list)


class Encoding(collections.UserDict):
    """Like a `BatchEncoding`: entries, and something beside them."""

    def __init__(self, data, origin):
        super().__init__(data)
        self.origin = origin


class GraphBatch:
    def __init__(self, x):
        self.x = x


def one():
    return torch.ones(2)


CONTAINERS = {
    "list": lambda t: [t, 1],
    "tuple": lambda t: (t, "a"),
    "named tuple": lambda t: Pair(t, t.clone()),
    "dict": lambda t: {"x": t, 3: None},
    "ordered dict": lambda t: collections.OrderedDict(x=t),
    "default dict": lambda t: collections.defaultdict(list, x=t),
    "user dict": lambda t: Encoding({"x": t}, "here"),
    "frozen dataclass": Frozen,
    "dataclass with slots": lambda t: Slotted(t, [t.clone()]),
    "packed sequence": lambda t: nn.utils.rnn.pack_sequence([t]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_changing_tensors_keeps_the_container_and_leaves_the_original_alone(name):
    value = CONTAINERS[name](one())
    changed = nested.map_leaves([value], lambda tensor: tensor + 1)[0]
    assert type(changed) is type(value)
    assert changed is not value
    assert [t.tolist() for t in nested.leaves(changed)] == [(t + 1).tolist() for t in nested.leaves(value)]
    assert next(nested.leaves(value)).tolist() == [1, 1]
    if name == "user dict":
        assert changed.origin == "here"
    if name == "default dict":
        assert changed["new"] == []
    if name == "frozen dataclass":
        assert changed.note == "kept"


def test_a_model_output_of_transformers_keeps_its_class():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=one())
    changed = nested.map_leaves(value, lambda tensor: tensor * 3)
    assert type(changed) is type(value)
    assert changed.last_hidden_state.tolist() == changed["last_hidden_state"].tolist() == [3, 3]
    assert value.last_hidden_state.tolist() == [1, 1]


def test_a_named_leaf_has_the_expression_that_reaches_it():
    batch = {"x": [one(), (one(),)], "y": Frozen(one())}
    found = dict(nested.named_leaves(batch, "batch"))
    assert set(found) == {"batch['x'][0]", "batch['x'][1][0]", "batch['y'].x"}
    for expression, tensor in found.items():
        assert eval(expression, {"batch": batch}) is tensor


def test_shorter_expressions_come_first():
    variables = {"batch": [[one()]], "x": one()}
    assert [name for name, _ in nested.nearest_leaves(variables, deepest=4, most=100)] == ["x", "batch[0][0]"]
    assert [name for name, _ in nested.nearest_leaves(variables, deepest=1, most=100)] == ["x"]
    assert list(nested.nearest_leaves(variables, deepest=4, most=1)) == []


def test_a_container_that_holds_itself_is_entered_once():
    loop = {"x": one()}
    loop["again"] = [loop]
    assert len(list(nested.leaves(loop))) == 1
    assert [name for name, _ in nested.named_leaves(loop)] == ["['x']"]
    assert nested.map_leaves(loop, torch.clone)["again"][0] is loop


def test_a_value_that_occurs_twice_is_found_twice():
    shared = [one()]
    assert len(list(nested.leaves([shared, shared]))) == 2


def test_limits_on_depth_length_and_number():
    deep = [one(), [one(), [one()]]]
    assert len(list(nested.leaves(deep, deepest=2))) == 2
    assert len(list(nested.leaves([one()] * 10, longest=3))) == 3
    assert len(list(nested.leaves([one()] * 10, most=4))) == 4
    assert list(nested.leaves(one(), deepest=0))


def test_walks_are_lazy():
    entered = []

    class Recording(dict):
        def values(self):
            entered.append(True)
            return super().values()

    first = next(nested.leaves([one(), Recording(x=one())]))
    assert first.tolist() == [1, 1]
    assert not entered


def test_objects_are_entered_only_on_request_and_never_modules_or_functions():
    batch = GraphBatch(one())
    assert not list(nested.leaves(batch))
    assert len(list(nested.leaves(batch, objects=True))) == 1
    assert not list(nested.leaves([nn.Linear(1, 1), torch.Generator(), one, GraphBatch], objects=True))


def test_other_kinds_of_leaves_can_be_asked_for():
    value = {"name": "a", "array": np.zeros(2), "more": ["b", {"c": 1.0}]}
    assert nested.map_leaves(value, str.upper, str)["more"][0] == "B"
    assert list(nested.leaves(value, (float, np.ndarray)))[1] == 1.0


def test_equal_compares_part_by_part():
    state = {"words": one(), "place": [1, (2, None)]}
    assert nested.equal(state, {"words": one(), "place": [1, (2, None)]})
    assert not nested.equal(state, {"words": one() + 1, "place": [1, (2, None)]})
    assert not nested.equal(state, {"words": one()})
    assert not nested.equal(one(), 1.0)
