"""Numbers about a batch: equal batches share their prints, labels and scales are right, bad data is noticed."""

import math

import pytest
import torch

from surefoot.watch.batch_numbers import BatchNumbers
from surefoot.watch.tensor_summary import fingerprints


def numbers(inputs, target=None, with_scales=True, most_rows=16):
    return BatchNumbers(inputs, target, with_scales, most_rows)


def test_equal_batches_share_their_prints_and_others_do_not():
    x, y = torch.randn(6, 40), torch.arange(6)
    first, same = numbers(x, y).as_fields(), numbers(x.clone(), y.clone()).as_fields()
    assert first == same
    other = x.clone()
    other[3, 7] += 1e-3
    assert numbers(other, y).as_fields()["input_print"] != first["input_print"]
    assert numbers(x.reshape(12, 20), y).as_fields()["input_print"] != first["input_print"]
    assert numbers(x, y.flip(0)).as_fields()["target_print"] != first["target_print"]


def test_rows_have_the_prints_that_are_recorded_of_model_calls():
    x = torch.randn(6, 40)
    assert numbers(x, most_rows=4).rows() == fingerprints(x, 4)
    assert numbers(x, most_rows=0).rows() == []
    assert numbers(torch.randn(6)).rows() == []


def test_labels_and_scales():
    assert numbers(None, torch.tensor([2, 0, 2, 1])).as_fields()["labels"] == {"2": 2, "0": 1, "1": 1}
    assert numbers(None, torch.tensor([1.0, 0.0])).as_fields()["labels"] == {"1": 1, "0": 1}
    fields = numbers(torch.tensor([[3.0, -5.0]]), torch.tensor([1.5, -4.0])).as_fields()
    assert fields["input_largest"] == 5.0
    assert (fields["target_mean"], fields["target_largest"]) == (-1.25, 4.0)
    assert "labels" not in fields
    assert numbers(None, torch.arange(100)).as_fields().keys() == {"target_print"}, "too many to be classes"
    assert numbers(torch.ones(2, 2), torch.arange(2), with_scales=False).as_fields().keys() == {
        "input_print",
        "target_print",
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["input", "target"])
def test_bad_data_is_noticed_wherever_it_is(bad, where):
    x, y = torch.randn(100, 100), torch.randn(100, 100)
    assert numbers(x, y).are_finite()
    (x if where == "input" else y)[70, 50] = bad
    found = numbers(x, y)
    assert not found.are_finite()
    largest = found.as_fields()[f"{where}_largest"]
    assert not math.isfinite(largest)


def test_equal_batches_with_nan_have_the_same_print():
    batch = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    first, same = numbers(batch).as_fields(), numbers(batch.clone()).as_fields()
    assert first["input_print"] == same["input_print"]
