"""Fingerprints of tensors: equal bits give equal numbers, one other bit another number, and nothing is rounded."""

import pytest
import torch

from counted import Operations
from surefoot.observe.fingerprints import fingerprint, fingerprints

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


def some(dtype, size=1000):
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(3))
    return (numbers > 0) if dtype is torch.bool else numbers.to(dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_copy_has_the_same_fingerprint_and_a_changed_element_another(dtype):
    tensor = some(dtype)
    changed = tensor.clone()
    changed[417] = not changed[417] if dtype is torch.bool else changed[417] + 1
    assert fingerprint(tensor).item() == fingerprint(tensor.clone()).item()
    assert fingerprint(tensor).item() != fingerprint(changed).item()


@pytest.mark.parametrize("size", [1, 7, 65_536, 65_537, 200_001, (1 << 22) + 5])
def test_the_last_bit_of_any_element_counts(size):
    tensor = torch.ones(size)
    before = fingerprint(tensor).item()
    for place in {0, size // 2, size - 1}:
        tensor[place] = torch.nextafter(tensor[place], torch.tensor(2.0))
        assert fingerprint(tensor).item() != before
        tensor[place] = 1.0
    assert fingerprint(tensor).item() == before


def test_the_place_of_a_value_counts():
    tensor = some(torch.float32)
    swapped = tensor.clone()
    swapped[[3, 700]] = tensor[[700, 3]]
    assert fingerprint(swapped).item() != fingerprint(tensor).item()


def test_it_does_not_matter_how_the_tensor_lies_in_memory():
    tensor = torch.randn(8, 3, 5, 5)
    assert fingerprint(tensor).item() == fingerprint(tensor.to(memory_format=torch.channels_last)).item()
    assert fingerprint(torch.stack([tensor, tensor], 1)[:, 0]).item() == fingerprint(tensor).item()


def test_nan_is_equal_to_itself_and_zero_differs_from_minus_zero():
    bad = torch.tensor([1.0, float("nan")])
    assert fingerprint(bad).item() == fingerprint(bad.clone()).item()
    assert fingerprint(torch.tensor([0.0])).item() != fingerprint(torch.tensor([-0.0])).item()


def test_it_is_the_sum_of_weighted_words_modulo_two_to_the_64():
    tensor = some(torch.float32, 300)
    state, total = 1, 0
    for word in tensor.view(torch.int32).tolist():
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        total = (total + word * ((state ^ (state >> 33)) | 1)) % (1 << 64)
    assert fingerprint(tensor).item() % (1 << 64) == total


def test_what_cannot_be_compared_counts_as_nothing():
    sparse = torch.eye(3).to_sparse()
    gone = torch.ones(4)
    gone.untyped_storage().resize_(0)
    found = fingerprints([None, sparse, gone, torch.empty(0), torch.ones(2)], torch.device("cpu"))
    assert found[:4].tolist() == [0, 0, 0, 0]
    assert found[4] != 0
    assert fingerprints([], torch.device("cpu")).tolist() == []


def test_no_random_number_is_drawn():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    fingerprint(torch.ones(100_000))
    assert torch.equal(before, torch.get_rng_state())


def test_a_tensor_takes_one_product_and_one_sum():
    tensor = some(torch.float32)
    fingerprint(tensor)  # makes the weights
    with Operations() as done:
        fingerprint(tensor)
    passes = [name.split(".")[1] for name in done.names]
    assert [name for name in passes if name in ("mul", "sum", "_to_copy", "copy_")] == ["mul", "sum"]
