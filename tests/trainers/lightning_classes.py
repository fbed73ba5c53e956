"""What the tests of Lightning train and watch. The module imports Lightning, so only a fixture imports it."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from trainers.small_training import LR, AfterSteps, Classifier


class Module(L.LightningModule):
    """A small classifier, with a schedule that goes on at every optimizer step."""

    def __init__(self, model: Any = None, fused: bool = False, lr: float = LR) -> None:
        super().__init__()
        self.model = Classifier() if model is None else model
        self.fused, self.lr = fused, lr

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, fused=self.fused or None)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Copies(Callback):
    """Copies the state after every optimizer step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.states):
            copies = AfterSteps(module)
            copies(trainer.optimizers[0])
            self.states += copies.states
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
