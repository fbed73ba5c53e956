"""Time and memory of merging the ranks of a long run into one diagnosis and one table.

    python benchmarks/merge_ranks.py [--ranks 1024] [--steps 100000] [--tensors 300]

A generator writes the folders: one log of so many steps through the real `RunLog`, which every rank gets as hard links,
and for each rank a `rank.jsonl` with a look at every step that is looked at, a description and findings of its own. One
rank holds another value in one tensor from the middle of the run on. The merge has to name it. Each part is measured in
a process of its own; memory is what that process holds at most, less what it holds after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.guard.model_sampling import RANK_STEPS
from surefoot.record.facts import Fingerprints, GroupSettings, RankOptimizer, RankSetup, ReplicaLook
from surefoot.record.log import RunLog
from surefoot.record.messages import StepRow
from surefoot.record.rank_file import RankFile, rank_folders

if TYPE_CHECKING:
    from collections.abc import Callable


def write_log(folder: Path, steps: int) -> None:
    """One log of a rank, thinned as a real one is."""
    numbers = random.Random(0)
    with RunLog(folder, device_seconds=None) as log:
        for step in range(steps):
            loss, norm = 1 + 2.0**-step, numbers.uniform(0.5, 1.5)
            log.take(StepRow(step, 1e9 + 0.1 * step, loss=loss, grad_norm=norm, lr=1e-3))
            if step % 2000 == 1999:
                log.flush()  # the queue is for training, which is slower than this loop


def prints(numbers: random.Random, tensors: int, odd: bool) -> Fingerprints:
    """Fingerprints of so many tensors, the same for the same state of the generator."""
    each = bytearray(numbers.randbytes(4 * tensors))
    if odd:
        each[-4] ^= 1
    return Fingerprints(total=hash_of(each), each=b64encode(each).decode("ascii"))


def hash_of(content: bytes | bytearray) -> str:
    """Eight bytes that stand for the content."""
    import hashlib

    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write_rank(folder: Path, rank: int, ranks: int, steps: int, tensors: int, odd_rank: int) -> None:
    """What one rank leaves besides its log."""
    file = RankFile(folder)
    file.append(RankSetup(rank=rank, world_size=ranks, torch="2.13", python="3.11"))
    file.append(
        RankOptimizer(
            number=0,
            type="AdamW",
            settings=[GroupSettings(values={"lr": 1e-3, "weight_decay": 0.1})],
            parallel="ddp",
            names=[f"blocks.{number // 4}.part{number % 4}.weight" for number in range(tensors)],
            elements=1_000_000_000,
            layout="same",
        )
    )
    for step in (step for step in range(steps) if RANK_STEPS.due(step)):
        numbers = random.Random(step)  # the same on every rank
        is_odd = rank == odd_rank and step >= steps // 2
        file.append(
            ReplicaLook(
                step=step,
                optimizer=0,
                backwards=step + 1,
                lr=[1e-3],
                parameters=prints(numbers, tensors, is_odd),
                gradients=prints(numbers, tensors, False),
                moments=prints(numbers, tensors, False),
                inputs=hash((rank, step)),
                wrapper_called=True,
                synchronized=True,
            )
        )
    file.close()
    findings = {"schema": 1, "verdict": "healthy", "steps": steps, "summary": "No fault was found.", "findings": []}
    (folder / "findings.json").write_text(json.dumps(findings))
    (folder / "run.json").write_text(json.dumps({"schema": 1, "exit_code": 0, "rank": rank, "world_size": ranks}))


def write_ranks(top: Path, ranks: int, steps: int, tensors: int, odd_rank: int) -> None:
    """The folders of all ranks."""
    write_log(top / "log", steps)
    for rank in range(ranks):
        folder = top / "run" / f"rank{rank}"
        (folder / "telemetry").mkdir(parents=True)
        for segment in (top / "log" / "telemetry").iterdir():
            os.link(segment, folder / "telemetry" / segment.name)
        write_rank(folder, rank, ranks, steps, tensors, odd_rank)


def measured(title: str, run: Callable[[], str]) -> None:
    """Run a function in a fork, and print its time, its peak memory and what it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        said = run()
        seconds = time.perf_counter() - began
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        os.write(writing, f"{title}: {seconds:.1f} s, {more:.0f} MiB more at the peak; {said}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        print(answer.read().strip(), flush=True)
    os.waitpid(child, 0)


def diagnose(top: Path) -> str:
    """What the merged diagnosis names."""
    from surefoot.diagnose.merged import diagnose_ranks

    found = diagnose_ranks(rank_folders(top)).serious[0]
    return f"{found.cause}, ranks {found.evidence['ranks']}, step {found.step}, {found.evidence['first_tensor']}"


def table(top: Path) -> str:
    """The size of the table of all ranks."""
    from surefoot.record.rank_table import read_rank_table

    held = read_rank_table(rank_folders(top))
    return f"{len(held.ranks)} ranks x {len(held.starts)} columns"


def main() -> None:
    """Write the run, merge it, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tensors", type=int, default=300)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="merge-ranks-") as scratch:
        top, began = Path(scratch), time.perf_counter()
        write_ranks(top, given.ranks, given.steps, given.tensors, odd_rank=given.ranks * 2 // 3)
        first = top / "run" / "rank0"
        log_bytes = sum(path.stat().st_size for path in (first / "telemetry").iterdir())
        looks = sum(RANK_STEPS.due(step) for step in range(given.steps))
        print(
            f"{given.ranks:,} ranks x {given.steps:,} steps, {given.tensors} tensors, written in "
            f"{time.perf_counter() - began:.0f} s; per rank: log {log_bytes / 1e6:.1f} MB, {looks} looks in rank.jsonl "
            f"{(first / 'rank.jsonl').stat().st_size / 1e6:.2f} MB",
            flush=True,
        )
        import surefoot.diagnose.merged
        import surefoot.record.rank_table  # noqa: F401

        measured("diagnosis", lambda: diagnose(top / "run"))
        measured("table of ranks", lambda: table(top / "run"))


if __name__ == "__main__":
    main()
