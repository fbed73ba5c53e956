"""The diagnosis of a run that has just ended in this process."""

from __future__ import annotations

import json

import torch

import surefoot as sf
from surefoot.commands.finished_run import conclude


def test_a_finished_run_gets_a_verdict_a_text_and_its_findings(tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sf.RunLog(tmp_path) as log, sf.attach(model, optimizer, log=log) as attachment:
        for _ in range(30):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            attachment.observe(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    verdict, text = conclude(tmp_path)
    assert text.startswith(f"surefoot: {verdict} · 30 steps")
    assert json.loads((tmp_path / "findings.json").read_text())["verdict"] == verdict
