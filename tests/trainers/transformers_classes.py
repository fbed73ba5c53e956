"""What the tests of Transformers train and watch. The module imports Transformers, so only a fixture imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from trainers.small_training import LR, AfterSteps, Classifier, Rows

if TYPE_CHECKING:
    from pathlib import Path


class InOrder(Trainer):
    """Trains on the rows in their order, so that a test knows the step of each."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Copies(TrainerCallback):
    """Copies the state after every optimizer step, as the trainer sees it."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.rates: list[float] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        copies = AfterSteps(kwargs["model"])
        copies(kwargs["optimizer"])
        self.states += copies.states
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])


def train(
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    faults: dict[int, float] | None = None,
    resume: Any = None,
    optimizer: Any = None,
    rows: Any = None,
    trainer_class: Any = InOrder,
    **more: Any,
) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "max_steps": 40,
        "learning_rate": LR,
        "logging_steps": 5,
        "save_strategy": "no",
        "seed": 3,
    }
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True} | more
    arguments = TrainingArguments(str(folder), **settings)
    model = Classifier() if model is None else model
    trainer = trainer_class(
        model,
        arguments,
        train_dataset=Rows(320, faults) if rows is None else rows,
        eval_dataset=Rows(40),
        callbacks=list(callbacks),
        optimizers=(optimizer, None),
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
