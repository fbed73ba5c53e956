"""One pass over any number of CUDA tensors: sum of squares, largest value, non-finite count of each.

A table lists the blocks of all tensors; each program reads one block once and keeps three running values per lane, so
the cost is one read of the memory. A second, tiny kernel adds the blocks of each tensor up.

Squares are kept in two ranges, as they are and multiplied by 2^-160, so that finite values up to the largest fp32
number give a finite sum. The tables are rebuilt only when the tensors have moved or changed; uploading them is an
asynchronous copy from pinned memory, so nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from surefoot.core.device import device_context, upload

if TYPE_CHECKING:
    from torch import Tensor

LANES = 2048
"""Elements a program looks at at once."""
LOOPS = 16
"""How often it does so: one block is LANES x LOOPS elements."""
BLOCK = LANES * LOOPS

_DTYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _take_in(values, sum_plain, sum_small, top, bad):  # type: ignore[no-untyped-def]
    """Add one vector of values to the running sums."""
    magnitude = tl.abs(values.to(tl.float32))
    finite = magnitude <= 3.4028234663852886e38  # false for NaN too
    magnitude = tl.where(finite, magnitude, 0.0)
    reduced = magnitude * 8.271806125530277e-25  # 2^-80
    sum_plain += magnitude * magnitude
    sum_small += reduced * reduced
    return sum_plain, sum_small, tl.maximum(top, magnitude), bad + tl.where(finite, 0, 1)


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
            sum_plain, sum_small, top, bad = _take_in(values, sum_plain, sum_small, top, bad)
    else:
        for loop in range(LOOPS):
            offsets = start + loop * LANES + lanes
            values = tl.load(base + offsets, mask=offsets < size, other=0.0)
            sum_plain, sum_small, top, bad = _take_in(values, sum_plain, sum_small, top, bad)
    plain = tl.sum(sum_plain, 0)
    small = tl.sum(sum_small, 0).to(tl.float64) * 1.461501637330903e48  # 2^160
    overflowed = plain > 3.4028234663852886e38
    tl.store(squares + block, tl.where(overflowed, small, plain.to(tl.float64)))
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
        self._plans: dict[tuple[torch.device, torch.dtype], _Plan] = {}

    def can_measure(self, views: list[Tensor]) -> bool:
        """Whether every tensor has a dtype the kernel reads."""
        return all(view.dtype in _DTYPES for view in views)

    def measure(self, views: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, largest and non-finite count, in the order given."""
        groups: dict[torch.dtype, list[int]] = {}
        for i, view in enumerate(views):
            groups.setdefault(view.dtype, []).append(i)
        results = [self._measure_group(dtype, [views[i] for i in members]) for dtype, members in groups.items()]
        if len(results) == 1:
            norm, largest, nonfinite = results[0].unbind(0)
            return norm, largest, nonfinite
        order = [i for members in groups.values() for i in members]
        back = [order.index(i) for i in range(len(order))]
        norm, largest, nonfinite = torch.cat(results, dim=1)[:, upload(back, views[0].device)].unbind(0)
        return norm, largest, nonfinite

    def _measure_group(self, dtype: torch.dtype, views: list[Tensor]) -> Tensor:
        views = [view if _is_dense(view) else view.contiguous() for view in views]
        pointers = [view.data_ptr() for view in views]
        sizes = [view.numel() for view in views]
        key = (views[0].device, dtype)
        plan = self._plans.get(key)
        if plan is None or plan.sizes != sizes:
            plan = self._plans[key] = _Plan(sizes, views[0].device)
        return plan.launch(pointers, dtype)


class _Plan:
    """Launch tables for tensors of given sizes on one device."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        counts = [-(-size // BLOCK) for size in sizes]
        first = [0]
        for blocks in counts:
            first.append(first[-1] + blocks)
        self.blocks = first[-1]
        self.first_block = upload(first, device)
        self.sizes_table = upload(sizes, device)
        self.block_tensor = upload([i for i, blocks in enumerate(counts) for _ in range(blocks)], device)
        self.block_start = upload([b * BLOCK for blocks in counts for b in range(blocks)], device)
        self.pointers: list[int] = []
        self.pointer_table = self.sizes_table

    def launch(self, pointers: list[int], dtype: torch.dtype) -> Tensor:
        if pointers != self.pointers:
            self.pointers, self.pointer_table = pointers, upload(pointers, self.device)
        out = torch.empty(3, len(pointers), dtype=torch.float32, device=self.device)
        blocks = max(self.blocks, 1)
        squares = torch.empty(blocks, dtype=torch.float64, device=self.device)
        largest = torch.empty(blocks, dtype=torch.float32, device=self.device)
        nonfinite = torch.empty(blocks, dtype=torch.int32, device=self.device)
        with device_context(self.device):
            if self.blocks:
                _blocks_kernel[(self.blocks,)](
                    self.pointer_table,
                    self.sizes_table,
                    self.block_tensor,
                    self.block_start,
                    squares,
                    largest,
                    nonfinite,
                    DTYPE=_DTYPES[dtype],
                    ALIGNED=all(pointer % 16 == 0 for pointer in pointers),
                    LANES=LANES,
                    LOOPS=LOOPS,
                    num_warps=8,
                )
            _tensors_kernel[(len(pointers),)](
                squares, largest, nonfinite, self.first_block, out, len(pointers), WIDTH=1024
            )
        return out


def _is_dense(view: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps, in any order of dimensions."""
    if view.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
