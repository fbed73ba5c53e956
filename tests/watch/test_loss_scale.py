"""Steps that a gradient scaler skips are counted, whoever skips them; see `tests/gpu/test_scaler_on_cuda.py`, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from watched import Nursery

TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 8); y = x[:, :1]
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=FUSED)
scaler = torch.amp.GradScaler("cpu", growth_interval=1000)
for step in range(80):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = (out.float() - y).square().mean()
    scaler.scale(loss).backward()
    if step in SKIPPED:
        model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
print(scaler.get_scale())
"""
SKIPPED = [3, *range(20, 65, 5), 70]


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_that_skips_in_its_kernel_is_seen_to(watch: Nursery, fused: bool) -> None:
    run = watch(TRAIN.replace("FUSED", str(fused)).replace("SKIPPED", str(SKIPPED)))
    scaler = run.facts["scaler"]
    assert (scaler["attempts"], scaler["skips"]) == (80, 11)
    assert scaler["skip_steps"] == SKIPPED
    assert scaler["trace"][-1] == scaler["scale"] == float(run.output.split()[-1]) == 32.0
    assert run.facts["problems"] == {}
    assert run.first.cause == "precision.fp16-overflow"
    assert run.diagnosis.verdict == "unstable"
    assert "11 of 80 steps" in run.first.summary
    overflows = [
        line for line in (run.folder / "run" / "events.jsonl").read_text().splitlines() if '"overflow"' in line
    ]
    assert len(overflows) == 11


def test_a_scaler_that_finds_its_level_is_nothing_to_report(watch: Nursery) -> None:
    run = watch(TRAIN.replace("FUSED", "True").replace("SKIPPED", "range(7)"))
    assert run.facts["scaler"]["skips"] == 7
    assert run.diagnosis.verdict == "healthy"
