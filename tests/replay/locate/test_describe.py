"""What a tensor holds, in a few numbers."""

import math

import pytest
import torch

from surefoot.replay.locate.describe import FINITE, Counts, count, describe, nonfinite_number, values_of


def test_values_that_are_not_finite_are_counted_by_kind():
    found = count(torch.tensor([1.0, math.nan, math.inf, math.inf, -math.inf]))
    assert found == Counts(1, 2, 1)
    assert found.total == 4
    assert str(found) == "1 NaN and 2 Inf and 1 -Inf"
    assert str(FINITE) == "none"


def test_a_sum_that_overflows_is_not_a_bad_value():
    assert count(torch.full((4,), 3e38)) == FINITE


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_all_kinds_of_tensors_can_be_asked():
    bad = torch.tensor([[0.0, math.nan]])
    assert count(bad.to_sparse()).nan == 1
    assert count(bad.to_sparse_csr()).nan == 1
    assert count(torch.complex(bad, bad)).nan == 2
    assert count(torch.tensor([math.nan]).to(torch.float8_e4m3fn)).nan == 1
    assert count(torch.ones(2, dtype=torch.int64)) == FINITE
    assert values_of(torch.empty(2, device="meta")) is None


def test_a_description_gives_range_zeros_and_subnormals():
    words = str(describe("arg 0", torch.tensor([0.0, 1e-40, 2.0, math.nan])))
    assert words == "arg 0 float32 [4] 0 .. 2 (1 NaN, 1 zero, 1 subnormal)"
    assert str(describe("ids", torch.tensor([3, 3]))) == "ids int64 [2] 3"


def test_plain_numbers():
    assert nonfinite_number(math.inf)
    assert nonfinite_number(complex(1, math.nan))
    assert not nonfinite_number(3)
