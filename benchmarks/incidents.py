"""What noting a step for an incident costs while nothing is wrong: the same loop with and without `incidents=`.

    python benchmarks/incidents.py

Both loops run side by side, a few steps each in turn. Processor time is counted, and the fastest of many rounds, so
that it can be run on a machine that does other things too.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.record.incidents.step_capture import QuickStreams

ROUNDS, STEPS = 200, 10


def loop(width: int, incidents: str | None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    stabilizer = sf.TrainingStabilizer(model, torch.optim.AdamW(model.parameters(), fused=True), incidents=incidents)
    batch = (torch.randn(64, 64), torch.randint(0, 10, (64,)))
    batches = iter(stabilizer.resume(iter(lambda: batch, None)))

    def step() -> float:
        started = time.process_time()
        for _ in range(STEPS):
            x, y = next(batches)
            stabilizer.backward(F.cross_entropy(model(x), y))
            stabilizer.step()
        return (time.process_time() - started) / STEPS

    return step


def main() -> None:
    torch.set_num_threads(1)
    note = QuickStreams().note
    timed = [_time(note) for _ in range(200)]
    print(f"one note of the random streams: {1e6 * statistics.median(timed):.1f} us")
    with tempfile.TemporaryDirectory() as folder:
        for width in (32, 256, 1024):
            without, with_notes = loop(width, None), loop(width, folder)
            pairs = [_pair(without, with_notes, turn) for turn in range(ROUNDS)]
            base = min(a for a, _ in pairs)
            extra = min(b for _, b in pairs) - base
            print(f"width {width}: a step takes {1e6 * base:.0f} us, noting it {1e6 * extra:+.0f} us")


def _pair(without, with_notes, turn: int) -> tuple[float, float]:
    """Now the one first, now the other."""
    if turn % 2:
        return without(), with_notes()
    second = with_notes()
    return without(), second


def _time(call) -> float:
    started = time.process_time()
    for _ in range(20):
        call()
    return (time.process_time() - started) / 20


if __name__ == "__main__":
    main()
