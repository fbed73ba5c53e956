"""What the comparison of replicas costs in a training with DDP: time of a step, of one comparison, and its share.

    python benchmarks/fingerprint_cost.py [--device cuda] [--rounds 5] [--steps 20]

One process trains a GPT-2 of 124 million parameters with DDP over NCCL and a fused AdamW (on the CPU a tiny one over
gloo). A comparison takes a fingerprint of every parameter and of the optimizer's state, and adds a few numbers to the
all-reduce in which ranks agree. Rounds of plain steps and of steps with a comparison take turns; the time of a
comparison is the difference of the medians. The share follows from it and from the steps at which replicas are
compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from gpt import GPT, GPT_124M, TINY
from torch.nn.parallel import DistributedDataParallel

from surefoot.decide.agreement import Ranks, agree_and_average
from surefoot.guard.model_sampling import RANK_STEPS
from surefoot.guard.replica_check import ReplicaCheck
from surefoot.observe.parameters import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = (1_000, 10_000, 100_000)
"""The lengths of the runs whose share is printed."""


def training(device: torch.device, rows: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """One step, and the same with a comparison of replicas before it; each with the agreement of the guard."""
    shape = GPT_124M if device.type == "cuda" else TINY
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(shape).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(shape.vocabulary, (rows, shape.context), device=device)
    check, flags = ReplicaCheck(Layout([model], optimizer), optimizer, Ranks(dist.group.WORLD, device)), [False] * 5

    def step(compares: bool) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(ids, ids.roll(-1, 1))
        loss.backward()
        numbers = check.numbers(0) if compares else None  # 0 is a step at which replicas are compared
        agree_and_average(flags, loss, device, dist.group.WORLD, numbers)
        if numbers is not None:
            check.take(0, numbers)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: step(False), lambda: step(True)


def seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """The time of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8)
    given = parser.parse_args()
    device = torch.device(given.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        plain, comparing = training(device, given.rows)
        for step in (plain, comparing):
            seconds(step, 5, device)
        pairs = [[seconds(each, given.steps, device) for each in (plain, comparing)] for _ in range(given.rounds)]
        dist.destroy_process_group()
    step_s, with_s = map(statistics.median, zip(*pairs, strict=True))
    cost_s = with_s - step_s
    print(f"{backend}, world size 1, torch {torch.__version__}, {given.rounds} rounds of {given.steps} steps")
    print(f"step {1e3 * step_s:.2f} ms, one comparison {1e3 * cost_s:.2f} ms")
    for count in STEPS:
        compared = sum(map(RANK_STEPS.due, range(count)))
        share = compared * cost_s / (count * step_s)
        print(f"  {compared} comparisons in the first {count:,} steps: {share:.3%} of the time")
    share = cost_s / (RANK_STEPS.every_steps * step_s)
    print(f"  later one in {RANK_STEPS.every_steps} steps: {share:.4%} of the time")


if __name__ == "__main__":
    main()
