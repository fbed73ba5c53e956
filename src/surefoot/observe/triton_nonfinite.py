"""NaN, +Inf and -Inf in a CUDA tensor, counted in one kernel instead of seven.

A sampled step needs this for hundreds of tensors, and the launches dominate the cost. Blocks without non-finite values,
usually all of them, write nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.core.device import device_context

LANES = 2048
LOOPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _broken_kernel(  # type: ignore[no-untyped-def]
    values,
    out,
    size,
    LANES: tl.constexpr,  # noqa: N803 (Triton's own convention for compile-time values)
    LOOPS: tl.constexpr,  # noqa: N803
):
    start = tl.program_id(0).to(tl.int64) * (LANES * LOOPS)
    nan = tl.zeros([LANES], tl.int32)
    above = tl.zeros([LANES], tl.int32)
    below = tl.zeros([LANES], tl.int32)
    for loop in range(LOOPS):
        places = start + loop * LANES + tl.arange(0, LANES)
        some = tl.load(values + places, mask=places < size, other=0.0)
        nan += (some != some).to(tl.int32)
        above += (some == float("inf")).to(tl.int32)
        below += (some == float("-inf")).to(tl.int32)
    if tl.sum(nan + above + below, 0) > 0:
        tl.atomic_add(out, tl.sum(nan, 0).to(tl.int64))
        tl.atomic_add(out + 1, tl.sum(above, 0).to(tl.int64))
        tl.atomic_add(out + 2, tl.sum(below, 0).to(tl.int64))


def count_broken(flat: Tensor) -> Tensor:
    """The three counts of a flat, contiguous tensor that is not empty."""
    out = torch.zeros(3, dtype=torch.int64, device=flat.device)
    with device_context(flat.device):
        _broken_kernel[(-(-flat.numel() // (LANES * LOOPS)),)](
            flat, out, flat.numel(), LANES=LANES, LOOPS=LOOPS, num_warps=8
        )
    return out
