"""What saving costs a run while it trains, beside `torch.save` and `torch.distributed.checkpoint.async_save`.

    python benchmarks/checkpoint_stall.py [--small]

A GPT of 176M parameters with AdamW trains on the GPU: 2.1 GB of parameters and moments. Printed, each with peak
GPU memory:

- the stall of one checkpoint: from a device that has caught up until training could go on, the host and the stream it
  trains on (P5). Of `async_save` the first call and a later one, since the first allocates.
- what a checkpoint costs in all: the time of 40 steps with one, minus that of 40 without, while it is being written.
- a return to a snapshot of the same state, on the device and in pinned host memory (P6), and taking one.

Without a GPU the same on the CPU, where staging is a copy and is the stall.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import statistics
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import torch
from gpt import GPT, TINY, Shape

import surefoot as sf
from surefoot.keep.snapshots import SnapshotRing, TrainedState
from surefoot.keep.staging import bytes_of, stage

if TYPE_CHECKING:
    from collections.abc import Callable

GPT_176M = Shape(16, 832, 13)
STEPS = 40


class Training:
    """A GPT, its optimizer and a batch; `step` trains it."""

    def __init__(self, shape: Shape, device: str, **settings: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = GPT(shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        self.stabilizer = sf.TrainingStabilizer(self.model, self.optimizer, precision="bf16", **settings)
        rows = 8 if device == "cuda" else 2
        self.ids = torch.randint(shape.vocabulary, (rows, shape.context), device=device)

    def step(self) -> None:
        with self.stabilizer.autocast():
            loss = self.model(self.ids, self.ids)
        self.stabilizer.backward(loss)
        self.stabilizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def catch_up() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def milliseconds(work: Callable[[], Any], times: int = 1, before: Callable[[], Any] = lambda: None) -> float:
    """Median time until the host has returned and the training stream is done."""
    seen = []
    for _ in range(times):
        before()
        catch_up()
        start = time.perf_counter()
        work()
        catch_up()
        seen.append((time.perf_counter() - start) * 1e3)
    return statistics.median(seen)


def peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else float("nan")


def report(name: str, value: float, unit: str = "ms", note: str = "") -> None:
    print(f"{name:<62}{value:>10.2f} {unit}   {note}", flush=True)


def walk() -> None:
    """Host time to copy a state of about 800 small tensors on the CPU: what is left of a stall beside the memory."""
    training = Training(Shape(16, 16, 1, vocabulary=64, context=64), "cpu")
    training.step()
    state = training.state()
    seen = []
    for _ in range(100):
        start = time.perf_counter()
        stage(state, "device")
        seen.append((time.perf_counter() - start) * 1e3)
    report(f"copy of {len(training.optimizer.state) * 4} small tensors on the CPU: host time", min(seen))


def stalls(training: Training, folder: Path) -> None:
    """The stall of one save, three ways."""
    manager = sf.CheckpointManager(folder / "surefoot", every_steps=1, keep_last=1)

    def save() -> None:
        state = training.state()
        manager.save(state, save.step, staged=stage(state, "device"))  # type: ignore[attr-defined]
        save.step += 1  # type: ignore[attr-defined]

    save.step = 1  # type: ignore[attr-defined]
    reset_peak()
    first = milliseconds(save)
    ours = milliseconds(save, 5, before=lambda: (manager.wait(), training.step()))
    manager.wait()
    report("stall, surefoot (first)", first)
    report(
        "stall, surefoot", ours, note=f"peak {peak_gb():.2f} GB; write took {write_seconds(manager, training):.1f} s"
    )
    theirs, note = async_save_stall(training, folder)
    report("stall, torch.distributed.checkpoint.async_save", theirs, note=note)
    reset_peak()
    plain = milliseconds(lambda: torch.save(training.state(), folder / "plain.pt"), 3)
    report("stall, torch.save", plain, note=f"peak {peak_gb():.2f} GB")
    report("P5: stall / async_save", ours / theirs, "", "target 0.05, and 5 ms")


def write_seconds(manager: sf.CheckpointManager, training: Training) -> float:
    start = time.perf_counter()
    manager.save(training.state(), 10**6, blocking=True)
    return time.perf_counter() - start


def async_save_stall(training: Training, folder: Path) -> tuple[float, str]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    backend = "cpu:gloo,cuda:nccl" if training.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    pending: list[Any] = []

    def finish() -> None:
        for each in pending:
            getattr(each, "upload_completion", each).result()
        pending.clear()
        training.step()

    number = iter(range(100))

    def save() -> None:
        pending.append(dcp.async_save(training.state(), checkpoint_id=str(folder / f"dcp-{next(number)}")))

    reset_peak()
    first = milliseconds(save)
    later = milliseconds(save, 3, before=finish)
    finish()
    dist.destroy_process_group()
    return later, f"first {first:.0f} ms, peak {peak_gb():.2f} GB"


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def in_all(shape: Shape, device: str, folder: Path, steps: int) -> None:
    """Windows of steps with a checkpoint in each against windows without, taking turns."""
    manager = sf.CheckpointManager(folder / "run", every_steps=steps)
    training = {"without": Training(shape, device), "with": Training(shape, device, checkpoints=manager)}
    seen: dict[str, list[float]] = {name: [] for name in training}

    def window(run: Training) -> None:
        for _ in range(steps):
            run.step()

    for run in training.values():
        window(run)
    for _ in range(4):
        for name, run in training.items():
            seen[name].append(milliseconds(lambda run=run: window(run)))
    manager.wait()
    without, with_one = (statistics.median(seen[name]) for name in ("without", "with"))
    report(f"{steps} steps", without)
    report(f"{steps} steps with a checkpoint among them", with_one, note=f"costs {with_one - without:.1f} ms in all")


def snapshots(training: Training) -> None:
    """Taking a snapshot, and returning to it."""
    state = TrainedState([training.model], training.optimizer, list, lambda rules: None)
    for place, limit, target in (("device", 10**12, 5), ("pinned host memory", 0, 60)):
        ring = SnapshotRing(state, every_steps=1, keep=1, device_bytes=limit)
        reset_peak()
        ring.take(0)
        catch_up()
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        take = milliseconds(lambda ring=ring: ring.take(0), 5, before=training.step)
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        before = copy.deepcopy(training.state())
        training.step()
        back = milliseconds(lambda ring=ring: ring.return_to(0, 0, keep_present=False), 5, before=training.step)
        same = all(
            torch.equal(a, b) for a, b in zip(before["model"].values(), training.state()["model"].values(), strict=True)
        )
        report(f"snapshot to {place}: until training goes on", take, note=f"peak {peak_gb():.2f} GB")
        report(f"P6: return from {place}", back, note=f"target {target} ms; bitwise: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of a few MB")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = TINY if options.small or device == "cpu" else GPT_176M
    folder = Path(mkdtemp(prefix="surefoot-stall-"))
    try:
        training = Training(shape, device)
        training.step()
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
        report("state", bytes_of(training.state()) / 1e9, "GB")
        walk()
        stalls(training, folder)
        snapshots(training)
        del training
        in_all(shape, device, folder, STEPS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
