"""Ranks that are killed again and again under `torchrun --max-restarts`, and end where they would have ended.

    python benchmarks/torture_ranks.py [--kills 50] [--ranks 2] [--seed 0] [--kind ddp|fsdp]

A small network with dropout is trained by several ranks over gloo, with AdamW, a warm-up and cosine schedule, two
microbatches a step and a shuffling `DistributedSampler`, and saves every four steps. In every life of the group one
rank, chosen at random, ends itself with SIGKILL at a random moment: some milliseconds after a random step has begun, so
that kills fall into the forward, the backward, the collectives, the step, and the writing of a checkpoint. torchrun
ends the other ranks and starts the group again, which goes on from what it finds on the disk.

At the end parameters, optimizer state and random streams of every rank must be, bit for bit, those of a run without any
kill. Exits with 1 if they are not, or if fewer ranks were killed than asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

EVERY, ROWS, BATCH, WIDTH = 4, 128, 4, 48
FARTHEST = 11
"""A life ends at the latest so many steps after it began: some end before they have saved anything."""


def kill_later(rank: int, life: int, seed: int, ranks: int, folder: Path) -> int:
    """Choose when the rank that is to die in this life does; returns the step after whose beginning, or -1."""
    chance = random.Random(f"{seed}/{life}")
    victim, after, delay = chance.randrange(ranks), chance.randrange(1, FARTHEST), 0.05 * chance.random() ** 2
    if rank != victim:
        return -1

    def die() -> None:
        started.wait()
        time.sleep(delay)
        writing = [each.name for each in (folder / "checkpoints").glob(".step-*.part")]
        with (folder / "kills").open("a") as file:
            file.write(json.dumps({"life": life, "rank": rank, "writing": bool(writing)}) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)

    started = kill_later.started = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=die, daemon=True).start()
    return after


def work(folder: Path, kind: str, steps: int, kills: int, seed: int) -> None:
    """One rank, from its start to its end."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import surefoot as sf

    torch.set_num_threads(1)
    rank, ranks, life = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    # A store for each life: gloo may find the addresses of the life before in that of torchrun, and fail to connect.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{life}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(16, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)
    )
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    sf.seed_everything(1_000 * life + rank if life else rank)  # what is not restored comes out differently
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stabilizer = sf.TrainingStabilizer(
        model,
        optimizer,
        scheduler=sf.warmup_cosine(optimizer, warmup_steps=20, total_steps=steps),
        accumulate=2,
        checkpoints=sf.CheckpointManager(folder, every_steps=EVERY),
    )
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    done = len((folder / "kills").read_text().splitlines()) if (folder / "kills").exists() else 0
    at, first = kill_later(rank, life, seed, ranks, folder) if done < kills else -1, None
    epochs = -(-steps // (ROWS // BATCH // ranks // 2))
    for epoch in stabilizer.epochs(epochs):
        sampler.set_epoch(epoch)
        for x, y in stabilizer.resume(loader):
            first = stabilizer.steps if first is None else first
            if at >= 0 and stabilizer.steps >= first + at:
                kill_later.started.set()  # type: ignore[attr-defined]
            stabilizer.backward((model(x) - y).square().mean())
            stabilizer.step()
    state = [digest(list(model.parameters())), digest(optimizer.state_dict()), digest(torch.get_rng_state())]
    (folder / f"end-{rank}.json").write_text(json.dumps({"steps": stabilizer.steps, "state": state}))
    dist.destroy_process_group()


def digest(value: Any) -> str:
    """One line that tells whether two nested states are equal bit by bit."""
    if hasattr(value, "to_local"):
        value = value.to_local()
    if hasattr(value, "detach"):
        value = (str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        value = [(repr(key), digest(each)) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        value = [digest(each) for each in value]
    return hashlib.sha256(repr(value).encode()).hexdigest()


def run(folder: Path, given: argparse.Namespace, kills: int, steps: int) -> list[Any]:
    """Start torchrun, and give what each rank ended with."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
    command += [f"--max-restarts={2 * kills + 3}", __file__, "--work", str(folder), "--kind", given.kind]
    command += ["--steps", str(steps), "--kills", str(kills), "--seed", str(given.seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    with (folder / "output").open("w") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
    if code:
        print((folder / "output").read_text()[-4_000:])
        raise SystemExit(f"torchrun ended with {code}")
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(given.ranks)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        work(given.work, given.kind, given.steps, given.kills, given.seed)
        return 0
    steps = FARTHEST * (given.kills + 2)  # a run of which no life reaches the end before its kill
    began = time.monotonic()
    with TemporaryDirectory() as place:
        expected = run(Path(place) / "whole", given, 0, steps)
        found = run(Path(place) / "torn", given, given.kills, steps)
        noted = (Path(place) / "torn" / "kills").read_text().splitlines() if given.kills else []
    kills = [json.loads(line) for line in noted]
    by_rank = Counter(kill["rank"] for kill in kills)
    print(f"{given.kind} on {given.ranks} ranks, {found[0]['steps']} steps, {time.monotonic() - began:.0f} s")
    print(f"{len(kills)} kills: {', '.join(f'{by_rank[rank]} of rank {rank}' for rank in sorted(by_rank))}; "
          f"{sum(kill['writing'] for kill in kills)} while a checkpoint was being written")  # fmt: skip
    same = [now == then for now, then in zip(found, expected, strict=True)]
    print(f"parameters, optimizer state and random streams equal those of the uninterrupted run: {same}")
    return 0 if all(same) and len(kills) == given.kills else 1


if __name__ == "__main__":
    raise SystemExit(main())
