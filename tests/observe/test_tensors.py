import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from counted import Operations
from streams import INF, NAN
from surefoot.observe.tensors import (
    _IN_CACHE,
    TensorMeter,
    TensorStatistics,
    _few_at_a_time,
    _measure_anywhere,
    _measure_cpu,
    combine_shards,
    dense_views,
    total_norm,
)

REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]
WAYS = [_measure_cpu, _measure_anywhere]
both_ways = pytest.mark.parametrize("measure", WAYS, ids=["cpu", "anywhere"])
every_dtype = pytest.mark.parametrize("dtype", REAL, ids=str)


def reference(tensor):
    """Norm, largest and non-finite count in float64."""
    dense = tensor.detach().to_dense()
    flat = torch.view_as_real(dense) if dense.is_complex() else dense
    values = flat.double().numpy().ravel()
    finite = np.isfinite(values)
    largest = np.abs(values[finite]).max(initial=0.0)
    unit = largest or 1.0
    norm = np.linalg.norm(values / unit) * unit if finite.all() else NAN
    return norm, largest, np.sum(~finite)


def assert_measured(found, tensors, rtol=1e-6):
    expected = [reference(tensor) for tensor in tensors]
    for column, wanted in zip(found, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(column.double(), wanted, rtol=rtol)


@both_ways
@every_dtype
def test_norm_largest_and_count_are_those_of_float64(measure, dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in [(), (1,), (7,), (33, 5), (2, 3, 4, 5)]]
    assert_measured(measure(tensors), tensors)


@both_ways
def test_several_dtypes_are_measured_together(measure):
    torch.manual_seed(1)
    tensors = [torch.randn(17).to(dtype) for dtype in REAL]
    found = measure(tensors)
    assert_measured(found, tensors)
    assert {column.dtype for column in found} == {torch.float64}
    assert {column.dtype for column in measure(tensors[2:])} == {torch.float32}


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_tensors_are_measured_part_by_part(dtype):
    tensor = torch.randn(9, dtype=dtype)
    assert_measured(TensorMeter().measure([tensor]), [tensor])
    tensor[3] = complex(NAN, INF)
    assert TensorMeter().measure([tensor]).nonfinite.item() == 2


@both_ways
@every_dtype
def test_an_empty_tensor_measures_0(measure, dtype):
    found = measure([torch.empty(0, dtype=dtype), torch.ones(4, dtype=dtype), torch.empty(3, 0, dtype=dtype)])
    assert [column.tolist() for column in found] == [[0.0, 2.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@both_ways
@every_dtype
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_broken_entries_are_counted_and_largest_sees_the_others(measure, dtype, bad):
    tensor = torch.tensor([1.0, bad, -3.0, bad, 2.0], dtype=dtype)
    healthy = torch.tensor([3.0, 4.0], dtype=dtype)
    norm, largest, nonfinite = measure([tensor, healthy])
    assert norm[0].isnan()
    assert norm[1] == 5.0
    assert largest.tolist() == [3.0, 4.0]
    assert nonfinite.tolist() == [2.0, 0.0]


@both_ways
def test_a_tensor_of_nothing_but_nan_has_no_largest(measure):
    found = measure([torch.full((3,), NAN)])
    assert found.norm.isnan().all()
    assert found.largest.item() == 0.0
    assert found.nonfinite.item() == 3


@both_ways
@pytest.mark.parametrize("value", [1e20, 1e30, 1e38])
def test_squares_beyond_fp32_do_not_overflow_the_norm(measure, value):
    tensors = [torch.full((9,), value), torch.ones(4)]
    assert_measured(measure(tensors), tensors)


@both_ways
@every_dtype
def test_only_a_tensor_of_zeros_has_the_norm_0(measure, dtype):
    tensors = [torch.full((9,), torch.finfo(dtype).tiny, dtype=dtype), torch.zeros(9, dtype=dtype), torch.ones(4)]
    found = measure(tensors)
    assert_measured(found, tensors, rtol=1e-3)
    assert (found.norm == 0).tolist() == [False, True, False]


def test_without_the_largest_value_one_operation_reads_the_tensors_and_the_rest_is_the_same():
    tensors = [torch.randn(4, 5), torch.zeros(3), torch.tensor([1.0, NAN, INF]), torch.full((9,), 1e30)]
    whole = TensorMeter().measure(tensors)
    with Operations() as run:
        found = TensorMeter().measure_views(tensors, needs_largest=False)
    assert found.largest is None
    assert torch.equal(found.norm.nan_to_num(-1.0), whole.norm.nan_to_num(-1.0))
    assert torch.equal(found.nonfinite, whole.nonfinite)
    assert not any("aminmax" in name for name in run.names)
    assert found.rescaled(torch.tensor(2.0)).largest is None


@both_ways
def test_a_norm_beyond_fp32_itself_is_inf_and_no_entry_is_called_broken(measure):
    found = measure([torch.full((100,), 3e38)])
    assert found.norm.item() == INF
    assert found.nonfinite.item() == 0
    assert found.largest.item() == pytest.approx(3e38)


@both_ways
def test_half_precision_is_squared_in_fp32(measure):
    tensors = [torch.full((10_000,), 300.0, dtype=torch.float16), torch.full((10_000,), 300.0, dtype=torch.bfloat16)]
    assert_measured(measure(tensors), tensors)


@both_ways
def test_the_way_a_tensor_lies_in_memory_changes_nothing(measure):
    torch.manual_seed(2)
    image = torch.randn(2, 3, 5, 5)
    tensors = [
        image,
        image.to(memory_format=torch.channels_last),
        image.transpose(0, 3),
        image[:, :, ::2, 1:],
        image.expand(4, 2, 3, 5, 5),
    ]
    assert not any(tensor.is_contiguous() for tensor in tensors[1:])
    assert_measured(measure(tensors), tensors)


def test_a_sparse_tensor_is_measured_by_its_values():
    indices = torch.tensor([[0, 2, 0], [1, 0, 1]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4.0, 0.0]), (3, 2), check_invariants=True).coalesce()
    assert_measured(TensorMeter().measure([sparse, torch.ones(2)]), [sparse, torch.ones(2)])
    assert dense_views([sparse])[0].shape == (2,)


entries = st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([0.0, NAN, INF, -INF, 1e20, -1e25, 1e30, 1e-10]))


@given(st.lists(st.lists(entries, max_size=6), min_size=1, max_size=5))
def test_both_ways_agree_on_any_values(rows):
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    cpu, anywhere = _measure_cpu(tensors), _measure_anywhere(tensors)
    np.testing.assert_allclose(cpu.norm, anywhere.norm, rtol=1e-5, atol=1e-18)
    np.testing.assert_array_equal(cpu.largest, anywhere.largest)
    np.testing.assert_array_equal(cpu.nonfinite, anywhere.nonfinite)


def test_large_tensors_are_measured_in_parts_with_the_same_bits_and_in_their_order():
    sizes = [3, _IN_CACHE + 1, 5, 7, _IN_CACHE // 2, _IN_CACHE // 2, 0, 2]
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    tensors[3][1] = NAN
    assert [len(few) for few in _few_at_a_time(tensors)] == [2, 4, 2]
    found = TensorMeter().measure(tensors)
    whole = torch.stack(torch._foreach_norm(tensors, 2))  # what `clip_grad_norm_` calls
    assert torch.equal(found.norm[[0, 1, 2, 4, 5, 6, 7]], whole[[0, 1, 2, 4, 5, 6, 7]])
    assert found.nonfinite.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert found.largest.tolist() == [float(each.nan_to_num(0).abs().max()) if len(each) else 0 for each in tensors]


def test_measuring_changes_nothing():
    tensors = [torch.tensor([1.0, NAN]), torch.full((3,), 1e30)]
    before = [tensor.clone() for tensor in tensors]
    TensorMeter().measure(tensors)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())


@given(st.lists(st.floats(0, 1e3, width=32), min_size=1, max_size=10))
def test_the_total_norm_is_the_norm_of_the_norms(norms):
    assert total_norm(torch.tensor(norms)).item() == pytest.approx(np.linalg.norm(norms), rel=1e-6, abs=1e-18)


@pytest.mark.parametrize(
    ("norms", "expected"),
    [([3e30, 4e30], 5e30), ([3e38, 3e38], INF), ([1.0, NAN], NAN), ([1.0, INF], INF), ([0.0, 0.0], 0.0)],
)
def test_the_total_norm_overflows_only_where_fp32_does(norms, expected):
    assert total_norm(torch.tensor(norms)).item() == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_statistics_scale_with_their_tensors():
    tensors = [torch.tensor([3.0, -4.0]), torch.tensor([1.0, NAN])]
    found = TensorMeter().measure(tensors).rescaled(torch.tensor(0.5))
    assert isinstance(found, TensorStatistics)
    assert_measured(found, [tensor / 2 for tensor in tensors])


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_plain_gradients_need_no_collective():
    gradients = [torch.ones(2), torch.ones(3)]
    local = TensorMeter().measure(gradients)
    assert combine_shards(local, gradients) is local


def test_a_shard_that_is_the_whole_gives_the_same_statistics(mesh):
    plain = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, float("nan")]), torch.tensor([2.0])]
    sharded = [
        distribute_tensor(plain[0], mesh, [Shard(0)]),
        distribute_tensor(plain[1], mesh, [Replicate()]),
        plain[2],
    ]
    local = TensorMeter().measure(sharded)
    whole = combine_shards(local, sharded)
    assert torch.allclose(whole.norm, torch.tensor([5.0, torch.nan, 2.0]), equal_nan=True)
    assert whole.largest[0] == 4.0
    assert whole.nonfinite.tolist() == [0.0, 1.0, 0.0]
