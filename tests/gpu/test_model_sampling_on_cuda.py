"""Close looks on a CUDA device: the same numbers, no wait, the same bits. Left out where there is none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from surefoot.guard.model_sampling import ModelSampler, Sampling
from surefoot.observe.histograms import Bins, count, take_sample
from surefoot.observe.parameters import named_parameters
from surefoot.record.bins import LARGEST_POWER, SMALLEST_POWER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BINS = Bins(SMALLEST_POWER, LARGEST_POWER)
ALWAYS = Sampling(every_steps=1)


def built():
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Flatten()]
    model = nn.Sequential(*parts, nn.Linear(16 * 36, 10)).cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def train(steps, looks_of=None, strict=False):
    model, optimizer = built()
    looks = looks_of(model) if looks_of else None
    x = torch.randn(32, 3, 8, 8, device="cuda")
    named = named_parameters([model])
    found = []
    for step in range(steps):
        if strict and step == 3:  # the first steps compile kernels and fill the pools
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if looks is not None:
            looks.before_update(step, named, divide=1.0)
        optimizer.step()
        if looks is not None:
            looks.after_update(step)
            looks.before_forward(step + 1)
    torch.cuda.set_sync_debug_mode("default")
    if looks is not None:
        found = looks.arrived()
    return list(model.state_dict().values()), torch.cuda.get_rng_state(), found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_device_counts_what_the_host_counts(dtype):
    torch.manual_seed(0)
    values = torch.cat([torch.randn(70_000) * 10.0 ** torch.randint(-44, 38, (70_000,)), torch.zeros(50)]).to(dtype)
    values[:7] = torch.tensor([math.nan, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 0.0]).to(dtype)
    for tensor in (values, values[:100], values[:70_000].view(700, 100).t(), values[:0]):
        here, there = (count([take_sample(each)], BINS) for each in (tensor, tensor.cuda()))
        assert torch.equal(here, there.cpu())


def test_deterministic_algorithms_are_no_obstacle():
    values = torch.randn(1000, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        found = count([take_sample(values)], BINS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found.cpu(), count([take_sample(values.cpu())], BINS))


def test_looking_at_every_step_never_waits_and_is_bitwise_the_bare_run():
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    try:
        bare, random, _ = train(12)
        watched, random_after, found = train(12, lambda model: ModelSampler([model], ALWAYS), strict=True)
    finally:
        torch.backends.cudnn.deterministic = before
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert torch.equal(random, random_after)
    assert {each.step for each in found} == set(range(12))


def test_a_captured_graph_does_not_record_the_look():
    model = nn.Sequential(nn.Linear(8, 8)).cuda()
    x = torch.randn(32, 8, device="cuda")
    looks = ModelSampler([model], ALWAYS)
    model(x)
    looks.before_forward(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        model(x)
    graph.replay()
    looks.before_update(1, named_parameters([model]))
    looks.after_update(1)
    assert {each.kind for each in looks.arrived() if hasattr(each, "kind")} == {"weight"}


def test_a_look_at_a_gpt_launches_a_few_operations_per_tensor():
    from gpt import GPT, GPT_124M

    torch.manual_seed(0)
    model = GPT(GPT_124M).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(GPT_124M.vocabulary, (8, 1024), device="cuda")
    named, looks = named_parameters([model]), ModelSampler([model], ALWAYS)
    launched = {}
    for looking in (False, True):
        torch.cuda.synchronize()
        with torch.profiler.profile(acc_events=True) as profile:  # looks do nothing under a dispatch mode
            if looking:
                looks.before_forward(0)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(ids, ids)
            loss.backward()
            if looking:
                looks.before_update(0, named)
            optimizer.step()
            if looking:
                looks.after_update(0)
            optimizer.zero_grad()
        launched[looking] = sum(event.name.startswith("aten::") for event in profile.events())
    found = [each for each in looks.arrived() if hasattr(each, "kind")]
    assert len({each.layer for each in found}) > 200
    print(f"\na step of a 124M GPT: {launched[False]} operations; {launched[True]} with a close look")
    assert launched[True] - launched[False] < 30 * len(found)
