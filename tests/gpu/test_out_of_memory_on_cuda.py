"""A CUDA allocator that really runs out. Left out where there is no device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import surefoot as sf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, LAYERS, ROWS = 1024, 8, 16_384  # about 1 GiB of activations


def tall_net() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.0), nn.Linear(WIDTH, 8)).cuda()


@pytest.fixture
def scarce():
    """Leave the process so many MiB beyond what it holds."""
    total = torch.cuda.get_device_properties(0).total_memory

    def leave(mib: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + mib * 2**20) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def stabilized(model: nn.Module, **settings) -> sf.TrainingStabilizer:
    return sf.TrainingStabilizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), **settings)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def batch_of(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        "x": torch.randn(ROWS, WIDTH, device="cuda", generator=generator),
        "y": torch.randint(0, 8, (ROWS,), device="cuda", generator=generator),
    }


# The forward keeps about 64 MiB twice per layer. The larger bound lets the forward through, and fails in the backward.
@pytest.mark.parametrize("mib", [300, 620, 1_100])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_does_not_fit_gives_the_gradient_it_would_have_given(scarce, mib, accumulate):
    model = tall_net()

    def loss_fn(part):
        return nn.functional.cross_entropy(model(part["x"]), part["y"])

    batches = [batch_of(seed) for seed in range(accumulate)]
    for batch in batches:
        (loss_fn(batch) / accumulate).backward()
    expected = gradients(model)
    model.zero_grad()
    stabilizer = stabilized(model, accumulate=accumulate)
    scarce(mib)
    with pytest.raises(torch.OutOfMemoryError):  # the bare loop dies here
        loss_fn(batches[0]).backward()
    model.zero_grad()
    for i, batch in enumerate(batches):
        loss = stabilizer.run_microbatches(loss_fn, batch)
        if i < accumulate - 1:
            stabilizer.step()
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert (found - wanted).norm() < 1e-4 * wanted.norm()
    assert stabilizer.step().applied
    assert torch.isfinite(loss)
    incident = stabilizer.incidents[0]
    assert incident.kind == "memory.split"
    assert "GiB" in incident.evidence["why"]
    print(f"\n{mib} MiB, accumulate={accumulate}: {incident.summary}")


def test_the_failed_try_leaves_no_memory_behind_and_the_next_batch_does_not_fail(scarce):
    model = tall_net()
    stabilizer = stabilized(model, precision="bf16")

    def loss_fn(part):
        with stabilizer.autocast():
            return nn.functional.cross_entropy(model(part["x"]), part["y"])

    batch = batch_of()
    scarce(300)
    stabilizer.run_microbatches(loss_fn, batch)
    stabilizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    failures = torch.cuda.memory_stats()["num_ooms"]
    assert failures > 0
    for _ in range(20):
        stabilizer.run_microbatches(loss_fn, batch)
        stabilizer.step()
    assert torch.cuda.memory_stats()["num_ooms"] == failures
    assert torch.cuda.memory_allocated() <= held + 2**20
    assert stabilizer.counts["applied"] == 21


def test_one_row_that_does_not_fit_is_reported_and_leaves_the_gradients(scarce):
    model = tall_net()
    stabilizer = stabilized(model, accumulate=2)
    stabilizer.run_microbatches(lambda x: model(x).square().mean(), torch.ones(8, WIDTH, device="cuda"))
    stabilizer.step()
    before = gradients(model)
    scarce(100)

    def greedy(x):
        hog = torch.empty(2**30, device="cuda")
        return model(x).square().mean() + hog.sum() * 0

    with pytest.raises(torch.OutOfMemoryError):
        stabilizer.run_microbatches(greedy, torch.ones(8, WIDTH, device="cuda"))
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), before, strict=True))


def test_a_batch_that_fits_never_waits_for_the_device():
    model = tall_net()
    stabilizer = stabilized(model)
    x = torch.randn(64, WIDTH, device="cuda")
    for _ in range(8):
        stabilizer.run_microbatches(lambda part: model(part).square().mean(), x)
        stabilizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            stabilizer.run_microbatches(lambda part: model(part).square().mean(), x)
            stabilizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stabilizer.counts["applied"] == 28
