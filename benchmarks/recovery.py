"""Which guard brings a run back: the same trainings, the same faults, six ways to run them.

    python benchmarks/recovery.py --jobs 16            # everything, on a machine with 16 cores
    python benchmarks/recovery.py [--steps 600] [--seeds 5] [--models transformer …] [--only "bad batch" …] [--guards …]

Three small trainings (`recovery_tasks.py`): a character transformer, a convolutional network, a policy. At two fifths
of the run one of 14 faults strikes (`recovery_faults.py`). Printed is the held-out loss at the end over that of the
clean run with the same seed, median and worst over the seeds (`nan`: never back):

- bare: the loop as people write it;
- skip only: OLMo-core's published rule, no update when the loss or the gradient norm lies 6 standard deviations above
  the mean of the last 128 steps;
- Lightning: the real `SpikeDetection` callback. It raises; the loop then does what its documentation has in mind, and
  starts again from its last checkpoint (every 100 steps) without the batches it named. After 20 raises it gives up.
- reload: a person who knows when the fault struck and of which kind it was reloads the last checkpoint from before it,
  leaves out bad batches, and repeats the steps. A wrong rate in the schedule is as wrong as before.
- surefoot: `TrainingStabilizer(..., recovery=TrainingRecovery())`, everything else at its default;
- repeat: the same with `TrainingRecovery(repeat=True)` and batches from `resume`.

After the ratios, for surefoot and for repeat: in how many runs it did something about the fault or raised an alarm, how
many steps after the fault (median and latest; `+0` is the step itself), and how many steps were left out, returns made
and steps repeated, all seeds together. At the end: how often each fault was noticed, and the cells that reload reaches
(within 0.5 % of the clean run for every seed) and repeat does not.
Without clipping anywhere, and with `--clip` at a norm of 1.0 everywhere. Every cell is run with the first seed before
any is run with the second one; no run begins after `--seconds`, and a cell shows the seeds that it has. `--json` writes
all runs to a file.
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
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
from recovery_faults import FAULTS, Batch, Fault
from recovery_tasks import TASKS, Policy, Task
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import surefoot as sf

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKPOINT_EVERY = 100
MOST_RAISES = 20
REACHED = 1.005
"""The final loss over that of the clean run up to which a guard has brought a run back."""


class Done(NamedTuple):
    """What surefoot did about a fault in one run."""

    delay: int | None = None
    """Steps from the fault to the first action or alarm; `None` if there was none."""
    left_out: int = 0
    returns: int = 0
    repeated: int = 0
    halted: bool = False


class Ended(NamedTuple):
    """How one run ended."""

    loss: float
    """The held-out loss."""
    done: Done


Seeds = dict[int, Ended]
"""The runs of one cell, by seed."""


class Injector:
    """Puts a fault into the steps it is meant for; an accident into each of them once, also if it is repeated."""

    def __init__(self, task: Task, fault: Fault | None) -> None:
        self.task, self.fault, self.at = task, fault, int(0.4 * task.steps)
        self.until = self.at + (fault.steps if fault is not None else 0)
        self._over = -1  # the last step whose accident has happened

    def _now(self, step: int) -> Fault | None:
        if self.fault is None or not self.at <= step < self.until or (self.fault.is_accident and step <= self._over):
            return None
        return self.fault

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", enabled=self.fault is not None and self.fault.scaled)

    def batch(self, step: int, batch: Batch) -> Batch:
        fault = self._now(step)
        if fault is not None and fault.weights is not None:
            fault.weights(self.task.model)
        return fault.batch(batch) if fault is not None and fault.batch is not None else batch

    def before_step(self, step: int) -> None:
        fault = self._now(step)
        self._over = max(self._over, step)
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


def bare(task: Task, inject: Injector, clip: float | None, allow: Callable[[float, float], bool] | None = None) -> Done:
    """The plain loop; `allow` may leave an update out, given the loss and the gradient norm."""
    scaler = inject.scaler()
    for step in range(task.steps):
        loss = backward(task, inject, step, scaler, clip)
        norm = torch.nn.utils.get_total_norm([p.grad for p in task.model.parameters()]) if allow else None
        if allow is None or allow(float(loss), float(norm)):
            scaler.step(task.optimizer)
        scaler.update()
        task.scheduler.step()
    return Done()


def skip_only(task: Task, inject: Injector, clip: float | None) -> Done:
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


def lightning(task: Task, inject: Injector, clip: float | None) -> Done:
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
                    return Done(returns=raises, halted=True)
                excluded |= set(callback.bad_batches)
                step = saved[0]
                for part, state in zip(parts, copy.deepcopy(saved[1]), strict=True):
                    part.load_state_dict(state)
                continue
            step += 1
    return Done(returns=raises)


def reload(task: Task, inject: Injector, clip: float | None) -> Done:
    """One return to the last checkpoint from before the fault, made when it is over, and without bad batches."""
    parts = (task.model, task.optimizer, task.scheduler)
    scaler, step, returned = inject.scaler(), 0, inject.fault is None
    saved, streams = (0, copy.deepcopy([part.state_dict() for part in parts])), torch.get_rng_state()
    while step < task.steps:
        if step % CHECKPOINT_EVERY == 0 and not (inject.at < step and not returned):
            saved, streams = (step, copy.deepcopy([part.state_dict() for part in parts])), torch.get_rng_state()
        if step == inject.until and not returned:
            returned, step = True, saved[0]
            for part, state in zip(parts, saved[1], strict=True):
                part.load_state_dict(state)
            torch.set_rng_state(streams)
        if returned and inject.fault is not None and inject.fault.batch and inject.at <= step < inject.until:
            task.optimizer._opt_called = True  # type: ignore[attr-defined]
        else:
            backward(task, inject, step, scaler, clip)
            scaler.step(task.optimizer)
            scaler.update()
        task.scheduler.step()
        step += 1
    return Done()


class Numbered(Dataset[Batch]):
    """The batches of a task, one entry each."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __len__(self) -> int:
        return self._task.steps

    def __getitem__(self, number: int) -> Batch:
        return self._task.batch(number)


