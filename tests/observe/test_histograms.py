"""Histograms against the plain definition of the bins, for every kind of tensor there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from histogram_bins import bin_of
from surefoot.observe.histograms import SAMPLE, Bins, count, take_sample, thinned
from surefoot.record.bins import COUNT, LARGEST_POWER, SMALLEST_POWER, ZERO

BINS = Bins(SMALLEST_POWER, LARGEST_POWER)


def counted(*tensors, divide=None):
    return count([take_sample(tensor) for tensor in tensors], BINS, divide).tolist()


def reference(values):
    """Counted one by one, in float64."""
    row = [0] * (COUNT + 3)
    for value in np.asarray(values, dtype=np.float64).ravel().tolist():
        place = bin_of(value)
        if place is not None:
            row[place] += 1
        else:
            row[COUNT + (0 if math.isnan(value) else 1 if value > 0 else 2)] += 1
    return row


def test_the_bins_are_those_of_the_run_log():
    assert BINS.count == COUNT
    assert BINS.side == ZERO


shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


@settings(max_examples=150)
@given(
    st.lists(
        st.sampled_from([np.float16, np.float32, np.float64]).flatmap(lambda t: hnp.arrays(t, shapes)),
        min_size=1,
        max_size=5,
    )
)
def test_every_value_is_in_the_bin_its_definition_says(arrays):
    assert counted(*(torch.from_numpy(array) for array in arrays)) == [reference(array) for array in arrays]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_powers_of_two_and_their_neighbours_fall_where_the_edges_say(dtype):
    powers = torch.tensor([2.0**p for p in range(-140, 128)], dtype=torch.float64).to(dtype)
    ends = torch.tensor(
        [0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal]
    ).to(dtype)
    values = torch.cat([powers, ends, torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)])
    around = torch.cat([values, -values, values * (1 + torch.finfo(dtype).eps), values * (1 - torch.finfo(dtype).eps)])
    assert counted(around) == [reference(around.double().numpy())]


def test_subnormal_numbers_are_not_zeros():
    smallest = torch.tensor([1e-45, -1e-45, 1e-40], dtype=torch.float32)
    (row,) = counted(smallest)
    assert (row[ZERO - 1], row[ZERO], row[ZERO + 1]) == (1, 0, 2)


def test_subnormal_numbers_are_counted_even_where_arithmetic_flushes_them():
    values = torch.tensor([1e-40, 0.0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        (row,) = counted(values)
    finally:
        torch.set_flush_denormal(False)
    assert (row[ZERO], row[ZERO + 1]) == (1, 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(-70000, 70000, 997),
        torch.tensor([0, 1, 255], dtype=torch.uint8),
        torch.tensor([True, False, True]),
        torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1]),
        torch.empty(0),
        torch.empty(3, 0),
        torch.tensor(3.5),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(24.0).view(4, 6)[1:, ::2],
        torch.tensor([[1.5], [-2.0]]).expand(2, 5),
        torch.arange(16.0).view(1, 4, 2, 2).to(memory_format=torch.channels_last),
        nn.Parameter(torch.linspace(-3, 3, 50)),
        torch.linspace(-3, 3, 50).to(torch.float8_e4m3fn),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{tuple(t.stride())}",
)
def test_whatever_its_type_and_layout_every_value_counts(tensor):
    assert counted(tensor) == [reference(tensor.detach().double().numpy())]


def test_complex_values_are_judged_by_their_size():
    (row,) = counted(torch.tensor([3 + 4j, 0j, complex(math.nan, 0)]))
    assert row == reference([5.0, 0.0, math.nan])
    lazily_negative = torch.tensor([1 + 2j, -3 + 4j]).conj().imag
    assert lazily_negative.is_neg()
    assert counted(lazily_negative) == [reference([-2.0, -4.0])]


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_tensor_is_judged_by_what_it_stores(layout):
    dense = torch.tensor([[0.0, 2.0], [math.inf, 0.0]])
    sparse = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    assert counted(sparse) == [reference([2.0, math.inf])]


class Tagged(torch.Tensor):
    pass


def test_a_subclass_with_memory_of_its_own_is_counted_and_a_wrapper_is_left_out():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert counted(torch.tensor([1.0, 2.0]).as_subclass(Tagged)) == [reference([1.0, 2.0])]
    with FakeTensorMode():
        fake = torch.empty(3)
    assert take_sample(fake) is None


def test_tensors_without_values_are_left_out():
    assert take_sample(torch.empty(3, device="meta")) is None
    assert take_sample(nn.LazyLinear(3).weight) is None
    assert take_sample(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)) is None


def test_a_large_tensor_is_sampled_but_what_is_broken_is_counted_in_full():
    values = torch.randn(300, 200)
    values.view(-1)[torch.arange(0, 60_000, 1000) + 1] = math.nan
    values[7, :5] = math.inf
    values[8, :3] = -math.inf
    (row,) = counted(values)
    assert row[COUNT:] == [int(values.isnan().sum()), 5, 3]
    assert SAMPLE / 3 < sum(row[:COUNT]) <= SAMPLE
    exact = np.array(reference(values.numpy())[:COUNT]) / values.numel()
    assert np.abs(np.array(row[:COUNT]) / sum(row[:COUNT]) - exact).max() < 0.02


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 200))
def test_the_sample_of_a_matrix_visits_every_column(rows, columns, most):
    flat = torch.arange(rows * columns)
    some = thinned(flat, most)
    assert some.numel() <= most or flat.numel() <= most
    if some.numel() >= columns:
        assert len(set((some % columns).tolist())) == columns


def test_gradients_are_divided_by_the_loss_scale_first():
    gradient = torch.tensor([65536.0, -3 * 65536.0, 0.0, math.inf])
    expected = [reference([1.0, -3.0, 0.0, math.inf])]
    assert counted(gradient, divide=65536.0) == expected
    assert counted(gradient, divide=torch.tensor(65536.0)) == expected


def test_many_tensors_are_counted_in_one_matrix_in_their_order():
    torch.manual_seed(0)
    tensors = [
        torch.randn(n, dtype=dtype) for n, dtype in zip(range(40), [torch.float32, torch.float64] * 20, strict=True)
    ]
    assert counted(*tensors) == [reference(tensor.numpy()) for tensor in tensors]


def test_looking_changes_neither_the_tensor_nor_its_graph_nor_random_numbers():
    torch.manual_seed(0)
    random = torch.get_rng_state()
    leaf = torch.randn(100, 400).requires_grad_()
    torch.set_rng_state(random)
    out = leaf * 2
    version = out._version
    sample = take_sample(out)
    assert torch.equal(torch.get_rng_state(), random)
    assert out._version == version
    assert not sample.values.requires_grad
    out.mul_(0)
    assert sample.values.abs().max() > 0, "a copy, so that what happens next does not matter"


def test_deterministic_algorithms_allow_counting():
    torch.use_deterministic_algorithms(True)
    try:
        assert counted(torch.ones(5)) == [reference(np.ones(5))]
    finally:
        torch.use_deterministic_algorithms(False)
