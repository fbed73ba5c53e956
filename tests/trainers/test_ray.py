"""`GuardedWorker` with the real Ray Train: two workers in processes of their own, and without workers in this one."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
import surefoot as sf
from surefoot.errors import SettingError
from trainers import ray_workers
from trainers.small_training import LR, AfterSteps, Classifier, Linear, Rows, same

pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn about is theirs


@pytest.fixture(scope="module", autouse=True)
def _framework() -> None:
    """The framework is imported when the first test of this file runs: every worker collects every file."""
    global Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig, TorchTrainer, GuardedWorker
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ray")
        from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from surefoot.trainers.ray import GuardedWorker


def fit(train: Any, folder: Path) -> Any:
    """Run a training function as Ray Train does without workers: in this process, with its own `report`."""
    settings = RunConfig(name="run", storage_path=str(folder))
    return TorchTrainer(train, scaling_config=ScalingConfig(num_workers=0), run_config=settings).fit()


def loop(
    model: Any, *, steps: int = 40, faults: Any = None, accumulate: int = 1, max_norm: float | None = 5.0,
    copies: Any = None, bf16: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """A loop as users write it; returns the worker's guard, or none, the losses, and the optimizer, which lives on."""
    guarded = options.pop("guarded", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    torch.manual_seed(1)
    guard, losses, rows = GuardedWorker(model, optimizer, **options) if guarded else None, [], Rows(320, faults)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            chosen = slice((step * accumulate + part) * 8 % 320, (step * accumulate + part) * 8 % 320 + 8)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(rows.x[chosen], rows.labels[chosen])["loss"]
            losses.append(loss.item())
            if guard is not None:
                guard.observe(loss)
            (loss / accumulate).backward()
        if options.get("clip") is None and max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if copies is not None:
            copies(optimizer)
    return guard, losses, optimizer


@pytest.mark.long
def test_two_workers_are_guarded_together_and_resumed_after_one_was_killed(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parents[1]), forked.SOURCE])
    settings = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    settings |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ended = forked.run([ray_workers.__file__, tmp_path, 2], env=forked.environment(**settings), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["healthy_equal"]
    assert found["counts_healthy"].items() >= {"steps": ray_workers.STEPS, "skipped": 0, "alarms": 0}.items()
    for counts in found["counts"] + found["counts_killed"]:  # only one of the workers had the NaN
        assert counts.items() >= {"steps": ray_workers.STEPS, "skipped": 1}.items()
    assert found["kills"] == 2
    assert found["killed_equal"]
    assert found["steps_killed"] == [list(range(ray_workers.STEPS))] * ray_workers.WORKERS
    assert found["reported"].items() >= {"step": 45, "surefoot/skipped": 1.0}.items()
    runs = ("healthy", "killed", "whole")
    assert found["logs"] == [f"storage/run/{run}/rank{rank}" for run in runs for rank in (0, 1)]


@pytest.mark.parametrize(("accumulate", "bf16"), [(1, False), (4, False), (4, True)], ids=["1", "4", "4-bf16"])
def test_a_healthy_run_is_bitwise_the_bare_run(tmp_path, accumulate, bf16):
    ended = []

    def train() -> None:
        for guarded in (False, True):
            model = Classifier()
            guard, losses, _ = loop(model, guarded=guarded, accumulate=accumulate, steps=10, max_norm=0.05, bf16=bf16)
            ended.append(model.state_dict())
        history = guard.training.attachments[0].history
        assert min(record.signals.grad_norm for record in history) > 0.04  # every step was clipped
        means = [sum(losses[i : i + accumulate]) / accumulate for i in range(0, len(losses), accumulate)]
        assert [record.signals.loss for record in history] == pytest.approx(means, rel=1e-5)
        guard.finish()

    fit(train, tmp_path)
    assert same(*ended)


@pytest.mark.parametrize("clip", [None, sf.ClipByNorm(5.0)], ids=["unclipped", "clipped"])
def test_broken_steps_are_left_out_bitwise_and_ray_is_given_the_numbers(tmp_path, clip):
    def train() -> None:
        faults = {8 * 21: float("nan")} | dict.fromkeys(range(8 * 30, 8 * 31), 1e6)
        model = Linear()
        copies = AfterSteps(model)
        guard, *_ = loop(model, faults=faults, log=tmp_path / "log", clip=clip, max_norm=None, copies=copies)
        with guard:
            guard.report({"mine": 1})
        history = guard.training.attachments[0].history
        assert [i for i, record in enumerate(history) if record.skipped] == [21, 30]
        assert [history[step].reasons for step in (21, 30)] == [("nonfinite",), ("explosion",)]
        assert all(same(copies.states[step - 1], copies.states[step]) for step in (21, 30))
        assert not same(copies.states[30], copies.states[31])

    metrics = fit(train, tmp_path).metrics
    assert metrics["mine"] == 1
    assert metrics["surefoot/skipped"] == 2
    assert json.loads((tmp_path / "log" / "findings.json").read_text())["steps"] == 40


def test_the_state_of_the_guard_is_part_of_the_checkpoint_and_is_loaded(tmp_path):
    def train() -> None:
        guard, _, optimizer = loop(Classifier(), faults={8 * 5: float("nan")}, steps=10)
        assert optimizer.state  # it lives as long as the guard is used
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        guard.report({}, Checkpoint.from_directory(folder))
        guard.finish()
        resumed, *_ = loop(Classifier(), steps=3)
        assert resumed.training.attachments[0].counts.items() >= {"steps": 13, "skipped": 1}.items()
        resumed.finish()

    fit(train, tmp_path)


def test_a_rate_that_was_100_times_too_high_is_returned_from(tmp_path):
    def train() -> None:
        model, rows = Classifier(), Rows(320)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        with GuardedWorker(model, optimizer) as guard:
            for step in range(200):
                optimizer.param_groups[0]["lr"] = 100 * LR if 80 <= step < 95 else LR
                optimizer.zero_grad()
                chosen = slice(step % 40 * 8, step % 40 * 8 + 8)
                loss = guard.watched(lambda x, y: model(x, y)["loss"])(rows.x[chosen], rows.labels[chosen])
                loss.backward()
                optimizer.step()
            incidents = guard.training.attachments[0].incidents
        assert [incident.action for incident in incidents].count("roll_back") == 1

    fit(train, tmp_path)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_an_fp16_overflow_is_the_scalers_decision_and_is_counted(tmp_path, fused):
    def train() -> None:
        model, rows = Classifier(), Rows(320)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused or None)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
        with GuardedWorker(model, optimizer, scaler=scaler) as guard:
            for step in range(8):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = model(rows.x[8 * step : 8 * step + 8], rows.labels[8 * step : 8 * step + 8])["loss"]
                guard.observe(loss)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            counts = guard.training.attachments[0].counts
        assert counts["overflows"] == counts["skipped"] > 1
        assert counts["steps"] == 8
        assert "update" not in vars(scaler)

    fit(train, tmp_path)


