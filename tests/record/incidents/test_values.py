"""Batches of every build go into an incident and come back; streams are noted at every step and come back exactly."""

import random
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.random_state import set_streams
from surefoot.record.incidents.step_capture import QuickStreams
from surefoot.record.incidents.values import ALIGNMENT, MOST_VALUES, decode, encode, tensors_in

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Graph:
    nodes: Any
    name: str


class Encoding(UserDict):
    pass


def there_and_back(value, pattern=None):
    left_out = []
    return decode(encode(value, str, left_out), pattern), left_out


def test_plain_nestings_come_back_as_they_were():
    batch = {"x": [torch.arange(3), (1, "two", None)], "y": np.arange(4.0), 3: 2.5}
    back, left_out = there_and_back(batch)
    assert left_out == []
    assert torch.equal(back["x"][0], batch["x"][0])
    assert back["x"][1] == (1, "two", None)
    assert np.array_equal(back["y"], batch["y"])
    assert back[3] == 2.5


@pytest.mark.parametrize("kind", ["pair", "dataclass", "mapping"])
def test_a_class_of_the_script_s_own_is_filled_from_a_batch_of_its_own(kind):
    x, y = torch.randn(2, 3), torch.arange(2)
    made = {"pair": lambda a: Pair(a, y), "dataclass": lambda a: Graph(a, "g"), "mapping": lambda a: Encoding(x=a, y=y)}
    back, _ = there_and_back(made[kind](x), made[kind](torch.zeros(5, 3)))
    assert type(back) is type(made[kind](x))
    found = {"pair": lambda: back.x, "dataclass": lambda: back.nodes, "mapping": lambda: back["x"]}
    assert torch.equal(found[kind](), x)
    alone, _ = there_and_back(made[kind](x))
    assert torch.equal(alone["nodes" if kind == "dataclass" else "x"], x)


class Node:
    def __init__(self, above=None, levels=4):
        self.above, self.value = above, torch.zeros(1)
        self.below = [Node(self, levels - 1) for _ in range(4)] if levels else []


def test_what_refers_to_itself_is_walked_through_once():
    itself = [torch.zeros(1)]
    itself += [itself, itself]
    assert len(tensors_in(itself)) == 1
    assert len(tensors_in(Node())) == 1 + 4 + 16 + 64 + 256
    back, left_out = there_and_back({"x": torch.ones(1), "graph": Node(), "list": itself})
    assert torch.equal(back["x"], torch.ones(1))
    assert any("list" in line for line in left_out)


def test_a_batch_that_leads_to_a_whole_dataset_is_not_walked_to_its_end():
    lattice = torch.zeros(1)
    for _ in range(18):
        lattice = [lattice, lattice, lattice]
    assert len(tensors_in(lattice)) <= MOST_VALUES
    back, left_out = there_and_back({"x": torch.ones(1), "lattice": lattice})
    assert torch.equal(back["x"], torch.ones(1))
    assert len(left_out) == 1


def test_what_is_no_data_is_described_and_left_out():
    back, left_out = there_and_back({"x": torch.ones(1), "f": print, "s": torch.eye(2).to_sparse()})
    assert len(left_out) == 2
    assert "batch['f']" in left_out[0]
    assert "sparse" in left_out[1]
    assert "left out" in repr(back["f"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(5, 7).t(),
        torch.randn(40)[3:17],
        torch.randn(6, 8)[1:, ::2],
        torch.randn(1, 4).expand(3, 4),
        torch.randn(0, 4),
        torch.randn(3).requires_grad_(),
    ],
    ids=["channels last", "transposed", "offset", "strided", "expanded", "empty", "with gradient"],
)
def test_memory_layout_comes_back(tensor):
    back, _ = there_and_back(tensor)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride() or tensor.numel() == 0
    assert back.requires_grad == tensor.requires_grad
    assert tensor.numel() == 0 or back.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT


def test_a_quick_note_of_the_streams_is_the_slow_one():
    streams = QuickStreams()
    assert streams.quick
    random.gauss(0, 1)
    np.random.rand(7)
    note = streams.note()
    expected = [random.random(), random.gauss(0, 1), np.random.rand(), float(torch.rand(1))]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    set_streams(note.full())
    assert [random.random(), random.gauss(0, 1), np.random.rand(), float(torch.rand(1))] == expected


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: random.seed(3), lambda: np.random.seed(3)])
def test_a_note_is_never_that_of_an_earlier_moment(draw):
    streams = QuickStreams()
    for _ in range(2000):
        streams.note()
        draw()
    note = streams.note()
    expected = [random.random(), np.random.rand()]
    set_streams(note.full())
    assert [random.random(), np.random.rand()] == expected
