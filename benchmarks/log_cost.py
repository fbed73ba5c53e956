"""What the run log adds to a guarded step, and what a sampled close look costs.

    python benchmarks/log_cost.py [--steps 200]

The same GPT trains guarded with and without a log, in blocks that take turns in one process; medians per step. Steps
that are looked at closely (22 in the first 5,000) are given apart. 124M parameters on a CUDA device, small on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time

import torch
from gpt import GPT, GPT_124M, Shape

import surefoot as sf
from surefoot.guard.model_sampling import Sampling

SMALL = Shape(4, 128, 4, vocabulary=2048, context=128)
BLOCK = 20
WARM_UP = 10


class Loop:
    """One training job, step by step."""

    def __init__(self, device: str, log: str | None) -> None:
        torch.manual_seed(0)
        self.device = device
        shape = GPT_124M if device == "cuda" else SMALL
        self.model = GPT(shape).to(device)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.guard = sf.TrainingStabilizer(self.model, optimizer, log=log)
        self.ids = torch.randint(shape.vocabulary, (8, shape.context), device=device)
        self.cast = torch.autocast(device, dtype=torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

    def step(self) -> None:
        with self.cast:
            loss = self.model(self.ids, self.ids)
        self.guard.backward(loss)
        self.guard.step()

    def timed(self) -> float:
        """Milliseconds of one step, the device's work included."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampling = Sampling()
    with tempfile.TemporaryDirectory() as folder:
        loops = {"no log": Loop(device, None), "log": Loop(device, folder)}
        times: dict[str, list[float]] = {"no log": [], "log": [], "log, close look": []}
        for begin in range(0, arguments.steps, BLOCK):
            for name, loop in loops.items():
                for step in range(begin, begin + BLOCK):
                    took = loop.timed()
                    if step >= WARM_UP:
                        times[f"{name}, close look" if name == "log" and sampling.due(step) else name].append(took)
        loops["log"].guard.log.close()
    base = statistics.median(times["no log"])
    print(f"a guarded step on {device}, median ms, and the ratio to the one without a log:")
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"  {name:16} {middle:8.2f}  {middle / base:6.3f}  ({len(values)} steps)")


if __name__ == "__main__":
    main()
