"""What the tests of Transformers train and watch. The module imports Transformers, so only a fixture imports it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from trainers.small_training import AfterSteps


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
