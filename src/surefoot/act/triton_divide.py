"""Divides any number of CUDA tensors in place by a number on the device; dividing by 1 costs almost nothing.

A fixed number of programs share the blocks of all tensors. Each reads the divisor first and ends there if it is 1 or if
the step is skipped, so a step that is not clipped costs one launch of a few microseconds and no pass over the memory.

The arithmetic is that of torch's fused optimizers, which divide by `grad_scale` in float64 and round to fp32: the bits
are the same whichever of the two divides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from surefoot.core.block_tables import LANES, LOOPS
from surefoot.core.device import device_context

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.core.block_tables import BlockTables

PROGRAMS = 2048
"""The number of programs that share the blocks: enough to fill any GPU, few enough to end quickly."""


@triton.jit  # type: ignore[untyped-decorator]
def _divide_kernel(  # type: ignore[no-untyped-def]
    addresses,
    sizes,
    block_tensor,
    block_start,
    divisor,
    skip,
    blocks,
    ALIGNED: tl.constexpr,  # noqa: N803 (Triton's own convention for compile-time values)
    LANES: tl.constexpr,  # noqa: N803
    LOOPS: tl.constexpr,  # noqa: N803
):
    by = tl.load(divisor)
    if (by != 1.0) & (tl.load(skip) == 0):
        wide = by.to(tl.float64)
        lanes = tl.arange(0, LANES)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            tensor = tl.load(block_tensor + block)
            start = tl.multiple_of(tl.load(block_start + block), LANES)
            size = tl.load(sizes + tensor)
            base = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32))
            if ALIGNED:
                base = tl.multiple_of(base, 16)
            if start + LANES * LOOPS <= size:  # a full block needs no mask, and only then are loads 16 bytes wide
                for loop in range(LOOPS):
                    places = base + start + loop * LANES + lanes
                    tl.store(places, (tl.load(places).to(tl.float64) / wide).to(tl.float32))
            else:
                for loop in range(LOOPS):
                    offsets = start + loop * LANES + lanes
                    inside = offsets < size
                    values = tl.load(base + offsets, mask=inside, other=0.0)
                    tl.store(base + offsets, (values.to(tl.float64) / wide).to(tl.float32), mask=inside)


def divide(tables: BlockTables, divisor: Tensor, skip: Tensor) -> None:
    """Divide the fp32 tensors of the tables by `divisor`, unless `skip` (one byte) is set. Does not wait."""
    if not tables.blocks:
        return
    with device_context(tables.device):
        _divide_kernel[(min(tables.blocks, PROGRAMS),)](
            tables.address_tables[0],
            tables.sizes_table,
            tables.block_tensor,
            tables.block_start,
            divisor,
            skip,
            tables.blocks,
            ALIGNED=tables.aligned,
            LANES=LANES,
            LOOPS=LOOPS,
            num_warps=8,
        )
