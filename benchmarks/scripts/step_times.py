"""The clock of the scripts beside it: what a step costs, when nothing waits for the device but the clock itself.

Two processes on a shared machine may differ by more than surefoot costs. So under `surefoot run`, with `TURNS` set in
the environment, watching is switched off and on in turns of ten steps after step 120, and neighbouring turns are
compared.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
import warnings
from pathlib import Path

import torch

FIRST, STEADY, BLOCK = 20, 40, 10
FIRST_TURN, TURN = 120, 10
COUNTED = 100
"""Steps at the end in which the host's waits for the device are counted."""


class Turns:
    """Switches the watching of this process off and on, and compares the times."""

    def __init__(self) -> None:
        from surefoot.watch.watcher import Watcher

        self._watcher = next(each for each in gc.get_objects() if isinstance(each, Watcher))
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._began: float | None = None

    def next(self, now: float) -> None:
        """One turn has ended, and another begins."""
        state = self._watcher.state
        if self._began is not None:
            self._seconds[state.active].append(now - self._began)
        state.active = not state.active
        if not state.active and self._watcher.incidents is not None:
            self._watcher.incidents._first_call.close()  # a hook that watching opens again
        self._began = StepTimes._now()

    def ratio(self) -> float:
        """The time with watching divided by the time without, the median over pairs of turns."""
        self._watcher.state.active = True
        pairs = zip(self._seconds[True], self._seconds[False], strict=False)
        return statistics.median(on / off for on, off in pairs)


class StepTimes:
    """Call `step()` after each step of a run, and `write()` at its end."""

    def __init__(self, steps: int, waits: bool = True) -> None:
        self._steps, self._done, self._blocks = steps, 0, []
        self._counts_from = steps - COUNTED if waits else steps + 1
        self._first = float("nan")
        self._caught = warnings.catch_warnings(record=True)
        self._waits: list[warnings.WarningMessage] = []
        self._turns = Turns() if os.environ.get("TURNS") else None
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
        if self._turns is not None and self._done >= FIRST_TURN and self._done % TURN == 0:
            self._turns.next(self._now())
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
            "turns": None if self._turns is None else self._turns.ratio(),
            "waits": len(where),
            "waits_at": sorted({f"{place} x {where.count(place)}" for place in where}),
        }
        Path(os.environ["FIGURES"]).write_text(json.dumps(figures))
