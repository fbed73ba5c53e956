"""Weights of microbatches that are on the GPU, and limits: decided there, without waiting for it."""

import pytest
import torch

import surefoot as sf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(dtype, fused, as_number, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3, device="cuda", dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    checker = sf.StabilityChecker(max_grad_norm=1e3, max_grad_ratio=1e3, max_loss=1e3)
    stabilizer = sf.TrainingStabilizer(model, optimizer, accumulate=3, checker=checker)
    for _ in range(steps):
        for x, y in batches(dtype):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            count = (y != -100).sum()
            stabilizer.backward(loss, weight=int(count) if as_number else count)
            stabilizer.step()
    return model, stabilizer


def batches(dtype):
    generator = torch.Generator().manual_seed(1)
    for counted in (0, 2, 4):
        y = torch.full((4,), -100)
        y[:counted] = 1
        yield torch.randn(4, 8, generator=generator, dtype=dtype).cuda(), y.cuda()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("as_number", [False, True])
def test_ignored_microbatches_and_uneven_weights_equal_the_full_batch(fused, dtype, rtol, as_number):
    model, stabilizer = trained(dtype, fused, as_number)
    assert stabilizer.incidents == []
    torch.manual_seed(0)
    bare = torch.nn.Linear(8, 3, device="cuda", dtype=dtype)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    x, y = (torch.cat(parts) for parts in zip(*batches(dtype), strict=True))
    for _ in range(3):
        torch.nn.functional.cross_entropy(bare(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight, bare.weight, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("as_number", [False, True])
def test_weights_and_limits_wait_for_nothing(as_number):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    checker = sf.StabilityChecker(max_grad_norm=1e3, max_grad_ratio=1e3, max_loss=1e3)
    stabilizer = sf.TrainingStabilizer(model, optimizer, accumulate=2, checker=checker, lag_steps=50)
    x = torch.randn(4, 8, device="cuda")
    weight = torch.tensor(3, device="cuda")
    for step in range(24):
        torch.cuda.set_sync_debug_mode("error" if step > 8 else "default")
        try:
            stabilizer.backward(model(x).square().mean(), weight=3 if as_number else weight)
            stabilizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert stabilizer.counts["applied"] == 12


def test_a_save_that_is_due_shortly_before_the_end_is_restored(tmp_path):
    def made():
        model = torch.nn.Linear(4, 1, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
        checkpoints = sf.CheckpointManager(tmp_path, every_steps=5)
        return model, sf.TrainingStabilizer(model, optimizer, checkpoints=checkpoints)

    model, stabilizer = made()
    for _ in range(12):
        stabilizer.backward(model(torch.ones(2, 4, device="cuda")).square().mean())
        stabilizer.step()
    _, again = made()
    assert again.restore() == 10
