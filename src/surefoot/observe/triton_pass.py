"""One pass over any number of CUDA tensors: sum of squares, largest value, non-finite count of each.

A table lists the blocks of all tensors; each program reads one block once and keeps three running values per lane, so
the cost is one read of the memory. A second, tiny kernel adds the blocks of each tensor up.

Squares are kept in two ranges, as they are and multiplied by 2^-160, so that finite values up to the largest fp32
number give a finite sum. The tables are rebuilt only when the tensors have moved or changed; uploading them is an
asynchronous copy from pinned memory, so nothing here waits for the device.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.core.block_tables import LANES, LOOPS, BlockTables, all_dense, is_dense
from surefoot.core.device import device_context
from surefoot.core.device_copies import upload
from surefoot.observe.tensors import TensorStatistics

_dtype = attrgetter("dtype")
_DTYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def take_in(values, sum_plain, sum_small, top, bad):  # type: ignore[no-untyped-def]
    """Add one vector of values to the running sums."""
    magnitude = tl.abs(values.to(tl.float32))
    finite = magnitude <= 3.4028234663852886e38  # false for NaN too
    magnitude = tl.where(finite, magnitude, 0.0)
    reduced = magnitude * 8.271806125530277e-25  # 2^-80
    sum_plain += magnitude * magnitude
    sum_small += reduced * reduced
    return sum_plain, sum_small, tl.maximum(top, magnitude), bad + tl.where(finite, 0, 1)


@triton.jit
def sum_of_squares(sum_plain, sum_small):  # type: ignore[no-untyped-def]
    """The sum over all lanes, from the range in which it has not overflowed."""
    plain = tl.sum(sum_plain, 0)
    small = tl.sum(sum_small, 0).to(tl.float64) * 1.461501637330903e48  # 2^160
    return tl.where(plain > 3.4028234663852886e38, small, plain.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _blocks_kernel(  # type: ignore[no-untyped-def]
    pointers,
    sizes,
    block_tensor,
    block_start,
    squares,
    largest,
    nonfinite,
    DTYPE: tl.constexpr,  # noqa: N803 (Triton's own convention for compile-time values)
    ALIGNED: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    LOOPS: tl.constexpr,  # noqa: N803
):
    block = tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    start = tl.multiple_of(tl.load(block_start + block), LANES)
    size = tl.load(sizes + tensor)
    base = tl.load(pointers + tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    lanes = tl.arange(0, LANES)
    sum_plain = tl.zeros([LANES], tl.float32)
    sum_small = tl.zeros([LANES], tl.float32)
    top = tl.zeros([LANES], tl.float32)
    bad = tl.zeros([LANES], tl.int32)
    if start + LANES * LOOPS <= size:  # a full block needs no mask, and only then are loads 16 bytes wide
        for loop in range(LOOPS):
            values = tl.load(base + start + loop * LANES + lanes)
            sum_plain, sum_small, top, bad = take_in(values, sum_plain, sum_small, top, bad)
    else:
        for loop in range(LOOPS):
            offsets = start + loop * LANES + lanes
            values = tl.load(base + offsets, mask=offsets < size, other=0.0)
            sum_plain, sum_small, top, bad = take_in(values, sum_plain, sum_small, top, bad)
    tl.store(squares + block, sum_of_squares(sum_plain, sum_small))
    tl.store(largest + block, tl.max(top, 0))
    tl.store(nonfinite + block, tl.sum(bad, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _tensors_kernel(  # type: ignore[no-untyped-def]
    squares,
    largest,
    nonfinite,
    first_block,
    out,
    count,
    WIDTH: tl.constexpr,  # noqa: N803
):
    tensor = tl.program_id(0)
    start = tl.load(first_block + tensor)
    end = tl.load(first_block + tensor + 1)
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float64)
    top = tl.zeros([WIDTH], tl.float32)
    bad = tl.zeros([WIDTH], tl.int64)
    for begin in range(start, end, WIDTH):
        mask = begin + lanes < end
        total += tl.load(squares + begin + lanes, mask=mask, other=0.0)
        top = tl.maximum(top, tl.load(largest + begin + lanes, mask=mask, other=0.0))
        bad += tl.load(nonfinite + begin + lanes, mask=mask, other=0).to(tl.int64)
    count_bad = tl.sum(bad, 0)
    norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    tl.store(out + tensor, tl.where(count_bad > 0, float("nan"), norm))
    tl.store(out + count + tensor, tl.max(top, 0))
    tl.store(out + 2 * count + tensor, count_bad.to(tl.float32))


MOST_TABLES = 8
"""The number of lists of tensors whose tables are kept: some steps may have gradients for a part of a model only."""


class PlacedTensors(NamedTuple):
    """Dense tensors of one dtype whose addresses are known to the device. `measure` only launches kernels.

    It can be recorded into a CUDA graph, which measures the tensors that are placed when it is replayed.
    """

    tables: BlockTables
    dtype: torch.dtype

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for tensors that one recording can measure."""
        return id(self.tables), self.dtype, self.tables.aligned

    def measure(self) -> TensorStatistics:
        """The statistics of each tensor, in their order."""
        return TensorStatistics(*_launch(self.tables, self.dtype).unbind(0))


