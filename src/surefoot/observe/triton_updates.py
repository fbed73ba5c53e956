"""Norms of parameters before a step and of their changes, in one pass after it, without a copy of them.

The change by a fused Adam, AdamW or SGD follows from the state after the step. Adam moves a weight by the quotient of
its two moments, SGD by its momentum, or by the gradient; AdamW and SGD also shrink it by a share of itself. Adding that
to the weight and rounding, in the order in which the optimizer rounded, gives the previous weight, so that an update
too small to change a weight counts as none. Only if a step has moved a weight across a power of two may the result
differ by one unit in the last place of the weight. fp32 only: in bf16 the moments have lost too much precision.

A table lists the blocks of all tensors; each program reads one block of the parameter and of its state once. A second,
tiny kernel adds the blocks of each tensor up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from surefoot.core.block_tables import LANES, LOOPS
from surefoot.core.device import device_context
from surefoot.observe.triton_pass import sum_of_squares, take_in

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.core.block_tables import BlockTables


@triton.jit  # type: ignore[untyped-decorator]
def _step_of(first, second, rate, correction2, eps, ADAM: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """The amount that the optimizer has subtracted, without weight decay."""
    if ADAM:
        return rate * first / (tl.sqrt(second) / correction2 + eps)
    return rate * first


@triton.jit  # type: ignore[untyped-decorator]
def _settings_of(own, step, ADAM: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803 (as Triton writes them)
    """Rate and correction of the second moment at the step of a tensor, decay and eps; all in fp32."""
    rate = tl.load(own)
    correction2 = tl.full([], 1.0, tl.float64)
    if ADAM:
        count = tl.load(step.to(tl.pointer_type(tl.float32))).to(tl.float64)
        rate = rate / (1.0 - tl.exp(count * tl.load(own + 3)))
        correction2 = tl.sqrt(1.0 - tl.exp(count * tl.load(own + 4)))
    decay = tl.load(own + 1).to(tl.float32)
    eps = tl.load(own + 2).to(tl.float32)
    return rate.to(tl.float32), correction2.to(tl.float32), decay, eps


@triton.jit  # type: ignore[untyped-decorator]
def _base(addresses, tensor, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """The address of a tensor."""
    base = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit  # type: ignore[untyped-decorator]
def _read(base, offsets, size, full, OTHER: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Values of a tensor, `OTHER` after its end. A full block needs no mask, and only then are loads 16 bytes wide."""
    if full:  # noqa: SIM108 (Triton evaluates both sides of a ternary)
        values = tl.load(base + offsets)
    else:
        values = tl.load(base + offsets, mask=offsets < size, other=OTHER)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _blocks_kernel(  # type: ignore[no-untyped-def]
    parameters,
    firsts,
    seconds,
    steps,
    sizes,
    block_tensor,
    block_start,
    group_of,
    settings,
    found_inf,
    squares,
    nonfinite,
    blocks,
    ADAM: tl.constexpr,  # noqa: N803 (Triton's own convention for compile-time values)
    ALIGNED: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    LOOPS: tl.constexpr,  # noqa: N803
):
    block = tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    start = tl.multiple_of(tl.load(block_start + block), LANES)
    size = tl.load(sizes + tensor)
    weight_at = _base(parameters, tensor, ALIGNED)
    first_at = _base(firsts, tensor, ALIGNED)
    second_at = _base(seconds, tensor, ALIGNED)
    own = settings + tl.load(group_of + tensor) * 5
    rate, correction2, decay, eps = _settings_of(own, tl.load(steps + tensor), ADAM)
    applied = tl.load(found_inf) != 1.0
    lanes = tl.arange(0, LANES)
    zeros = tl.zeros([LANES], tl.float32)
    plain0, small0, top0, plain1, small1, top1 = zeros, zeros, zeros, zeros, zeros, zeros
    bad0 = tl.zeros([LANES], tl.int32)
    bad1 = tl.zeros([LANES], tl.int32)
    full = start + LANES * LOOPS <= size
    for loop in range(LOOPS):
        offsets = start + loop * LANES + lanes
        weight = _read(weight_at, offsets, size, full, 0.0)
        first = _read(first_at, offsets, size, full, 0.0)
        second = _read(second_at, offsets, size, full, 1.0) if ADAM else first
        step = _step_of(first, second, rate, correction2, eps, ADAM)
        shrunk = weight + step
        before = tl.where(applied, shrunk + shrunk * decay, weight)
        plain0, small0, top0, bad0 = take_in(before, plain0, small0, top0, bad0)
        plain1, small1, top1, bad1 = take_in(before - weight, plain1, small1, top1, bad1)
    tl.store(squares + block, sum_of_squares(plain0, small0))
    tl.store(squares + blocks + block, sum_of_squares(plain1, small1))
    tl.store(nonfinite + block, tl.sum(bad0, 0))
    tl.store(nonfinite + blocks + block, tl.sum(bad1, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _tensors_kernel(  # type: ignore[no-untyped-def]
    squares,
    nonfinite,
    first_block,
    out,
    count,
    blocks,
    WIDTH: tl.constexpr,  # noqa: N803
):
    tensor = tl.program_id(0)
    column = tl.program_id(1)
    start = tl.load(first_block + tensor)
    end = tl.load(first_block + tensor + 1)
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float64)
    bad = tl.zeros([WIDTH], tl.int32)
    for begin in range(start, end, WIDTH):
        mask = begin + lanes < end
        total += tl.load(squares + column * blocks + begin + lanes, mask=mask, other=0.0)
        bad += tl.load(nonfinite + column * blocks + begin + lanes, mask=mask, other=0)
    norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    tl.store(out + column * count + tensor, tl.where(tl.max(bad, 0) > 0, float("nan"), norm))


def measure_updates(
    tables: BlockTables, group_of: Tensor, settings: Tensor, found_inf: Tensor, *, adam: bool
) -> tuple[Tensor, Tensor]:
    """Norms of the parameters before the step and of their updates.

    Columns of the tables: parameter, first and second moment and step count for Adam; parameter and what was applied,
    three times, for SGD. A row of `settings` for each group: rate, decay, eps, and the logarithms of the two betas.
    """
    count, blocks, device = len(tables.sizes), max(tables.blocks, 1), tables.device
    out = torch.empty(2, count, dtype=torch.float32, device=device)
    squares = torch.empty(2, blocks, dtype=torch.float64, device=device)
    nonfinite = torch.empty(2, blocks, dtype=torch.int32, device=device)
    with device_context(device):
        if tables.blocks:
            _blocks_kernel[(tables.blocks,)](
                *tables.address_tables,
                tables.sizes_table,
                tables.block_tensor,
                tables.block_start,
                group_of,
                settings,
                found_inf,
                squares,
                nonfinite,
                blocks,
                ADAM=adam,
                ALIGNED=tables.aligned,
                LANES=LANES,
                LOOPS=LOOPS,
                num_warps=8,
            )
        _tensors_kernel[(count, 2)](squares, nonfinite, tables.first_block, out, count, blocks, WIDTH=256)
    return out[0], out[1]
