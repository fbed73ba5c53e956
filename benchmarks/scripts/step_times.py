"""The clock of the scripts beside it: what a step costs, when nothing waits for the device but the clock itself."""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from pathlib import Path

import torch

FIRST, STEADY, BLOCK = 20, 40, 10
COUNTED = 100
"""Steps at the end in which the host's waits for the device are counted."""


class StepTimes:
    """Call `step()` after each step of a run, and `write()` at its end."""

    def __init__(self, steps: int, waits: bool = True) -> None:
        self._steps, self._done, self._blocks = steps, 0, []
        self._counts_from = steps - COUNTED if waits else steps + 1
        self._first = float("nan")
        self._caught = warnings.catch_warnings(record=True)
        self._waits: list[warnings.WarningMessage] = []
        self._began = self._mark = self._now()

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> None:
        self._done += 1
        if self._done == FIRST:
            self._first = (self._now() - self._began) / FIRST
        if self._done == self._counts_from:
            self._waits = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if self._done < STEADY or self._done % BLOCK or self._done >= self._counts_from:
            return
        now = self._now()
        if self._done > STEADY:
            self._blocks.append((now - self._mark) / BLOCK)
        self._mark = now

    def write(self) -> None:
        if self._done >= self._counts_from:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
        cuda = torch.cuda.is_available()
        where = [f"{each.filename}:{each.lineno}" for each in self._waits if "synchronizing" in str(each.message)]
        figures = {
            "first_ms": 1e3 * self._first,
            "steady_ms": 1e3 * statistics.median(self._blocks),
            "mean_ms": 1e3 * statistics.fmean(self._blocks),
            "whole_s": self._now() - self._began,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
            "waits": len(where),
            "waits_at": sorted({f"{place} x {where.count(place)}" for place in where}),
        }
        Path(os.environ["FIGURES"]).write_text(json.dumps(figures))