class TritonPass:
    """Measures lists of CUDA tensors, keeping the tables of the last few lists."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, ...], BlockTables] = {}

    def place(self, views: list[Tensor]) -> PlacedTensors | None:
        """Prepare tensors to be measured where they are; `None` if they have gaps, or several or other dtypes."""
        dtypes = set(map(_dtype, views))
        if len(dtypes) > 1 or not dtypes <= _DTYPES.keys():
            return None
        if not all(map(Tensor.is_contiguous, views)) and not all_dense(views):
            return None
        return self._placed(views)

    def measure(self, views: list[Tensor]) -> TensorStatistics | None:
        """The statistics of each tensor, in the order given; `None` if a dtype is not supported."""
        if (placed := self.place(views)) is not None:
            return placed.measure()
        groups: dict[torch.dtype, list[int]] = {}
        for i, view in enumerate(views):
            groups.setdefault(view.dtype, []).append(i)
        if not groups.keys() <= _DTYPES.keys():
            return None
        results = [self._measure_group([views[i] for i in members]) for members in groups.values()]
        order = [i for members in groups.values() for i in members]
        back = upload([order.index(i) for i in range(len(order))], views[0].device)
        return TensorStatistics(*torch.cat(results, dim=1)[:, back].unbind(0))

    def _measure_group(self, views: list[Tensor]) -> Tensor:
        placed = self._placed([view if is_dense(view) else view.contiguous() for view in views])
        return _launch(placed.tables, placed.dtype)

    def _placed(self, views: list[Tensor]) -> PlacedTensors:
        sizes, device, dtype = list(map(Tensor.numel, views)), views[0].device, views[0].dtype
        key = device, dtype, *sizes
        tables = self._tables.get(key)
        if tables is None:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            tables = self._tables[key] = BlockTables(sizes, device)
        tables.place(list(map(Tensor.data_ptr, views)))
        return PlacedTensors(tables, dtype)


def _launch(tables: BlockTables, dtype: torch.dtype) -> Tensor:
    count, device = len(tables.sizes), tables.device
    out = torch.empty(3, count, dtype=torch.float32, device=device)
    blocks = max(tables.blocks, 1)
    squares = torch.empty(blocks, dtype=torch.float64, device=device)
    largest = torch.empty(blocks, dtype=torch.float32, device=device)
    nonfinite = torch.empty(blocks, dtype=torch.int32, device=device)
    with device_context(device):
        if tables.blocks:
            _blocks_kernel[(tables.blocks,)](
                tables.address_tables[0],
                tables.sizes_table,
                tables.block_tensor,
                tables.block_start,
                squares,
                largest,
                nonfinite,
                DTYPE=_DTYPES[dtype],
                ALIGNED=tables.aligned,
                LANES=LANES,
                LOOPS=LOOPS,
                num_warps=8,
            )
        _tensors_kernel[(count,)](squares, largest, nonfinite, tables.first_block, out, count, WIDTH=1024)
    return out
