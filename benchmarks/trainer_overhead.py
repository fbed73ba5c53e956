"""What the callback costs in `transformers.Trainer` and Lightning: GPT-2 124M on a GPU, with and without it, in turns.

    python benchmarks/trainer_overhead.py [--repeat 5] [--steps 240] [--seconds 300] [--only FRAMEWORK] [--tiny]

The variants are the bare trainer, the callback without the probes of the diagnosis, and the callback as it is by
default, with them. Prints one line per framework and variant: the median step over all turns after the first 120 steps,
its ratio to the bare one, the ratios of single turns, the ratio of the means, which includes the sampled steps of the
probes, and the same two ratios for the steps before: the log has every layer of the first 100 steps, the probes observe
the first 64, and most of the sampled ones are among them. A step is measured from one optimizer step to the next, with
the device idle at both ends of a block of ten, so that nothing is added to the steps themselves. Target: 1.02. A
framework begins no turn after `--seconds`. `--tiny` is for trying the script on a CPU.
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
FIRST_BLOCKS = 9
"""The blocks before step 120, in which more is observed than afterwards."""
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


def with_transformers(variant: str, steps: int, tiny: bool, folder: Path) -> list[float]:
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
    if variant != "bare":
        callbacks.append(sf.trainers.transformers.StabilizerCallback(folder / "run", probes=variant == "probes"))
    data = Tokens(BATCH * steps, 32 if tiny else LENGTH, model.config.vocab_size)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return blocks.times


def with_lightning(variant: str, steps: int, tiny: bool, folder: Path) -> list[float]:
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
    if variant != "bare":
        callbacks.append(sf.trainers.lightning.StabilizerCallback(folder / "run", probes=variant == "probes"))
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
VARIANTS = ("bare", "guard", "probes")


def measure(name: str, repeat: int, steps: int, tiny: bool, end: float) -> dict[str, list[list[float]]]:
    """The times of the blocks of every turn, by variant. The order changes from turn to turn."""
    found: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    for turn in range(-1, repeat):  # the first one warms everything up
        if turn > 0 and time.perf_counter() > end:
            break
        for variant in VARIANTS[:: 1 if turn % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                times = FRAMEWORKS[name](variant, steps if turn >= 0 else WARM_UP + BLOCK, tiny, Path(folder))
            if turn >= 0:
                found[variant].append(times)
    return found


def ratios(ours: list[list[float]], bare: list[list[float]]) -> tuple[float, float, list[float]]:
    """The ratio of the medians, that of the means, and that of the medians of each turn."""
    one, other = ([each for turn in turns for each in turn] for turns in (ours, bare))
    by_turn = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(ours, bare, strict=True)]
    middle, mean = statistics.median(one) / statistics.median(other), statistics.mean(one) / statistics.mean(other)
    return round(middle, 4), round(mean, 4), [round(each, 4) for each in by_turn]


def print_figures(name: str, found: dict[str, list[list[float]]]) -> None:
    """One line per variant of the callback."""
    first = {variant: [turn[:FIRST_BLOCKS] for turn in turns] for variant, turns in found.items()}
    later = {variant: [turn[FIRST_BLOCKS:] for turn in turns] for variant, turns in found.items()}
    middle = {variant: statistics.median(each for turn in turns for each in turn) for variant, turns in later.items()}
    for variant in VARIANTS[1:]:
        ratio, mean, turns = ratios(later[variant], later["bare"])
        figures = {"framework": name, "variant": variant, "bare_ms": round(middle["bare"], 3)}
        figures |= {"ms": round(middle[variant], 3), "ratio": ratio, "target": 1.02, "turns": turns, "mean_ratio": mean}
        ratio, mean, _ = ratios(first[variant], first["bare"])
        print(json.dumps(figures | {"first_ratio": ratio, "first_mean_ratio": mean}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", choices=sorted(FRAMEWORKS))
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in FRAMEWORKS if given.only is None else [given.only]:
        end = time.perf_counter() + given.seconds
        print_figures(name, measure(name, given.repeat, given.steps, given.tiny, end))


if __name__ == "__main__":
    main()
