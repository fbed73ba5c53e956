"""Clipping on CUDA in a pass of its own: the same bits as in the fused kernel, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.act.clip_pass import WINDOW_STEPS, ClipPass
from surefoot.core.block_tables import BLOCK, BlockTables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
}
SHAPES = [(3,), (1000, 37), (0,), (64, 3, 7, 7), (BLOCK,), (), (2 * BLOCK + 5,), (33_000, 5)]


def gradients() -> list[torch.Tensor]:
    """Of every order of magnitude, subnormal ones and infinities included, and one that is not aligned."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = [
        torch.randn(shape, device="cuda", generator=generator)
        * 10.0 ** torch.randint(-44, 38, shape, device="cuda", generator=generator)
        for shape in SHAPES
    ]
    made[3] = made[3].to(memory_format=torch.channels_last)
    made[4][:3] = torch.tensor([float("inf"), float("-inf"), -0.0])
    return [*made, torch.randn(4097, device="cuda", generator=generator)[1:]]


@pytest.mark.parametrize("factor", [0.37, 1e-6, 1 - 2**-24, 1.0, 1e-30])
def test_the_pass_divides_bit_by_bit_as_the_fused_kernel_does(factor):
    scale = 1 / torch.full((), factor, device="cuda")
    mine, theirs = gradients(), gradients()
    ClipPass().divide(mine, scale, torch.zeros((), dtype=torch.bool, device="cuda"))
    weights = [torch.zeros_like(each) for each in theirs]
    torch._fused_sgd_(
        weights, theirs, [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False, grad_scale=scale, found_inf=torch.zeros((), device="cuda"),
    )  # fmt: skip
    for got, want in zip(mine, theirs, strict=True):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize(("factor", "skip"), [(0.5, True), (1.0, False)])
def test_nothing_is_written_where_nothing_is_clipped_or_the_step_is_skipped(factor, skip):
    before = gradients()
    now = [each.clone(memory_format=torch.preserve_format) for each in before]
    ClipPass().divide(now, 1 / torch.full((), factor, device="cuda"), torch.full((), skip, device="cuda"))
    for got, want in zip(now, before, strict=True):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_tables_that_were_used_for_other_tensors_in_between_are_placed_again():
    mine, others = gradients(), gradients()
    tables = BlockTables([each.numel() for each in mine], mine[0].device)
    tables.place([each.data_ptr() for each in others])
    before, quotients = [each.clone() for each in others], [each.clone() for each in mine]
    scale, applied = torch.full((), 4.0, device="cuda"), torch.zeros((), dtype=torch.bool, device="cuda")
    ClipPass().divide(mine, scale, applied, tables)
    ClipPass().divide(quotients, scale, applied)
    for got, want in zip([*mine, *others], [*quotients, *before], strict=True):
        assert torch.equal(got.contiguous().view(torch.int32), want.contiguous().view(torch.int32))


# The first step of SGD with momentum is decided and clipped by the host.
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_a_run_is_bitwise_the_same_whichever_way_it_is_clipped(name):
    def train(own_pass: bool) -> tuple[list[torch.Tensor], list[bool]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
        optimizer, folded = OPTIMIZERS[name](model.parameters()), []
        optimizer.register_step_pre_hook(lambda opt, *_: folded.append(getattr(opt, "grad_scale", None) is not None))
        # A second guard that only watches leaves clipping to the kernel.
        watching = None if own_pass else sf.attach(model, optimizer, mode="watch")
        stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(0.5))
        generator = torch.Generator("cuda").manual_seed(0)
        sizes = [
            torch.full((), 0.01 if step % 4 else 100.0, device="cuda") for step in range(104)
        ]  # the parameters are measured at 100
        x = [torch.randn(16, 32, device="cuda", generator=generator) for _ in sizes]
        torch.cuda.synchronize()
        try:
            for step, (size, batch) in enumerate(zip(sizes, x, strict=True)):
                if step == 2:  # the first step of some optimizers makes their state, and is decided by the host
                    torch.cuda.set_sync_debug_mode("error")
                stabilizer.backward((model(batch).square().mean() + model(batch).sum() * 1e-3) * size)
                stabilizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if watching is not None:
            watching.detach()
        state = [v for entry in optimizer.state_dict()["state"].values() for v in entry.values() if v is not None]
        return [*model.parameters(), *state], folded

    (mine, separately), (theirs, folded) = train(True), train(False)
    assert not any(separately[2 * WINDOW_STEPS :])
    assert all(folded[2:])
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
