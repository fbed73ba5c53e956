"""What is known of the error that ended a script, from the frames it went through."""

import os

import pytest
import torch
from torch.nn import functional as F

from surefoot.watch.crash import describe_crash, without_frames


def crash_of(work):
    with pytest.raises(Exception) as caught:
        work()
    return describe_crash(caught.value)


def test_the_place_is_the_innermost_line_of_the_users():
    def train():
        torch.ones(2, 3) @ torch.ones(2, 3)

    found = crash_of(train)
    assert (found.type, found.function) == ("RuntimeError", "train")
    assert found.site == f"{os.path.relpath(__file__)}:{train.__code__.co_firstlineno + 1}"


def test_the_tensors_of_the_call_that_failed_are_described():
    logits, labels = torch.zeros(4, 3), torch.tensor([0, 2, -1, 5])
    found = crash_of(lambda: F.cross_entropy(logits, labels))
    assert found.call == "cross_entropy"
    assert found.arguments is not None
    assert found.arguments.input.shape == [4, 3]
    assert (found.arguments.target.min, found.arguments.target.max) == (-1, 5)
    assert found.arguments.ignore_index == -100


def test_an_embedding_that_is_too_small_is_known_by_its_weight_and_ids():
    table = torch.nn.Embedding(3, 2)
    found = crash_of(lambda: table(torch.tensor([1, 7])))
    assert (found.type, found.call) == ("IndexError", "embedding")
    assert found.arguments.weight.shape == [3, 2]
    assert found.arguments.input.max == 7


def test_without_a_call_that_is_known_the_tensors_of_the_users_frame_are_described():
    def train():
        batch = torch.full((2, 2), 4.0)
        name = "not a tensor"
        raise ValueError(f"{name}: {batch.shape}")

    found = crash_of(train)
    assert set(found.locals) == {"batch"}
    assert found.locals["batch"].max == 4.0
    assert found.call is None


def test_a_function_of_the_users_with_the_name_of_a_loss_is_not_taken_for_torchs():
    def cross_entropy(input):
        raise ValueError("mine")

    found = crash_of(lambda: cross_entropy(torch.ones(2)))
    assert (found.call, found.function) == (None, "cross_entropy")
    assert found.locals["input"].shape == [2]


def test_a_message_of_any_length_is_cut():
    found = without_frames(KeyError("x" * 5_000))
    assert (found.type, len(found.message), found.site) == ("KeyError", 2_000, None)
