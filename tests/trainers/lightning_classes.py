"""What the tests of Lightning train and watch. The module imports Lightning, so only a fixture imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from trainers.small_training import LR, AfterSteps, Classifier, Rows

if TYPE_CHECKING:
    from pathlib import Path


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


def train(
    folder: Path,
    *callbacks: Any,
    module: Any = None,
    faults: Any = None,
    resume: Any = None,
    epochs: int = 1,
    **more: Any,
) -> Any:
    torch.manual_seed(1)
    settings: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": epochs} | more
    trainer = L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **settings)
    loader = DataLoader(Rows(320, faults), batch_size=8)
    trainer.fit(Module() if module is None else module, loader, ckpt_path=resume)
    return trainer