def surefoot(task: Task, inject: Injector, clip: float | None, repeat: bool = False) -> Done:
    """The same loop under the stabilizer."""
    stabilizer = sf.TrainingStabilizer(
        task.model,
        task.optimizer,
        scheduler=task.scheduler,
        clip=sf.ClipByNorm(clip) if clip else None,
        scaler=sf.DynamicLossScaler() if inject.scaler().is_enabled() else None,
        recovery=sf.TrainingRecovery(repeat=repeat),
        checker=sf.StabilityChecker(setback=None) if isinstance(task, Policy) else None,
    )
    loader = DataLoader(Numbered(task), batch_size=None, generator=torch.Generator())  # draws nothing of the loop's
    for batch in stabilizer.resume(loader):
        step = stabilizer.steps
        loss = task.loss(inject.batch(step, batch))
        stabilizer.backward(loss)
        inject.before_step(step)
        try:
            stabilizer.step()
        except sf.TrainingHalted:
            return _done(stabilizer, inject.at)._replace(halted=True)
    return _done(stabilizer, inject.at)


def _done(stabilizer: sf.TrainingStabilizer, at: int) -> Done:
    """What was done, and how long after the fault it began."""
    noticed = [
        each.step
        for each in stabilizer.incidents
        if each.step >= at and (each.action != "none" or each.severity != "info")
    ]
    counts, kinds = stabilizer.counts, [each.action for each in stabilizer.incidents]
    returns = sum(kinds.count(kind) for kind in ("roll_back", "repeat"))
    return Done(noticed[0] - at if noticed else None, counts["skipped"], returns, counts.get("repeated", 0))


GUARDS: dict[str, Callable[[Task, Injector, float | None], Done]] = {
    "bare": lambda task, inject, clip: bare(task, inject, clip),
    "skip only": skip_only,
    "Lightning": lightning,
    "reload": reload,
    "surefoot": surefoot,
    "repeat": lambda task, inject, clip: surefoot(task, inject, clip, repeat=True),
}


def train(
    model: str, guard: str, fault: str | None, seed: int, steps: int, clip: float | None, until: float
) -> Ended | None:
    """One run to its end; `None` if it would begin after `until`."""
    if time.time() > until:
        return None
    logging.getLogger("surefoot").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    task = TASKS[model](seed, steps)
    done = GUARDS[guard](task, Injector(task, FAULTS[fault] if fault else None), clip)
    return Ended(task.held_out_loss(), done)


def ratios(results: Seeds, clean: Seeds) -> list[float]:
    """The losses over those of the clean runs."""
    return [ended.loss / clean[seed].loss for seed, ended in results.items() if seed in clean]


def cell(results: Seeds, clean: Seeds) -> str:
    """Median and worst ratio. A run that is lost for one seed is lost: nan does not hide behind a median."""
    found = ratios(results, clean)
    if not found:
        return "not run"
    if any(ratio != ratio for ratio in found):
        return "nan"
    return f"{statistics.median(found):.3f} {max(found):.3f}"


