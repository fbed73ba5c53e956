"""One pass over any number of CUDA tensors: sum of squares, largest value, non-finite count of each.

A table lists the blocks of all tensors; each program reads one block once and keeps three running values per lane, so
the cost is one read of the memory. A second, tiny kernel adds the blocks of each tensor up.

Squares are kept in two ranges, as they are and multiplied by 2^-160, so that finite values up to the largest fp32
number give a finite sum. The tables are rebuilt only when the tensors have moved or changed; uploading them is an
asynchronous copy from pinned memory, so nothing here waits for the device.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.core.block_tables import LANES, LOOPS, BlockTables, all_dense, is_dense
from surefoot.core.device import device_context
from surefoot.core.device_copies import upload

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


class TritonPass:
    """Measures lists of CUDA tensors, keeping the tables of the last list of each dtype."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.device, torch.dtype], BlockTables] = {}
        self.tables: BlockTables | None = None
        """The tables of the tensors measured last, if all have one dtype and were read where they are."""

    def measure(self, views: list[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Norm, largest and non-finite count, in the order given; `None` if a dtype is not supported."""
        self.tables = None
        dtypes = set(map(_dtype, views))
        if not dtypes <= _DTYPES.keys():
            return None
        if len(dtypes) == 1:
            norm, largest, nonfinite = self._measure_group(views[0].dtype, views).unbind(0)
            return norm, largest, nonfinite
        groups: dict[torch.dtype, list[int]] = {}
        for i, view in enumerate(views):
            groups.setdefault(view.dtype, []).append(i)
        results = [self._measure_group(dtype, [views[i] for i in members]) for dtype, members in groups.items()]
        order = [i for members in groups.values() for i in members]
        self.tables, back = None, [order.index(i) for i in range(len(order))]
        norm, largest, nonfinite = torch.cat(results, dim=1)[:, upload(back, views[0].device)].unbind(0)
        return norm, largest, nonfinite

    def _measure_group(self, dtype: torch.dtype, views: list[Tensor]) -> Tensor:
        in_place = all(map(Tensor.is_contiguous, views)) or all_dense(views)
        if not in_place:
            views = [view if is_dense(view) else view.contiguous() for view in views]
        sizes = list(map(Tensor.numel, views))
        key = (views[0].device, dtype)
        tables = self._tables.get(key)
        if tables is None or tables.sizes != sizes:
            tables = self._tables[key] = BlockTables(sizes, views[0].device)
        tables.place(list(map(Tensor.data_ptr, views)))
        self.tables = tables if in_place else None
        return _launch(tables, dtype)


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
