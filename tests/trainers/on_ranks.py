"""One rank of a `transformers.Trainer` under DDP, guarded, and resumed once; prints what became of it as JSON."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

STEPS = 16
BAD_BATCH = 8 * 37
"""The first row of a batch that only one rank gets."""


class Warned(logging.Handler):
    """What surefoot says about a training that cannot go on with its rules, or cannot return to earlier weights."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages += [
            part for part in ("start without history", "recovery is disabled") if part in record.getMessage()
        ]


def train(folder: Path, name: str, resume: str | None = None, **options: Any) -> Any:
    import transformers
    from transformers import Trainer, TrainingArguments

    import surefoot as sf
    from trainers.small_training import LR, Classifier, Rows

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    callback = sf.trainers.transformers.StabilizerCallback(folder / name, **options)
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=STEPS, learning_rate=LR,
        report_to=[], use_cpu=True, disable_tqdm=True, save_steps=6, max_grad_norm=0.5, ddp_backend="gloo",
        train_sampling_strategy="sequential", save_total_limit=None,
    )  # fmt: skip
    rows = Rows(640, {BAD_BATCH: float("nan")})
    model = Classifier()
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return model.state_dict(), callback.training.attachments[0]


def main(folder: Path) -> None:
    import torch

    from surefoot.trainers import guarded_training
    from trainers.small_training import same

    torch.set_num_threads(1)
    whole, guard = train(folder, "run")
    again, resumed = train(folder, "again", str(folder / "checkpoint-6"))
    train(folder, "watched", mode="watch", recovery=None)
    if torch.distributed.get_rank() == 1:
        for state in (folder / "checkpoint-12").glob("surefoot-rank1-of-*"):
            shutil.rmtree(state)
        guarded_training.SHARE_OF_HOST = 0.0  # copies do not fit, on this rank
    warned = Warned()
    guarded_training.logger.addHandler(warned)
    anew = train(folder, "anew", str(folder / "checkpoint-12"))[1]
    skipped = [i for i, record in enumerate(guard.history) if record.skipped]
    equal = same(whole, again) and guard.counts == resumed.counts
    weights = sum(parameter.double().sum().item() for parameter in whole.values())
    found = {"steps": guard.steps, "skipped": skipped, "resumed_equal": equal, "weights": weights}
    found |= {"steps_anew": anew.steps, "warned_anew": len(warned.messages)}
    print(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
