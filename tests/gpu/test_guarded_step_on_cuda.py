"""What only a CUDA device can show. Left out where there is none."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import surefoot as sf
from part_arguments import exported_from, made
from surefoot.act import clip, shape
from surefoot.observe.tensors import TensorMeter, _measure_cpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()


@contextmanager
def no_syncs():
    """Any wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "adam": lambda p: torch.optim.Adam(p, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
}


CLIPS = {name: made(name) for module in (clip, shape) for name in exported_from(module)}
CLIPS |= {"none": None, "centred": (sf.CentralizeGradients(), sf.ClipByNorm(0.5))}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_hundred_guarded_steps_never_wait_for_the_device(optimizer, clip):
    model = small_model()
    stabilizer = sf.TrainingStabilizer(model, OPTIMIZERS[optimizer](model.parameters()), clip=CLIPS[clip])
    x = torch.randn(16, 32, device="cuda")
    with no_syncs():
        for _ in range(100):
            loss = model(x).square().mean()
            stabilizer.observe(entropy=loss.detach() * 2)
            stabilizer.backward(loss)
            stabilizer.step()
    assert stabilizer.counts["applied"] == 100


def test_fp16_with_loss_scaling_never_waits_for_the_device():
    model = small_model()
    stabilizer = sf.TrainingStabilizer(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        precision="fp16",
        clip=sf.ClipByNorm(1.0),
        accumulate=2,
    )
    x = torch.randn(16, 32, device="cuda")
    with no_syncs():
        for _ in range(100):
            with stabilizer.autocast():
                loss = model(x).square().mean()
            stabilizer.backward(loss)
            stabilizer.step()
    assert stabilizer.counts["steps"] == 50


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "sgd with momentum", "plain adamw"])
@pytest.mark.parametrize("bad_step", [0, 7])
def test_a_skipped_step_on_cuda_is_bitwise_no_step(optimizer, bad_step):
    build = (
        OPTIMIZERS.get(optimizer)
        or {
            "sgd with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
            "plain adamw": lambda p: torch.optim.AdamW(p),
        }[optimizer]
    )
    model = small_model()
    adam = build(model.parameters())
    stabilizer = sf.TrainingStabilizer(model, adam, clip=sf.ClipByNorm(0.5))
    generator = torch.Generator("cuda").manual_seed(0)
    for step in range(12):
        x = torch.randn(16, 32, device="cuda", generator=generator)
        before = [p.detach().clone() for p in model.parameters()]
        state = copy.deepcopy(adam.state_dict()["state"])
        loss = model(x).square().mean() * (math.nan if step == bad_step else 1.0)
        stabilizer.backward(loss)
        outcome = stabilizer.step()
        assert outcome.skipped == (step == bad_step)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (step == bad_step)
        if step == bad_step and step > 0:
            after = adam.state_dict()["state"]
            for index, entry in state.items():
                for key, value in entry.items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[index][key])), key
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "plain"])
def test_a_healthy_run_on_cuda_is_bitwise_the_bare_run(optimizer, compiled):
    build = OPTIMIZERS.get(optimizer, lambda p: torch.optim.AdamW(p))

    def train(guard: bool) -> list[torch.Tensor]:
        model = small_model()
        forward = torch.compile(model) if compiled else model
        opt = build(model.parameters())
        stabilizer = sf.TrainingStabilizer(model, opt) if guard else None
        generator = torch.Generator("cuda").manual_seed(0)
        for _ in range(200):
            x = torch.randn(16, 32, device="cuda", generator=generator)
            loss = (forward(x) - x[:, :8]).square().mean()
            if stabilizer is None:
                opt.zero_grad()
                loss.backward()
                opt.step()
            else:
                stabilizer.backward(loss)
                stabilizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "mixed"])
def test_the_cuda_pass_agrees_with_float64(dtype):
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    shapes = [(3,), (1000, 37), (0,), (64, 3, 7, 7), (40_000,), (), (33_000, 5)]
    tensors = [
        torch.randn(shape).to(dtypes[i % 3] if dtype == "mixed" else dtype) * 10.0 ** (i - 3)
        for i, shape in enumerate(shapes)
    ]
    tensors[1].view(-1)[5] = math.nan
    tensors[4].view(-1)[[1, 39_999]] = math.inf
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    tensors.append(tensors[6].float().t()[:2])  # strided, not dense
    expected = _measure_cpu([tensor.double() for tensor in tensors])
    found = TensorMeter().measure([tensor.cuda() for tensor in tensors[:-1]] + [tensors[6].float().cuda().t()[:2]])
    for want, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got.cpu(), want.float(), rtol=1e-5, atol=0, equal_nan=True)


