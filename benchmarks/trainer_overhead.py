"""What the callback costs in `transformers.Trainer` and Lightning: GPT-2 124M on a GPU, with and without it, in turns.

    python benchmarks/trainer_overhead.py [--repeat 5] [--steps 120] [--only transformers|lightning] [--probes] [--tiny]

Prints one line per framework: the median step without and with the callback over all turns, their ratio, and the ratios
of single turns. A step is measured from one optimizer step to the next, with the device idle at both ends of a block of
ten, so that nothing is added to the steps themselves. Target: 1.02. `--probes` adds the probes of the diagnosis, which
the callback has by default and which cost most in the first steps. `--tiny` is for trying the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import surefoot as sf

BLOCK, WARM_UP = 10, 30
BATCH, LENGTH = 8, 1024


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._count, self._length, self._vocabulary = count, length, vocabulary

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.randint(0, self._vocabulary, (1,), generator=torch.Generator().manual_seed(index))
        ids = (start + torch.arange(self._length)) % self._vocabulary
        return {"input_ids": ids, "labels": ids}


class Blocks:
    """Wall-clock time of blocks of steps, in milliseconds per step."""

    def __init__(self) -> None:
        self._steps, self._began = 0, 0.0
        self.times: list[float] = []

    def stepped(self) -> None:
        self._steps += 1
        if self._steps < WARM_UP or self._steps % BLOCK:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._began:
            self.times.append(1e3 * (now - self._began) / BLOCK)
        self._began = now


def gpt2(tiny: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    shape = small if tiny else {"vocab_size": 50304}
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shape))


def with_transformers(guarded: bool, steps: int, tiny: bool, probes: bool, folder: Path) -> list[float]:
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    transformers.logging.set_verbosity_error()
    blocks, model = Blocks(), gpt2(tiny)

    class Timed(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            blocks.stepped()

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=1e-4, bf16=not tiny,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=50, use_cpu=tiny,
        dataloader_num_workers=0 if tiny else 2,
    )  # fmt: skip
    callbacks: list[Any] = [Timed()]
    if guarded:
        callbacks.append(sf.trainers.transformers.StabilizerCallback(folder / "run", diagnose=probes))
    data = Tokens(BATCH * steps, 32 if tiny else LENGTH, model.config.vocab_size)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return blocks.times


def with_lightning(guarded: bool, steps: int, tiny: bool, probes: bool, folder: Path) -> list[float]:
    import lightning as L
    from lightning.pytorch.callbacks import Callback

    blocks = Blocks()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2(tiny)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=not tiny or None)

    class Timed(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            blocks.stepped()

    callbacks: list[Any] = [Timed()]
    if guarded:
        callbacks.append(sf.trainers.lightning.StabilizerCallback(folder / "run", diagnose=probes))
    trainer = L.Trainer(  # without clipping, which Lightning refuses for a fused optimizer under AMP
        default_root_dir=folder, accelerator="cpu" if tiny else "gpu", devices=1, max_steps=steps, logger=False,
        precision="32-true" if tiny else "bf16-mixed", callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Module()
    data = Tokens(BATCH * steps, 32 if tiny else LENGTH, module.model.config.vocab_size)
    workers = {} if tiny else {"num_workers": 2, "pin_memory": True}
    trainer.fit(module, DataLoader(data, batch_size=BATCH, **workers))
    return blocks.times


FRAMEWORKS = {"transformers": with_transformers, "lightning": with_lightning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--only", choices=sorted(FRAMEWORKS))
    parser.add_argument("--probes", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, train in FRAMEWORKS.items():
        if given.only not in (None, name):
            continue
        times: dict[bool, list[float]] = {False: [], True: []}
        ratios = []
        for turn in range(given.repeat + 1):
            medians = {}
            for guarded in (False, True) if turn % 2 == 0 else (True, False):
                with tempfile.TemporaryDirectory() as folder:
                    found = train(guarded, given.steps, given.tiny, given.probes, Path(folder))
                medians[guarded] = statistics.median(found)
                if turn:  # the first turn warms everything up
                    times[guarded] += found
            if turn:
                ratios.append(medians[True] / medians[False])
        bare, guarded_ms = statistics.median(times[False]), statistics.median(times[True])
        figures = {
            "framework": name,
            "probes": given.probes,
            "bare_ms": round(bare, 3),
            "guarded_ms": round(guarded_ms, 3),
        }
        figures |= {"ratio": round(guarded_ms / bare, 4), "turns": [round(each, 4) for each in ratios], "target": 1.02}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
