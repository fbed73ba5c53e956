"""The cost of a guarded step: the plain and the guarded loop alternate, so that both see the same conditions.

Processor time is measured, because other programs on the machine would affect wall-clock time. With one thread, it is
the time that a step takes on an idle machine, including the thread that writes the run log.
"""

from __future__ import annotations

import statistics
import time
from tempfile import TemporaryDirectory
from typing import NamedTuple

WARMUP_STEPS = 5


class Cost(NamedTuple):
    """Median milliseconds of processor time of a whole step: drawing the batch, forward, backward, update."""

    bare_ms: float
    guarded_ms: float
    steps: int

    @property
    def ratio(self) -> float:
        """How many times as long a guarded step takes."""
        return self.guarded_ms / self.bare_ms


def measure_cost(steps: int) -> Cost:
    """Train both loops without faults, alternating after each step. The guarded one also writes its run log."""
    import torch

    from surefoot.zoo.demo.train import Faults, Training, read_text

    torch.set_num_threads(1)  # as in the script
    text, total = read_text(), WARMUP_STEPS + steps
    with TemporaryDirectory() as folder:
        both = [Training(text, total, 0, Faults()), Training(text, total, 0, Faults(), guard=True, log=folder)]
        times: list[list[float]] = [[], []]
        batches = [iter(training.loader) for training in both]
        for step in range(total):
            for which in (0, 1) if step % 2 else (1, 0):
                start = time.process_time()
                both[which].step(*next(batches[which]))
                times[which].append(1e3 * (time.process_time() - start))
        both[1].close()
    bare_ms, guarded_ms = (statistics.median(each[WARMUP_STEPS:]) for each in times)
    return Cost(bare_ms, guarded_ms, steps)