def noticed(runs: list[Done]) -> str:
    """In how many runs something was done or reported, and after how many steps."""
    delays = sorted(run.delay for run in runs if run.delay is not None)
    when = f" +{statistics.median(delays):.0f} (+{delays[-1]})" if delays else ""
    return f"{len(delays)}/{len(runs)}{when}"


def summary(runs: list[Done]) -> str:
    """What was done in all runs together."""
    halted = sum(run.halted for run in runs)
    parts = {
        "out": sum(run.left_out for run in runs),
        "returns": sum(run.returns for run in runs),
        "repeated": sum(run.repeated for run in runs),
        "HALTED": halted,
    }
    return ", ".join([noticed(runs), *(f"{count} {name}" for name, count in parts.items() if count)])


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--models", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--guards", nargs="*", choices=list(GUARDS), default=list(GUARDS))
    parser.add_argument("--seconds", type=float, default=86_400.0, help="begin no run after this time")
    parser.add_argument("--json", type=Path, default=None, help="a file for all runs")
    options = parser.parse_args()
    if find_spec("lightning") is None and "Lightning" in options.guards:
        print("lightning is not installed: its column is left out")
        options.guards.remove("Lightning")
    return options


class Cells:
    """Every run of the table, started at once so that no core waits for another, and read in the table's order."""

    def __init__(self, pool: ProcessPoolExecutor, options: argparse.Namespace) -> None:
        until = time.time() + options.seconds
        wanted: list[tuple[str, str, str | None]] = [(model, "bare", None) for model in options.models]
        wanted += list(product(options.models, _by_length(options.guards), options.only))
        self._runs = {
            (*cell, seed): pool.submit(train, *cell, seed, options.steps, options.clip, until)
            for seed in range(options.seeds)
            for cell in wanted
        }

    def of(self, model: str, guard: str, fault: str | None) -> Seeds:
        """The runs of one cell that have begun. Waits for them."""
        found = {key[3]: run.result() for key, run in self._runs.items() if key[:3] == (model, guard, fault)}
        return {seed: ended for seed, ended in found.items() if ended is not None}

    def to_json(self) -> str:
        """All runs, as a list."""
        names, done = ("model", "guard", "fault", "seed"), {key: run.result() for key, run in self._runs.items()}
        return json.dumps(
            [
                dict(zip(names, key, strict=True)) | {"loss": ended.loss, **ended.done._asdict()}
                for key, ended in done.items()
                if ended is not None
            ]
        )


def _by_length(guards: list[str]) -> list[str]:
    """The guards whose runs take longest first: Lightning's loop may start again twenty times."""
    order = ("Lightning", "repeat", "surefoot", "reload")
    return sorted(guards, key=lambda guard: order.index(guard) if guard in order else len(order))


def table(cells: Cells, model: str, options: argparse.Namespace) -> list[str]:
    """Print a line for each fault; returns the cells that reload reaches and repeat does not."""
    clean = cells.of(model, "bare", None)
    print(f"{model}, clean: {', '.join(f'{run.loss:.3f}' for run in clean.values())} after {options.steps} steps")
    print(f"{'final loss / clean, median worst':<40}" + "".join(f"{guard:>15}" for guard in options.guards))
    short = []
    for fault in options.only:
        results = {guard: cells.of(model, guard, fault) for guard in options.guards}
        guards = [guard for guard in ("surefoot", "repeat") if guard in results]
        said = " | ".join(summary([run.done for run in results[guard].values()]) for guard in guards)
        line = "".join(f"{cell(results[guard], clean):>15}" for guard in options.guards)
        print(f"{fault:<40}{line}   {said}", flush=True)
        if results.get("repeat") and results.get("reload") and clean:
            worst, reached = (max(ratios(results[guard], clean)) for guard in ("repeat", "reload"))
            if reached <= REACHED and not worst <= REACHED:
                short.append(f"{model}, {fault}: repeat {worst:.3f}, reload {reached:.3f}")
    return short


def main() -> None:
    options, begun = options_given(), time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        cells = Cells(pool, options)
        short = [each for model in options.models for each in table(cells, model, options)]
        for guard in set(options.guards) & {"surefoot", "repeat"}:
            print(f"noticed by {guard}, all models:")
            for fault in options.only:
                runs = [run.done for model in options.models for run in cells.of(model, guard, fault).values()]
                print(f"  {fault:<40}{noticed(runs)}")
        if options.json is not None:
            options.json.write_text(cells.to_json())
    print(f"cells that reload reaches (worst <= {REACHED}) and repeat does not: {'; '.join(short) or 'none'}")
    print(f"{time.perf_counter() - begun:.0f} s, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")


if __name__ == "__main__":
    main()