def test_squares_beyond_fp32_do_not_overflow_on_cuda():
    tensor = torch.full((100_000,), 1e30, device="cuda")
    norm = TensorMeter().measure([tensor]).norm
    assert norm.item() == pytest.approx(1e30 * math.sqrt(100_000), rel=1e-5)


def test_misaligned_views_are_measured_right():
    storage = torch.randn(4097, device="cuda")
    view = storage[1:]
    assert TensorMeter().measure([view]).norm.item() == pytest.approx(view.double().norm().item(), rel=1e-5)


def test_an_explosion_is_refused_on_the_device():
    model = small_model()
    stabilizer = sf.TrainingStabilizer(model, torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.randn(16, 32, device="cuda")
    factors = [torch.full((), 1e5 if step == 60 else 1.0, device="cuda") for step in range(80)]
    with no_syncs():
        for factor in factors:
            stabilizer.backward((model(x) - x[:, :8]).square().mean() * factor)
            stabilizer.step()
    assert [record.signals.step for record in stabilizer.history if record.skipped] == [60]
    assert stabilizer.incidents[0].kind == "explosion"


@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_on_several_devices_are_measured_clipped_and_guarded_together(first, fused):
    torch.manual_seed(0)
    second = "cuda" if first == "cpu" else "cpu"
    one, two = nn.Linear(8, 8).to(first), nn.Linear(8, 2).to(second)
    model = nn.ModuleList([one, two])
    stabilizer = sf.TrainingStabilizer(
        model, torch.optim.AdamW(model.parameters(), fused=fused), clip=sf.ClipByNorm(1e-3)
    )
    for step in range(60):  # often enough for a copy that does not wait to show
        loss = two(one(torch.randn(4, 8, device=first)).to(second)).square().mean()
        stabilizer.backward(loss * (math.nan if step == 5 else 1.0))
        before = [p.detach().cpu().clone() for p in model.parameters()]
        expected = math.sqrt(sum(float(p.grad.double().norm()) ** 2 for p in model.parameters()))
        outcome = stabilizer.step()
        assert outcome.skipped == (step == 5)
        unchanged = all(torch.equal(a, b.detach().cpu()) for a, b in zip(before, model.parameters(), strict=True))
        assert unchanged == (step == 5)
        if step != 5:
            assert outcome.grad_norm == pytest.approx(expected, rel=1e-4)
            assert outcome.clipped


def test_running_statistics_on_cuda_survive_a_broken_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).cuda()
    stabilizer = sf.TrainingStabilizer(model, torch.optim.AdamW(model.parameters(), fused=True))
    for step in range(20):
        x = torch.randn(16, 4, device="cuda")
        if step == 7:
            x[0, 0] = math.nan
        stabilizer.backward(model(x).square().mean())
        stabilizer.step()
    assert stabilizer.counts["skipped"] == 1
    assert bool(torch.isfinite(model[1].running_mean).all())
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_rule_for_a_signal_of_the_user_still_refuses_steps_after_the_warm_up_of_the_graph():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    checker = sf.StabilityChecker(explosion=sf.Explosion(signal="cost", min_to_weights=0.0))
    stabilizer = sf.TrainingStabilizer(model, optimizer, checker=checker)
    for step in range(40):
        x = torch.randn(16, 32, device="cuda")
        stabilizer.observe(cost=1e6 if step == 35 else 1.0)
        stabilizer.backward(model(x).square().mean())
        stabilizer.step()
    stabilizer.flush()
    assert [incident.step for incident in stabilizer.incidents] == [35]


def test_a_recorded_decision_measures_gradients_wherever_they_are():
    parameters = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in ((40_000,), (3, 5), (7,))]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    attachment = sf.attach(None, optimizer, escalation=None)
    memory = torch.randn(200_000, device="cuda")
    expected = []
    for step in range(40):
        present = parameters if step % 5 else parameters[1:]
        start = step % 4  # every other step starts at an address that is no multiple of 16 bytes
        for parameter in parameters:
            parameter.grad = None
        for parameter in present:
            parameter.grad = memory[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        expected.append([float(each.grad.norm()) for each in present])
        optimizer.step()
    records = attachment.history
    assert len(records) == 40
    for record, norms in zip(records, expected, strict=True):
        assert record.signals.layers.grad_norm.tolist() == pytest.approx(norms, rel=1e-5)
        assert record.signals.grad_norm == pytest.approx(math.hypot(*norms), rel=1e-5)
