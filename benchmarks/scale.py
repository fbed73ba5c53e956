"""What surefoot costs a step and a rank with 8, 1,024 and 16,384 ranks: measured parts, and a network that is stated.

    python benchmarks/scale.py [--parameters 20e9] [--every-steps 1000] [--quick]

Measured on this machine: the bytes of the collective of a guarded DDP step (two ranks over gloo), the vector of the
replica check for each number of ranks, the log's time and bytes per step, a look of the rank's watch, its file, and the
reading of the files of other ranks. A snapshot and the stall of a checkpoint are those that
`benchmarks/checkpoint_stall.py` measured on an H200, scaled to the bytes of a rank.

Computed from that, for a model of `--parameters` that is sharded over all ranks, with fp32 weights and two moments:
bytes and milliseconds per step and rank. The time of a collective is that of a tree over the stated network:
2 log2(ranks) hops, plus twice its bytes over the bandwidth. It is an estimate, not a measurement.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import surefoot as sf
from surefoot.guard.model_sampling import RANK_STEPS
from surefoot.guard.replica_check import ReplicaCheck
from surefoot.observe.parameters import Layout
from surefoot.record.heartbeat import BeatFile, first_beat, read_beat
from surefoot.record.messages import StepRow
from surefoot.record.movement import MovementMeter

RANKS = (8, 1024, 16384)
HOP_MICROSECONDS, BANDWIDTH = 5.0, 50e9
"""The network: what one hop takes a small message (NCCL over InfiniBand NDR), and bytes per second of one rank."""
STORE_BANDWIDTH = 200e9
"""The file system that all ranks share, bytes per second."""
STEP_SECONDS = 1.0
"""A training step, for what happens by the clock."""
STALL_MS, DEVICE_BYTES_PER_MS, WRITE_BYTES_PER_SECOND = 5.9, 2.11e9, 0.42e9
"""Of `benchmarks/checkpoint_stall.py` on an H200 (2026-11-16), a state of 2.11 GB in some 800 tensors: what is spent in
Python, what the copy on the device takes, and the pace at which one rank writes."""
BYTES_PER_PARAMETER = 12
"""Weights and two moments in fp32."""


@dataclass
class Parts:
    """What was measured."""

    vector_bytes: int = 0
    """The collective of a step that is not checked."""
    log_us: float = 0.0
    log_bytes: float = 0.0
    look_us: float = 0.0
    beat_ms: float = 0.0
    read_us: float = 0.0


def guarded(rank: int, folder: str) -> None:
    """One of two ranks that train; the first writes down how many bytes surefoot's all-reduces hold."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 1))
    stabilizer = sf.TrainingStabilizer(model, torch.optim.AdamW(model.parameters(), fused=True))
    sizes, original = [], dist.all_reduce

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    for _ in range(20):
        stabilizer.backward(model(torch.randn(4, 16)).square().mean())
        stabilizer.step()
    dist.all_reduce = original
    if rank == 0:
        assert len(sizes) == 20, "one collective per step"
        Path(folder, "sizes").write_text(str(min(sizes)))
    dist.barrier()
    dist.destroy_process_group()


def check_numbers(ranks: int) -> int:
    """How many numbers a checked step adds to the collective."""
    model = nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    check = ReplicaCheck(Layout([model], optimizer), optimizer, SimpleNamespace(place=0, count=ranks))  # type: ignore[arg-type]
    sent = check.numbers(0)
    assert sent is not None
    return sent.numel()


def measure_log(parts: Parts, steps: int) -> None:
    with TemporaryDirectory() as folder, sf.RunLog(folder, device_seconds=None) as log:
        taken = 0.0
        for step in range(steps):
            row = StepRow(step, 1e9 + step, loss=1.0 / (step + 1), grad_norm=1.0 + step % 7, lr=1e-3)
            began = time.perf_counter()
            log.take(row)
            taken += time.perf_counter() - began
            if step % 2000 == 1999:
                log.flush()
        log.close()
        parts.log_us = 1e6 * taken / steps
        parts.log_bytes = sum(each.stat().st_size for each in Path(folder).rglob("*") if each.is_file()) / steps


