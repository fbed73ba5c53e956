"""A resumed run says which settings of its optimizer and schedule are not those of the checkpoint."""

import logging
import re

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import surefoot as sf


def run(folder, schedule=None, steps=4, **settings):
    """Resume in `folder`, train and save; returns the learning rates."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **settings})
    scheduler = None if schedule is None else schedule(optimizer)
    stabilizer = sf.TrainingStabilizer(
        model, optimizer, scheduler=scheduler, checkpoints=sf.CheckpointManager(folder, every_steps=None)
    )
    stabilizer.restore()
    for _ in range(steps):
        stabilizer.backward(model(torch.randn(4, 2)).square().mean())
        stabilizer.step()
    stabilizer.save()
    return [record.signals.lr for record in stabilizer.history]


def cosine(length):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, length)


def chained(length):
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, length)],
        [2],
    )


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of torch's own SequentialLR
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (cosine(100), cosine(50), r"scheduler\.T_max was 100 and is 50, and the saved value is used"),
        (chained(100), chained(50), r"scheduler\[1\]\.T_max was 100 and is 50, and the saved value is used"),
        (
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [10, 20]),
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [10, 30]),
            r"scheduler\.milestones was",
        ),
        (
            lambda optimizer: sf.warmup_cosine(optimizer, 2, 100),
            lambda optimizer: sf.warmup_cosine(optimizer, 2, 10),
            r"the learning rate of scheduler at step 4 was 0\.00999 and is 0\.008536, .* the new one is used",
        ),
        (
            lambda optimizer: sf.warmup_cosine(optimizer, 2, 100),
            lambda optimizer: sf.warmup_linear(optimizer, 2, 100),
            "the learning rate of scheduler at step 4 was",
        ),
    ],
)
def test_a_schedule_with_other_settings_is_logged(tmp_path, caplog, before, after, words):
    run(tmp_path, before)
    assert not caplog.records
    run(tmp_path, after)
    (record,) = [each for each in caplog.records if "the schedule has changed" in each.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("surefoot: the schedule has changed since the checkpoint was saved: ")
    assert caplog.text.count("is used") == 1
    assert re.search(words, record.getMessage())


def test_a_lowered_learning_rate_that_the_checkpoint_replaces_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "surefoot")
    run(tmp_path)
    assert run(tmp_path, lr=0.001, weight_decay=0.5)[-1] == 0.01
    assert "lr of group 0 was 0.001 in this script and is 0.01; weight_decay of group 0 was 0.5" in caplog.text


def test_a_lowered_learning_rate_under_a_schedule_is_a_warning(tmp_path, caplog):
    run(tmp_path, cosine(100))
    run(tmp_path, cosine(100), lr=0.001)
    assert "scheduler.base_lrs was [0.01] and is [0.001], and the saved value is used" in caplog.text


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize(
    "schedule",
    [
        None,
        cosine(100),
        chained(100),
        lambda optimizer: sf.warmup_cosine(optimizer, 2, 100),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, cycle_momentum=False),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    ],
)
def test_a_run_with_the_same_settings_logs_nothing_about_them(tmp_path, caplog, schedule):
    caplog.set_level(logging.INFO, "surefoot")
    run(tmp_path, schedule)
    run(tmp_path, schedule)
    assert "schedule has changed" not in caplog.text
    assert "replaces settings" not in caplog.text


def test_functions_of_the_user_are_not_called_to_compare_them(tmp_path):
    calls = []

    def factor(step):
        calls.append(step)
        return 1.0

    run(tmp_path, lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor))
    calls.clear()
    run(tmp_path, lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor), steps=2)
    assert calls == [0, 5, 6]


def resumed(folder, **settings):
    """Resume in `folder`, take one step and save."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = sf.CheckpointManager(folder, every_steps=None)
    stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=checkpoints, **settings)
    loader = DataLoader([torch.randn(4, 2) for _ in range(12)], batch_size=None)
    for x in stabilizer.resume(loader):
        stabilizer.backward(model(x).square().mean())
        if stabilizer.step() is not None:
            break
    stabilizer.save()


@pytest.mark.parametrize(
    ("before", "after", "level", "words"),
    [
        (
            {"clip": sf.ClipByNorm(1.0)},
            {"clip": sf.ClipByNorm(0.5)},
            logging.WARNING,
            "clipping has changed since the checkpoint was saved: it was ClipByNorm(max_norm=1.0",
        ),
        (
            {},
            {"checker": sf.StabilityChecker(explosion=sf.Explosion(patience=7))},
            logging.INFO,
            "the rules that refuse steps (patience=10 -> patience=7)",
        ),
        (
            {"recovery": sf.TrainingRecovery()},
            {"recovery": sf.TrainingRecovery(keep=3)},
            logging.INFO,
            "`recovery` (keep=2 -> keep=3)",
        ),
    ],
)
def test_changed_parts_of_the_stabilizer_are_logged(before, after, level, words, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    resumed(tmp_path, **before)
    resumed(tmp_path, **before)
    assert not [each for each in caplog.records if " changed" in each.message]
    resumed(tmp_path, **after)
    (record,) = [each for each in caplog.records if " changed" in each.message]
    assert record.levelno == level
    assert words in record.message


def test_another_number_of_microbatches_is_logged(tmp_path, caplog):
    for accumulate in (2, 8, 8):
        caplog.clear()
        model = nn.Linear(2, 1)
        stabilizer = sf.TrainingStabilizer(
            model,
            torch.optim.SGD(model.parameters(), 0.01),
            accumulate=accumulate,
            checkpoints=sf.CheckpointManager(tmp_path, every_steps=None),
        )
        stabilizer.restore()
        for _ in range(accumulate):
            stabilizer.backward(model(torch.randn(4, 2)).square().mean())
            stabilizer.step()
        stabilizer.save()
        said = [record.getMessage() for record in caplog.records if "`accumulate` was" in record.getMessage()]
        assert bool(said) == (accumulate == 8 and stabilizer.steps == 2), said
