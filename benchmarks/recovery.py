"""Which guard brings a run back: the same training, the same faults, five ways to run it.

    python benchmarks/recovery.py [--steps 600] [--seeds 3] [--only "bad batch"]

A small character transformer learns the standard library's own text. At two fifths of the run a fault strikes. Printed
is the held-out loss at the end over that of the clean run with the same seed (median over seeds; `nan`: never back):

- bare: the loop as people write it;
- skip only: OLMo-core's published rule, no update when the loss or the gradient norm lies 6 standard deviations above
  the mean of the last 128 steps;
- Lightning: the real `SpikeDetection` callback. It raises; the loop then does what its documentation has in mind, and
  starts again from its last checkpoint (every 100 steps) without the batches it named. After 20 raises it gives up.
- surefoot: `TrainingStabilizer(..., recovery=TrainingRecovery())`, everything else at its default.

Without clipping anywhere, and with `--clip` at a norm of 1.0 everywhere.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from recovery_faults import FAULTS, Batch, Fault
from torch import Tensor, nn

import surefoot as sf

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

CONTEXT, WIDTH, ROWS = 48, 64, 24
CHECKPOINT_EVERY = 100
MOST_RAISES = 20


class Characters(nn.Module):
    """A two-layer transformer over characters."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x) + self.places, mask=self.mask, is_causal=True))


class Task:
    """Model, optimizer, schedule and data of one seed."""

    def __init__(self, seed: int, steps: int) -> None:
        text = "".join(Path(module.__file__ or "").read_text("utf-8") for module in (argparse, json, logging))
        alphabet = {char: i for i, char in enumerate(sorted(set(text)))}
        self.text = torch.tensor([alphabet[char] for char in text])
        torch.manual_seed(seed)
        self.model = Characters(len(alphabet))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = sf.warmup_cosine(self.optimizer, warmup_steps=steps // 20, total_steps=steps)
        self.seed, self.steps = seed, steps

    def batch(self, number: int, held_out: bool = False) -> Batch:
        """Batch by number, so that every guard sees the same one at the same step."""
        split = int(0.9 * len(self.text))
        low, high = (split, len(self.text) - CONTEXT - 1) if held_out else (0, split - CONTEXT - 1)
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + number)
        rows = torch.randint(low, high, (ROWS, 1), generator=generator) + torch.arange(CONTEXT + 1)
        return self.text[rows[:, :-1]], self.text[rows[:, 1:]]

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return statistics.fmean(float(self.loss(self.batch(-1 - i, held_out=True))) for i in range(20))


class Injector:
    """Puts a fault into the steps it is meant for. Faults count in steps of the loop, whatever becomes of them."""

    def __init__(self, task: Task, fault: Fault | None) -> None:
        self.task, self.fault, self.at = task, fault, int(0.4 * task.steps)

    def _now(self, step: int) -> Fault | None:
        return self.fault if self.fault is not None and self.at <= step < self.at + self.fault.steps else None

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", enabled=self.fault is not None and self.fault.scaled)

    def batch(self, step: int, batch: Batch) -> Batch:
        fault = self._now(step)
        if fault is not None and fault.weights is not None:
            fault.weights(self.task.model)
        return fault.batch(batch) if fault is not None and fault.batch is not None else batch

    def before_step(self, step: int) -> None:
        fault = self._now(step)
        if fault is None:
            return
        if fault.gradients is not None:
            fault.gradients(self.task.model)
        if fault.optimizer is not None:
            fault.optimizer(self.task.optimizer)
        for group in self.task.optimizer.param_groups:
            group["lr"] *= fault.lr  # the schedule sets it anew after the step


def backward(task: Task, inject: Injector, step: int, scaler: torch.amp.GradScaler, clip: float | None) -> Tensor:
    """One batch of a plain loop up to the update; the scaler does nothing unless the fault wants one."""
    loss = task.loss(inject.batch(step, task.batch(step)))
    task.optimizer.zero_grad()
    scaler.scale(loss).backward()
    inject.before_step(step)
    scaler.unscale_(task.optimizer)
    if clip:
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), clip)
    return loss.detach()


def bare(task: Task, inject: Injector, clip: float | None, allow: Callable[[float, float], bool] | None = None) -> str:
    """The plain loop; `allow` may leave an update out, given the loss and the gradient norm."""
    scaler = inject.scaler()
    for step in range(task.steps):
        loss = backward(task, inject, step, scaler, clip)
        norm = torch.nn.utils.get_total_norm([p.grad for p in task.model.parameters()]) if allow else None
        if allow is None or allow(float(loss), float(norm)):
            scaler.step(task.optimizer)
        scaler.update()
        task.scheduler.step()
    return ""


def skip_only(task: Task, inject: Injector, clip: float | None) -> str:
    """OLMo-core's rule: every value enters the window, and a value is compared once half of it is filled."""
    losses: list[float] = []
    norms: list[float] = []

    def usual(values: list[float], value: float) -> bool:
        values.append(value)
        del values[:-129]
        before = torch.tensor(values[:-1], dtype=torch.float64)
        if len(before) < 64:
            return True
        return bool(value - before.mean() <= 6 * before.std())

    return bare(task, inject, clip, lambda loss, norm: usual(losses, loss) & usual(norms, norm))


