"""What the guard costs in a step of DDP: time, collectives and bytes, over gloo.

    python benchmarks/ddp_step.py [--ranks 2] [--rounds 30] [--steps 4] [--width 1300]

A network of about ten million parameters is trained bare and guarded, the two taking turns: `--steps` steps of one,
then as many of the other, `--rounds` times, each round beginning with the other one. The ratio is that of the medians
over rounds, and beside it stands the spread of single rounds, which shows how quiet the machine was: where it is wider
than the cost, the ratio means little. Two copies of the bare loop are compared in the same way, as a yardstick, and
the bare loop with one more all-reduce of 64 bytes, which is the least that an agreement of the ranks can cost. CPU
times are compared as well, because other processes change them far less than the time that passes: that of the whole
process, whose threads average the gradients, and that of the training thread alone.

Collectives are counted by torch's profiler, which sees those that DDP starts too; bytes are those that surefoot sends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import surefoot as sf

if TYPE_CHECKING:
    from collections.abc import Callable


WARM_UP = 60
"""Steps before the measurement. In the first steps, replicas are compared often; later in 0.1 % of steps."""


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(
        nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())))
    )


LOOPS = {
    "bare": "bare",
    "again": "a second bare one",
    "agreeing": "bare with one more all-reduce",
    "guarded": "guarded",
}
CLOCKS = {
    "time": time.perf_counter,
    "CPU time of the process": time.process_time,
    "CPU time of the training thread": time.thread_time,
}


def loop(width: int, rows: int, kind: str) -> Callable[[], None]:
    """One step of a new training."""
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stabilizer = sf.TrainingStabilizer(model, optimizer) if kind == "guarded" else None
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        loss = model(x).square().mean()
        if stabilizer is not None:
            stabilizer.backward(loss)
            stabilizer.step()
        else:
            loss.backward()
            if kind == "agreeing":
                dist.all_reduce(torch.zeros(8, dtype=torch.float64))
            optimizer.step()
            optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], steps: int) -> list[float]:
    """What a step takes, by each clock."""
    dist.barrier()
    began = [clock() for clock in CLOCKS.values()]
    for _ in range(steps):
        step()
    return [(clock() - before) / steps for clock, before in zip(CLOCKS.values(), began, strict=True)]


def collectives(step: Callable[[], None]) -> int:
    """How many collectives one step starts."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.name.startswith("gloo:") for event in profile.events())


def bytes_sent(step: Callable[[], None]) -> int:
    """How many bytes the collectives of surefoot's own hold."""
    found, original = [], dist.all_reduce

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        step()
    finally:
        dist.all_reduce = original
    return sum(found)


def work(rank: int, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=given.ranks)
    steps = {name: loop(given.width, given.rows, name) for name in LOOPS}
    for step in steps.values():
        seconds(step, WARM_UP)
    taken: dict[str, list[list[float]]] = {name: [] for name in steps}
    for turn in range(given.rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(seconds(steps[name], given.steps))
    counts = {name: collectives(steps[name]) for name in ("bare", "guarded")}
    sent = bytes_sent(steps["guarded"])
    if rank == 0:
        report(given, taken, counts, sent)
    dist.barrier()
    dist.destroy_process_group()


def report(given: argparse.Namespace, taken: dict[str, list[list[float]]], counts: dict[str, int], sent: int) -> None:
    size = 6 * given.width * (given.width + 1)
    print(f"{size:,} parameters, {given.ranks} ranks over gloo, {given.rounds} rounds of {given.steps} steps, torch "
          f"{torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")  # fmt: skip
    for kind, words in enumerate(CLOCKS):
        times = {name: [each[kind] for each in found] for name, found in taken.items()}
        bare = statistics.median(times["bare"])
        print(f"{words}: bare step {1e3 * bare:.1f} ms")
        for name in list(LOOPS)[1:]:
            ratios = sorted(one / other for one, other in zip(times[name], times["bare"], strict=True))
            low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
            print(f"  {LOOPS[name]} / bare: "
                  f"{statistics.median(times[name]) / bare:.3f} of medians, {statistics.median(ratios):.3f} median of "
                  f"rounds, {low:.2f} to {high:.2f} in 80 % of rounds")  # fmt: skip
    print(f"collectives per step: bare {counts['bare']}, guarded {counts['guarded']}; surefoot's own hold {sent} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=1300)
    parser.add_argument("--rows", type=int, default=32)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(work, args=(given, folder), nprocs=given.ranks)


if __name__ == "__main__":
    main()
