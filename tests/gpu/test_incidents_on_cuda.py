"""Incidents on a GPU: exact where the host knows at once, honest where it learns later, and never a sync."""

from pathlib import Path

import pytest
import torch
from torch import nn

import surefoot as sf
from captured import RefuseAt, incidents_in
from surefoot.record.incidents.environment import hardware, switches, versions
from surefoot.record.incidents.reading import read_incident
from surefoot.replay.processes import ReplayPass
from surefoot.replay.target import TargetStep
from surefoot.replay.tensor_difference import differences
from surefoot.replay.verdict import judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def build():
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 1)).cuda()
    return net, [], lambda prediction, batch: (prediction - batch.sum(1, keepdim=True)).square().mean()


def train(folder, fused, step=3, steps=10, each=lambda: None, **settings):
    torch.manual_seed(0)
    net, _, loss_fn = build()
    stabilizer = sf.TrainingStabilizer(
        net,
        torch.optim.AdamW(net.parameters(), 3e-3, fused=fused),
        checker=sf.StabilityChecker(nonfinite=RefuseAt(step), explosion=None, spike=None),
        incidents=folder,
        **settings,
    )
    batches = list(torch.randn(steps, 32, 16, generator=torch.Generator().manual_seed(7)).cuda())
    for batch in stabilizer.resume(batches):
        with stabilizer.autocast():
            loss = loss_fn(net(batch), batch)
        stabilizer.backward(loss)
        stabilizer.step()
        each()
    torch.cuda.synchronize()
    refused = stabilizer.counts["skipped"] - stabilizer.counts["overflows"]  # the first loss scales are too large
    assert refused == (0 if step is None else 1)
    return stabilizer


def replayed(folder):
    incident = read_incident(folder)
    found = []
    for _ in range(2):
        step = TargetStep(f"{Path(__file__)}:build", incident)
        step.run()
        apart = differences(incident.state.get("gradients", {}), step.gradients())
        found.append(ReplayPass(step.prints(), apart, versions(), hardware(step.home), switches(), []))
    return judge(incident.facts, *found)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "fp16"}], ids=["fp32", "bf16", "fp16"])
def test_an_optimizer_that_is_not_fused_gives_exact_incidents(tmp_path, settings):
    train(tmp_path, fused=False, **settings)
    (folder,) = incidents_in(tmp_path)
    facts = read_incident(folder).facts
    assert facts["exact"], facts["inexact"]
    found = replayed(folder)
    assert (found.kind, found.different) == ("reproduced", {})


def test_a_fused_optimizer_gives_incidents_that_say_what_they_are(tmp_path):
    train(tmp_path, fused=True, lag_steps=2)
    (folder,) = incidents_in(tmp_path)
    facts = read_incident(folder).facts
    assert (facts["step"], facts["exact"], facts["applied_since"]) == (3, False, 2)
    assert replayed(folder).kind == "inconclusive"


def test_decided_on_the_host_they_are_exact_again(tmp_path):
    train(tmp_path, fused=True, decide_on="host")
    (folder,) = incidents_in(tmp_path)
    assert replayed(folder).kind == "reproduced"


def test_noting_steps_waits_for_nothing(tmp_path):
    try:
        train(tmp_path, fused=True, step=None, each=lambda: torch.cuda.set_sync_debug_mode("error"), steps=8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert incidents_in(tmp_path) == []