def lightning(task: Task, inject: Injector, clip: float | None) -> str:
    """Lightning's callback, and a restart from the last checkpoint without the named batches at every raise."""
    from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException

    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), barrier=lambda: None, reduce_boolean_decision=lambda flag, all: flag
    )
    fabric = SimpleNamespace(strategy=strategy, global_rank=0)
    parts = (task.model, task.optimizer, task.scheduler)
    scaler, raises, step, excluded = inject.scaler(), 0, 0, set[int]()
    with TemporaryDirectory() as folder:
        callback = SpikeDetection(exclude_batches_path=str(Path(folder) / "skip.json"))
        saved = (0, copy.deepcopy([part.state_dict() for part in parts]))
        while step < task.steps:
            if step % CHECKPOINT_EVERY == 0:
                saved = (step, copy.deepcopy([part.state_dict() for part in parts]))
            if step in excluded:
                step += 1
                continue
            loss = backward(task, inject, step, scaler, clip)
            scaler.step(task.optimizer)
            scaler.update()
            task.scheduler.step()
            try:
                callback.on_train_batch_end(fabric, loss, None, step)
            except TrainingSpikeException:
                raises += 1
                if raises > MOST_RAISES:
                    return f"gave up after {MOST_RAISES} raises"
                excluded |= set(callback.bad_batches)
                step = saved[0]
                for part, state in zip(parts, copy.deepcopy(saved[1]), strict=True):
                    part.load_state_dict(state)
                continue
            step += 1
    return f"{raises} raises"


def surefoot(task: Task, inject: Injector, clip: float | None) -> str:
    """The same loop under the stabilizer."""
    stabilizer = sf.TrainingStabilizer(
        task.model,
        task.optimizer,
        scheduler=task.scheduler,
        clip=sf.ClipByNorm(clip) if clip else None,
        scaler=sf.DynamicLossScaler() if inject.scaler().is_enabled() else None,
        recovery=sf.TrainingRecovery(),
    )
    for step in range(task.steps):
        loss = task.loss(inject.batch(step, task.batch(step)))
        stabilizer.backward(loss)
        inject.before_step(step)
        try:
            stabilizer.step()
        except sf.TrainingHalted:
            return "halted"
    returns = [incident for incident in stabilizer.incidents if incident.action in ("roll_back", "take_back")]
    return f"{stabilizer.counts['skipped']} skipped, {len(returns)} returns"


GUARDS: dict[str, Callable[[Task, Injector, float | None], str]] = {
    "bare": lambda task, inject, clip: bare(task, inject, clip),
    "skip only": skip_only,
    "Lightning": lightning,
    "surefoot": surefoot,
}


def final_loss(guard: str, fault: str | None, seed: int, steps: int, clip: float | None) -> tuple[float, str]:
    """The held-out loss at the end, and what the guard did."""
    logging.getLogger("surefoot").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    task = Task(seed, steps)
    said = GUARDS[guard](task, Injector(task, FAULTS[fault] if fault else None), clip)
    return task.held_out_loss(), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--guards", nargs="*", choices=list(GUARDS), default=list(GUARDS))
    options = parser.parse_args()
    if find_spec("lightning") is None and "Lightning" in options.guards:
        print("lightning is not installed: its column is left out")
        options.guards.remove("Lightning")
    begun, seeds = time.perf_counter(), range(options.seeds)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:

        def start(guard: str, fault: str | None) -> list[Future[tuple[float, str]]]:
            return [pool.submit(final_loss, guard, fault, seed, options.steps, options.clip) for seed in seeds]

        clean_runs = start("bare", None)
        runs = {(fault, guard): start(guard, fault) for fault in options.only for guard in options.guards}
        clean = [run.result()[0] for run in clean_runs]
        print(f"clean: held-out loss {', '.join(f'{loss:.3f}' for loss in clean)} after {options.steps} steps")
        print(f"{'final loss / clean':<36}" + "".join(f"{guard:>12}" for guard in options.guards) + "   surefoot did")
        for fault in options.only:
            cells, said = [], ""
            for guard in options.guards:
                results = [run.result() for run in runs[fault, guard]]
                ratios = [loss / reference for (loss, _), reference in zip(results, clean, strict=True)]
                # A run that is lost for one seed is lost: nan does not hide behind a median.
                lost = any(ratio != ratio for ratio in ratios)
                cells.append(float("nan") if lost else statistics.median(ratios))
                said = " | ".join(text for _, text in results)
            print(f"{fault:<36}" + "".join(f"{cell:>12.3f}" for cell in cells) + f"   {said}", flush=True)
    print(f"{time.perf_counter() - begun:.0f} s, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")


if __name__ == "__main__":
    main()
