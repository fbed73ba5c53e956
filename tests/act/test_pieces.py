"""What of a batch is cut, what is handed on whole, and what is refused rather than guessed at."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.act.pieces import count_rows, same_rows, take_rows, tensors_of
from surefoot.errors import UsageError

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    note: str


class Encoding(UserDict):
    """As tokenizers return it: a mapping with an attribute of its own."""

    def __init__(self, data: Any, kind: str = "fast") -> None:
        super().__init__(data)
        self.kind = kind


def numbered(rows: int, *rest: int) -> torch.Tensor:
    return torch.arange(rows * int(np.prod(rest))).reshape(rows, *rest)


def cut(batch: Any) -> Any:
    return take_rows(batch, 2, 4, count_rows(batch))


def test_a_tensor_is_cut_without_a_copy():
    batch = numbered(5, 3)
    assert torch.equal(cut(batch), batch[2:4])
    assert cut(batch).untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", [tuple, list, lambda items: Pair(*items)])
def test_sequences_keep_their_kind(kind):
    found = cut(kind([numbered(5, 2), numbered(5)]))
    assert type(found) is type(kind([1, 2]))
    assert [len(part) for part in found] == [2, 2]


@pytest.mark.parametrize("kind", [dict, OrderedDict, Encoding, UserDict])
def test_mappings_keep_their_kind(kind):
    batch = kind({"x": numbered(5, 2), "y": numbered(5)})
    found = cut(batch)
    assert type(found) is kind
    assert len(found["x"]) == len(found["y"]) == 2
    assert len(batch["x"]) == 5
    assert getattr(found, "kind", "fast") == "fast"


def test_read_only_mappings_and_dataclasses_are_cut():
    assert len(cut(MappingProxyType({"x": numbered(5)}))["x"]) == 2
    found = cut(Frozen(numbered(5), "a"))
    assert (type(found), len(found.x), found.note) == (Frozen, 2, "a")


def test_what_is_no_row_is_handed_on_whole():
    table = numbered(3, 2)
    batch = {
        "x": numbered(5, 2),
        "y": numbered(5),
        "table": table,
        "size": torch.tensor(7),
        "name": "hello",
        "none": None,
        "lr": 0.1,
        "shape": torch.Size([5, 2]),
    }
    found = cut(batch)
    assert found["table"] is table
    assert {key: found[key] for key in ("size", "name", "none", "lr", "shape")} == {
        key: batch[key] for key in ("size", "name", "none", "lr", "shape")
    }


def test_lists_of_objects_with_an_entry_per_row_are_cut():
    batch = {"x": numbered(5, 2), "text": list("abcde"), "pair": ["left", "right"], "nested": {"ids": tuple(range(5))}}
    found = cut(batch)
    assert (found["text"], found["pair"], found["nested"]["ids"]) == (["c", "d"], ["left", "right"], (2, 3))


def test_boxes_per_image_go_with_their_image():
    targets = [{"boxes": numbered(count, 4), "labels": numbered(count)} for count in (3, 1, 3, 3, 2)]
    images, found = cut((numbered(5, 3, 8, 8), targets))
    assert len(images) == 2
    assert found == targets[2:4]


def test_ragged_lists_of_tensors_go_with_their_rows():
    ragged = [numbered(count) for count in (7, 3, 9, 2, 4)]
    _, found = cut((numbered(5, 2), ragged))
    assert all(one is other for one, other in zip(found, ragged[2:4], strict=True))


def test_nested_structures_are_cut_within():
    found = cut(({"ids": numbered(5, 2), "deep": (numbered(5), [numbered(5), numbered(5)])}, numbered(5)))
    assert {len(tensor) for tensor in tensors_of(found)} == {2}


def test_batches_without_tensors_are_cut():
    assert cut(["a", "b", "c", "d", "e"]) == ["c", "d"]
    assert cut({"text": list("abcde"), "label": [0, 1, 2, 3, 4]}) == {"text": ["c", "d"], "label": [2, 3]}
    assert len(cut(np.zeros((5, 2)))) == 2
    assert cut([{"text": letter} for letter in "abcde"]) == [{"text": "c"}, {"text": "d"}]


def test_sparse_batches_are_cut():
    batch = torch.eye(5).to_sparse()
    assert torch.equal(cut(batch).to_dense(), torch.eye(5)[2:4])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (None, "NoneType"),
        ("text", "str"),
        ({"a": 1, "b": torch.tensor(1.0)}, r"'b': Tensor\(\)"),
        ((), r"tuple\(\)"),
        (torch.ones(0, 3), "no rows"),
        ((torch.ones(9), torch.ones(4)), "what a row"),
        ([{"x": torch.ones(3)}, {"x": torch.ones(3)}], "Collate"),
        (torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]), "PackedSequence"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(batch, words):
    with pytest.raises(UsageError, match=words):
        count_rows(batch)


def test_a_pair_that_may_be_two_rows_is_not_guessed_at():
    batch = {"pair": ({"ids": numbered(2)}, {"ids": numbered(2)}), "y": numbered(2)}
    assert count_rows(batch) == 2
    with pytest.raises(UsageError, match="one entry per row"):
        take_rows(batch, 0, 1, 2)
    three = {"pair": ({"ids": numbered(3)}, {"ids": numbered(3)}), "y": numbered(3)}
    assert {len(tensor) for tensor in tensors_of(take_rows(three, 0, 1, 3))} == {1}


def test_inputs_and_targets_in_a_pair_of_two_rows_are_a_structure():
    found = take_rows([{"x": numbered(2, 3)}, {"y": numbered(2)}], 1, 2, 2)
    assert torch.equal(found[0]["x"], numbered(2, 3)[1:])
    assert torch.equal(found[1]["y"], numbered(2)[1:])


def test_the_whole_batch_keeps_its_tensors_in_containers_of_its_own():
    batch = {"x": numbered(5), "inner": {"y": [1, 2]}}
    found = same_rows(batch)
    assert found["x"] is batch["x"]
    found["inner"].pop("y")
    assert batch["inner"] == {"y": [1, 2]}


@given(st.integers(3, 40), st.data())
def test_pieces_put_together_are_the_batch(rows, data):
    inside = sorted(data.draw(st.sets(st.integers(1, rows - 1), max_size=4)))
    ends = [0, *inside, rows]
    batch = {"x": numbered(rows, 2), "text": [str(i) for i in range(rows)], "y": (numbered(rows), np.arange(rows))}
    parts = [take_rows(batch, start, stop, rows) for start, stop in pairwise(ends)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert [text for part in parts for text in part["text"]] == batch["text"]
    assert np.array_equal(np.concatenate([part["y"][1] for part in parts]), batch["y"][1])
