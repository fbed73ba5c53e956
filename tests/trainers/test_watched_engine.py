"""An engine that owns the step is watched, and says so."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import surefoot as sf
from surefoot.trainers.guarded_training import GuardOptions
from surefoot.trainers.watched_engine import WatchedEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from surefoot.trainers.accelerator_methods import engine_of, follow_losses

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_losses_of_an_engine_are_logged_and_one_line_says_that_nothing_is_guarded(tmp_path, caplog):
    accelerator = Accelerator(cpu=True)
    assert engine_of(accelerator) is None
    engine = WatchedEngine(GuardOptions(tmp_path / "run"), "DeepSpeed", step=3)
    assert caplog.text.count("steps are not guarded") == 1
    follow_losses(engine, accelerator, is_share=True)
    weight = torch.ones(1, requires_grad=True)
    for step in range(4):
        for _ in range(2):
            accelerator.backward((weight * step / 2).sum())
        engine.stepped()
    engine.finish()
    engine.finish()  # once is enough
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["steps"] == 4
    assert "backward" not in vars(accelerator)
    scalars = sf.load_run(tmp_path / "run").scalars
    assert scalars["step"].to_pylist() == [3, 4, 5, 6]
    assert scalars["loss"].to_pylist() == [0.0, 1.0, 2.0, 3.0]


def test_without_a_log_nothing_is_kept_of_a_loss(caplog):
    engine = WatchedEngine(GuardOptions(), "DeepSpeed")
    engine.add_loss(torch.ones(()))
    assert len(engine._window) == 0
    engine.stepped()
    engine.finish()
