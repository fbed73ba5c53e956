"""Plain values in `also_save`: in every checkpoint, compared on resume, never loaded."""

import argparse
import dataclasses
import logging
from pathlib import Path

import pytest
import torch

import surefoot as sf
from surefoot.guard.plain_values import as_plain, warn_of_changes


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    folder: Path = Path("data/train")
    layers: tuple[int, ...] = (3, 4)


def build(folder, **also):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoints = sf.CheckpointManager(folder, every_steps=1)
    return model, sf.TrainingStabilizer(model, optimizer, checkpoints=checkpoints, also_save=also)


def train(model, stabilizer):
    stabilizer.backward(model(torch.ones(3, 2)).square().mean())
    stabilizer.step()
    stabilizer.save()


CONFIGS = [{"lr": 0.1, "layers": [3, 4], "name": None}, Config(), argparse.Namespace(lr=0.1, seed=3), "baseline", 7]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_config_is_in_the_checkpoint_and_a_resumed_run_with_the_same_one_says_nothing(tmp_path, config, caplog):
    train(*build(tmp_path, config=config))
    saved = sf.CheckpointManager(tmp_path).load().tree["also"]["config"]
    assert saved == as_plain(config)
    _, stabilizer = build(tmp_path, config=config)
    assert stabilizer.restore() == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_resumed_run_keeps_its_own_config_and_logs_what_is_different(tmp_path, caplog):
    train(*build(tmp_path, config={"lr": 0.1, "model": {"width": 3}, "old": 1, "loss": float("nan")}, tag="a"))
    config = {"lr": 0.2, "model": {"width": 4}, "loss": float("nan"), "new": 2}
    _, stabilizer = build(tmp_path, config=config, tag="a")
    assert stabilizer.restore() == 1
    assert config["lr"] == 0.2
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "config.lr was 0.1 when the checkpoint was saved and is 0.2; config.model.width was 3" in message
    assert "config.old was 1 when the checkpoint was saved and is missing; config.new was missing" in message
    assert "config.loss" not in message
    assert "tag" not in message


def test_a_checkpoint_has_the_values_of_its_own_step(tmp_path):
    progress = {"epoch": 1}
    model, stabilizer = build(tmp_path, progress=progress)
    train(model, stabilizer)
    progress["epoch"] = 2
    train(model, stabilizer)
    manager = sf.CheckpointManager(tmp_path)
    assert [manager.load(step).tree["also"]["progress"] for step in (1, 2)] == [{"epoch": 1}, {"epoch": 2}]


def test_a_config_joins_what_has_a_state(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
    model, stabilizer = build(tmp_path, average=average, config=CONFIGS[0])
    train(model, stabilizer)
    expected = average.module.weight.detach().clone()
    with torch.no_grad():
        average.module.weight.zero_()
    stabilizer.restore()
    assert torch.equal(average.module.weight, expected)


@pytest.mark.parametrize(
    "thing", [object(), lambda: 3, {"deep": [object()]}, Config], ids=["object", "call", "in", "class"]
)
def test_what_is_neither_is_refused_at_construction_by_name(tmp_path, thing):
    with pytest.raises(sf.SettingError, match=r"plain values such as a config; got 'config' with a "):
        build(tmp_path, config=thing)


def test_only_some_of_many_differences_are_shown(caplog):
    warn_of_changes("config", {f"n{i}": i for i in range(9)}, {f"n{i}": -1 for i in range(9)})
    assert " and 4 more. Plain values" in caplog.text