def test_an_optimizer_of_another_model_is_one_clear_error(tmp_path):
    def train() -> None:
        GuardedWorker(Classifier(), torch.optim.SGD(Classifier().parameters(), lr=0.1))

    with pytest.raises(SettingError, match="no optimizer trains a parameter of the model"):
        fit(train, tmp_path)


def test_a_checkpoint_that_ray_does_not_upload_gets_the_state_too(tmp_path):
    def train() -> None:
        guard, _, optimizer = loop(Classifier(), steps=2)
        assert optimizer.state  # it lives as long as the guard is used
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        guard.report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        guard.report({}, None)  # no worker saves: nothing is written
        guard.finish()
        assert [path.name for path in folder.iterdir()] == ["surefoot"]

    fit(train, tmp_path)
    assert sf.trainers.ray.GuardedWorker is GuardedWorker


OUTSIDE = """
import torch
import surefoot as sf

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    sf.trainers.ray.GuardedWorker(model, optimizer)
except RuntimeError as error:
    print(error)
sf.attach(model, optimizer)  # an error if the optimizer is guarded
print("not attached")
"""


def test_outside_of_a_training_function_nothing_is_attached():
    found = forked.run(["-W", "ignore", "-c", OUTSIDE])
    assert "outside of a Ray Train training function" in found.stdout
    assert found.stdout.endswith("not attached\n"), found.stderr