def measure_watch(parts: Parts, files: int) -> None:
    meter = MovementMeter(30.0, 1.0, lambda: 0, lambda: __import__("threading").get_ident())
    parts.look_us = 1e6 * median_of(lambda: meter.look(1.0), 200)
    with TemporaryDirectory() as top:
        folders = [Path(top, f"rank{number}") for number in range(files)]
        for number, folder in enumerate(folders):
            folder.mkdir()
            BeatFile(folder).write(first_beat(number, files))
        file = BeatFile(folders[0])
        beat = first_beat(0, files)
        parts.beat_ms = 1e3 * median_of(lambda: file.write(beat), 50)
        began = time.perf_counter()
        assert all(read_beat(folder) is not None for folder in folders)
        parts.read_us = 1e6 * (time.perf_counter() - began) / files


def median_of(work: Any, times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def state_ms(size: float) -> float:
    """How long training stands still while a state of so many bytes is copied on the device."""
    return STALL_MS + size / DEVICE_BYTES_PER_MS


def collective_ms(ranks: int, size: float) -> float:
    return (2 * math.ceil(math.log2(ranks)) * HOP_MICROSECONDS) / 1e3 + 2e3 * size / BANDWIDTH


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(parts: Parts, given: argparse.Namespace) -> list[str]:
    checked = sum(RANK_STEPS.due(step) for step in range(100_000)) / 100_000
    lines = [row(["per step and rank", *(f"{ranks:,} ranks" for ranks in RANKS)]), "|---|---|---|---|"]
    shard = {ranks: given.parameters * BYTES_PER_PARAMETER / ranks for ranks in RANKS}
    check = {ranks: 4 * check_numbers(ranks) for ranks in RANKS}
    lists = {ranks: 12 * ranks for ranks in RANKS}
    rows: list[tuple[str, Any]] = [
        ("collective, bytes", lambda n: f"{parts.vector_bytes} B"),
        ("collective, time (estimate)", lambda n: f"{collective_ms(n, parts.vector_bytes):.3f} ms"),
        (f"replica check (DDP), bytes at {checked:.2%} of steps", lambda n: f"{check[n]} B"),
        ("the same as a list of all ranks", lambda n: f"{lists[n]:,} B"),
        ("log: training thread", lambda n: f"{parts.log_us / 1e3:.4f} ms"),
        ("log: disk, after 100,000 steps", lambda n: f"{parts.log_bytes:.1f} B"),
        ("watch of ranks: a check per second, other thread", lambda n: f"{parts.look_us / 1e3 * STEP_SECONDS:.2f} ms"),
        ("watch of ranks: a file every 5 s", lambda n: f"{2048 * STEP_SECONDS / 5:.0f} B"),
        ("files written per second, all ranks", lambda n: f"{n / 5:,.0f}"),
        ("first rank: reading all files once", lambda n: f"{parts.read_us * n / 1e6:.2f} s"),
        ("snapshot on the device", lambda n: f"{size_of(shard[n])}, {state_ms(shard[n]):,.1f} ms"),
        ("checkpoint: bytes of a rank", lambda n: size_of(shard[n])),
        ("checkpoint: stall", lambda n: f"{state_ms(shard[n]):,.1f} ms"),
        (f"checkpoint: stall per step, every {given.every_steps:,}",
         lambda n: f"{state_ms(shard[n]) / given.every_steps:.3f} ms"),
        ("checkpoint: written after", lambda n: f"{written(shard[n], n):,.1f} s"),
    ]  # fmt: skip
    return lines + [row([name, *(value(ranks) for ranks in RANKS)]) for name, value in rows]


def written(size: float, ranks: int) -> float:
    """Seconds until a checkpoint is on the disk: the rank's own pace, or that of the file system."""
    return max(size / WRITE_BYTES_PER_SECOND, size * ranks / STORE_BANDWIDTH)


def size_of(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=20e9)
    parser.add_argument("--every-steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="fewer steps and files: the same code in seconds")
    given = parser.parse_args()
    parts = Parts()
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(guarded, args=(folder,), nprocs=2)
        parts.vector_bytes = 4 * int(Path(folder, "sizes").read_text())  # float32 on a GPU
    measure_log(parts, 5_000 if given.quick else 100_000)
    measure_watch(parts, 64 if given.quick else 1024)
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"measured: {', '.join(f'{name} {value:.4g}' for name, value in vars(parts).items())}")
    print(f"network: {HOP_MICROSECONDS:g} us per hop, {BANDWIDTH / 1e9:g} GB/s per rank, tree; file system "
          f"{STORE_BANDWIDTH / 1e9:g} GB/s; {given.parameters:.3g} parameters\n")  # fmt: skip
    print("\n".join(table(parts, given)))


if __name__ == "__main__":
    main()
