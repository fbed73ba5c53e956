"""A training run that is killed again and again, and goes on each time from the framework's last checkpoint.

    python killed.py transformers FOLDER KILLS

imports the framework once and forks a process for each attempt. It prints how the run ended, as JSON, compared with one
that nobody killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, BATCH, SAVE_EVERY = 96, 8, 6
FAULTS = {BATCH * 31: float("nan"), BATCH * 77 + 2: float("nan")}


def report(framework: str, folder: Path, kills: int, imported: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a process of its own finds out."""
    import forked

    path = os.pathsep.join([str(Path(__file__).parents[1]), forked.SOURCE])
    command, environment = [__file__, framework, folder, kills], forked.environment(PYTHONPATH=path)
    found = forked.run(command, env=environment, cwd=folder, imported=imported)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def train_transformers(folder: Path, stepped: Callable[[], None]) -> dict[str, Any]:
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import surefoot as sf
    from trainers.small_training import LR, Classifier, Rows

    class Stepped(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stepped()

    transformers.utils.logging.disable_progress_bar()
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=LR, save_steps=SAVE_EVERY,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=50, seed=3,
    )  # fmt: skip
    callback = sf.trainers.transformers.StabilizerCallback(folder / "run", diagnose=False)
    model = Classifier()
    trainer = Trainer(model, arguments, train_dataset=Rows(BATCH * STEPS, FAULTS), callbacks=[callback, Stepped()])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train(resume_from_checkpoint=_newest_checkpoint(folder))
    return _ended(model, callback.training)


