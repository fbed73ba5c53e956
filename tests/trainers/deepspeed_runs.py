"""Training with the real DeepSpeed on a CPU, under `transformers.Trainer` or Accelerate, as a program of its own.

    python deepspeed_runs.py transformers|accelerate FOLDER

Prints what surefoot has logged and what the framework itself knows, as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

STEPS, ACCUMULATE = 6, 2
BAD_ROW = 8 * ACCUMULATE * 4
"""The first row of the step at which the loss is NaN: DeepSpeed applies it, and we must not claim otherwise."""


def without_compiling() -> None:
    """Leave out what DeepSpeed would compile first, which takes minutes: torch's own communication does the same."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def settings() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def train_transformers(folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    import surefoot as sf
    from trainers.small_training import LR, Classifier, Rows

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=ACCUMULATE, max_steps=STEPS,
        learning_rate=LR, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no",
        deepspeed=settings(), logging_nan_inf_filter=False, train_sampling_strategy="sequential", max_grad_norm=1.0,
    )  # fmt: skip
    callback = sf.trainers.transformers.StabilizerCallback(folder / "run")
    rows = Rows(320, {BAD_ROW: float("nan")})
    trainer = Trainer(Classifier(), arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def train_accelerate(folder: Path) -> list[float]:
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    import surefoot as sf
    from trainers.small_training import LR, Classifier, Rows

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings()))
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(Rows(8 * ACCUMULATE * STEPS, {BAD_ROW: float("nan")}), batch_size=8)
    model, optimizer, loader = sf.trainers.accelerate.prepare(accelerator, model, optimizer, loader, log=folder / "run")
    losses: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    sf.trainers.accelerate.end(accelerator)
    return [sum(losses[i : i + ACCUMULATE]) / ACCUMULATE for i in range(0, len(losses), ACCUMULATE)]


class Said(logging.Handler):
    """What surefoot says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(framework: str, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    without_compiling()
    said = Said()
    logging.getLogger("surefoot").addHandler(said)
    losses = {"transformers": train_transformers, "accelerate": train_accelerate}[framework](folder)
    import surefoot as sf

    logged = sf.load_run(folder / "run").scalars["loss"].to_pylist()
    findings = folder / "run" / "findings.json"
    verdict = json.loads(findings.read_text())["verdict"] if findings.exists() else None
    print(json.dumps({"losses": losses, "logged": logged, "said": said.lines, "verdict": verdict}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]))