def train_trl(folder: Path, stepped: Callable[[], None]) -> dict[str, Any]:
    import torch
    import transformers
    from datasets import Dataset, disable_progress_bars
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    import surefoot as sf
    from trainers.words import WORDS, tokenizer

    class Stepped(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stepped()

    class Broken(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step in (31, 77) else loss

    disable_progress_bars()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_positions=64, n_embd=16, n_layer=1, n_head=2, **ids))
    rows = Dataset.from_list([{"text": " ".join(f"w{(i + j) % 30}" for j in range(8))} for i in range(4 * STEPS)])
    arguments = SFTConfig(
        str(folder), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=1e-3, save_steps=SAVE_EVERY, seed=3,
        report_to=[], use_cpu=True, disable_tqdm=True, bf16=False, gradient_checkpointing=False, logging_steps=50,
    )  # fmt: skip
    callback = sf.trainers.transformers.StabilizerCallback(folder / "run", diagnose=False)
    callbacks = [callback, Stepped()]
    trainer = Broken(model, arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train(resume_from_checkpoint=_newest_checkpoint(folder))
    return _ended(model, callback.training)


def _newest_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of Transformers that is complete; its last file is `trainer_state.json`."""
    saved = [each for each in folder.glob("checkpoint-*") if (each / "trainer_state.json").exists()]
    newest = max(saved, key=lambda each: int(each.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)


def train_lightning(folder: Path, stepped: Callable[[], None]) -> dict[str, Any]:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch.utils.data import DataLoader

    import surefoot as sf
    from trainers.small_training import LR, Linear, Rows

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Linear()  # without dropout: Lightning does not save the random streams

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    class Stepped(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            stepped()

    callback = sf.trainers.lightning.StabilizerCallback(folder / "run", diagnose=False)
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=1, monitor="step", mode="max")
    trainer = L.Trainer(
        default_root_dir=folder, accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=len(PASSES),
        enable_model_summary=False, callbacks=[callback, saving, Stepped()], reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    module = Module()

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            rows = Rows(BATCH * STEPS, FAULTS)
            return DataLoader(torch.utils.data.Subset(rows, PASSES[self.trainer.current_epoch]), batch_size=BATCH)

    saved = sorted(folder.glob("*.ckpt"), key=lambda each: each.stat().st_mtime)
    trainer.fit(module, datamodule=Data(), ckpt_path=saved[-1] if saved else None)
    return _ended(module.model, callback.training)


def train_accelerate(folder: Path, stepped: Callable[[], None]) -> dict[str, Any]:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    import surefoot as sf
    from trainers.small_training import LR, Linear, Rows

    adapter, accelerator = sf.trainers.accelerate, Accelerator(cpu=True)
    model = Linear()  # without dropout: a loader that begins again draws a number from the stream that was restored
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(Rows(BATCH * STEPS, FAULTS), batch_size=BATCH)
    log = folder / "run"
    model, optimizer, loader = adapter.prepare(accelerator, model, optimizer, loader, log=log, diagnose=False)
    saved = sorted(folder.glob("step-*"), key=lambda each: int(each.name.rpartition("-")[2]))
    begin = 0
    if saved:
        accelerator.load_state(saved[-1])
        begin = int(saved[-1].name.rpartition("-")[2])
    for step, batch in enumerate(accelerator.skip_first_batches(loader, begin), begin + 1):
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            accelerator.save_state(folder / "saving")
            (folder / "saving").rename(folder / f"step-{step}")
        stepped()
    return _ended(model, adapter.training_of(accelerator))


def train_ignite(folder: Path, stepped: Callable[[], None]) -> dict[str, Any]:
    import torch
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import surefoot as sf
    from trainers.small_training import CLASSES, LR, WIDTH, Rows

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    log = folder / "run"
    handler = sf.trainers.ignite.StabilizerHandler(model, optimizer, log, diagnose=False)
    trainer = create_supervised_trainer(model, optimizer, handler.watched(F.cross_entropy))
    handler.attach(trainer)
    things = {"model": model, "optimizer": optimizer, "trainer": trainer, "surefoot": handler}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(things, DiskSaver(folder, require_empty=False)))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, stepped)
    if saved := sorted(folder.glob("checkpoint_*.pt"), key=lambda each: int(each.stem.rpartition("_")[2])):
        Checkpoint.load_objects(things, torch.load(saved[-1]))
    rows = Rows(BATCH * STEPS, FAULTS)

    @trainer.on(Events.EPOCH_STARTED)
    def next_rows(engine: Any) -> None:
        part = PASSES[engine.state.epoch - 1]
        engine.set_data(DataLoader(TensorDataset(rows.x[part], rows.labels[part]), batch_size=BATCH))

    first = DataLoader(TensorDataset(rows.x[PASSES[0]], rows.labels[PASSES[0]]), batch_size=BATCH)
    if trainer.state.epoch < len(PASSES):  # an engine that has ended would begin again
        trainer.run(first, max_epochs=len(PASSES))
    return _ended(model, handler.training)


PASSES = [range(i, min(i + BATCH * SAVE_EVERY, BATCH * STEPS)) for i in range(0, BATCH * STEPS, BATCH * SAVE_EVERY)]
"""The rows of each epoch, where a framework saves after epochs."""


def _ended(model: Any, training: Any) -> dict[str, Any]:
    """The weights, and the counts of the guard, unless the run was killed after its last step: there is none then."""
    if training is None:
        return {"weights": model.state_dict()}
    counts = training.attachments[0].counts
    return {"weights": model.state_dict(), "steps": counts["steps"], "skipped": counts["skipped"]}


def _preload_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: F401


def _preload_trl() -> None:
    _preload_transformers()
    from trl import SFTConfig, SFTTrainer  # noqa: F401


def _preload_lightning() -> None:
    import lightning.pytorch  # noqa: F401


def _preload_accelerate() -> None:
    import accelerate  # noqa: F401


def _preload_ignite() -> None:
    import ignite.handlers  # noqa: F401


FRAMEWORKS = {
    "transformers": (train_transformers, _preload_transformers),
    "trl": (train_trl, _preload_trl),
    "lightning": (train_lightning, _preload_lightning),
    "accelerate": (train_accelerate, _preload_accelerate),
    "ignite": (train_ignite, _preload_ignite),
}
"""What trains, and what imports the framework before processes are forked."""


def preload(framework: str) -> Callable[..., Any]:
    """Import a framework before processes are forked; returns the function that trains with it."""
    train, imports = FRAMEWORKS[framework]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        imports()
        import_module(f"surefoot.trainers.{'transformers' if framework == 'trl' else framework}")
    return train


def attempt(train: Callable[..., Any], folder: Path, kill_after: int | None, delay_s: float = 0.0) -> bool:
    """Train in a forked process, which is killed after so many steps and seconds; returns whether it was."""
    import torch

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            torch.save(train(folder, lambda: os.write(writing, b".")), folder / "ended.pt")
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writing)
    steps = 0
    while (kill_after is None or steps < kill_after) and os.read(reading, 1):
        steps += 1
    if steps == kill_after:
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    assert kill_after is not None or status == 0, "training failed"
    return os.WIFSIGNALED(status)


def logged_steps(folder: Path) -> list[int]:
    """The steps in the run log of a training."""
    import surefoot as sf

    return sf.load_run(folder / "run").scalars.column("step").to_pylist()


def main(framework: str, folder: Path, kills: int) -> None:
    train = preload(framework)
    import torch

    from trainers.small_training import same

    chance, done = random.Random(7), 0
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    attempt(train, folder / "whole", None)
    while done < kills:
        if not attempt(train, folder / "killed", chance.randint(1, 2 * SAVE_EVERY + 1)):
            break
        done += 1
    attempt(train, folder / "killed", None)
    one, other = (torch.load(folder / name / "ended.pt") for name in ("whole", "killed"))
    equal = same(one["weights"], other["weights"])
    found = {"kills": done, "steps": other["steps"], "skipped": other["skipped"], "equal": equal}
    print(json.dumps(found | {"logged": logged_steps(folder / "killed") == list(range(STEPS))}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
