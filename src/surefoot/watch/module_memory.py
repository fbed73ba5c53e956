"""The accelerator memory of modules: how much each call leaves allocated, in sampled steps.

The numbers are counters of torch's allocator on the host, read when a module is entered and when it is left: nothing
waits for the device, and nothing is reset, because a script may read the same counters. A call leaves its result and
what autograd saved for the backward pass; what inner modules leave is attributed to them. The peak inside a call is
known if the allocator's own maximum rose during it; otherwise it is at least that of the two ends. The backward pass is
not covered: its memory belongs to no call of a module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surefoot.core.device import devices_in_use, memory_counters
from surefoot.record.facts import ModuleMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

MOST_MODULES = 8
"""The number of modules kept for each step: those that leave the most memory allocated."""
Level = tuple[float, float]
"""The number of allocated bytes, and their maximum so far."""


@dataclass(slots=True)
class _ModuleCall:
    """A module that is running."""

    module: int
    """Its identity."""
    path: str
    before: list[Level]
    """The counters of each device when it was entered."""
    inside: list[float]
    """The memory that its inner modules have left allocated."""


@dataclass(slots=True)
class _Memory:
    """The memory that a module uses on one device."""

    held: float = 0.0
    peak: float = 0.0

    def add(self, held: float, peak: float) -> None:
        self.held, self.peak = self.held + held, max(self.peak, peak)


@dataclass(slots=True)
class _Outermost:
    """The call of a model that is in progress."""

    devices: list[torch.device] = field(default_factory=list)
    running: list[_ModuleCall] = field(default_factory=list)
    """The modules that are running, the innermost last."""
    found: dict[tuple[str, str], _Memory] = field(default_factory=dict)
    """The memory of the modules that have ended, by device and path."""


class ModuleMemoryNotes:
    """Records the memory of modules in the sampled steps. A module hook calls `enter` and `leave`."""

    def __init__(
        self,
        devices: Callable[[], list[torch.device]] = devices_in_use,
        level: Callable[[torch.device], Level | None] | None = None,
    ) -> None:
        """`devices` returns the accelerators in use; `level` reads the counters of one, `None` if it has none."""
        self._devices_in_use, self._level = devices, level or _level
        self._call = _Outermost()
        self._steps: dict[int, dict[tuple[str, str], _Memory]] = {}

    def enter(self, module: int, path: str) -> None:
        """A module is entered; `path` is its name."""
        call = self._call
        if not call.running:
            call.devices = [device for device in self._devices_in_use() if self._level(device) is not None]
        if call.devices:
            call.running.append(_ModuleCall(module, path, self._levels(call.devices), [0.0] * len(call.devices)))

    def leave(self, module: int, step: int) -> None:
        """A module is left, normally or by an exception."""
        call = self._call
        if not any(each.module == module for each in call.running):
            return
        now = self._levels(call.devices)
        while call.running:
            done = call.running.pop()
            self._add(done, now)
            if done.module == module:  # the modules above it were left by an exception
                break
        if not call.running:
            self._keep(step)

    def _add(self, done: _ModuleCall, now: Sequence[Level]) -> None:
        call = self._call
        for place, device in enumerate(call.devices):
            (before, peak_before), (after, peak_after) = done.before[place], now[place]
            grown = after - before
            peak = peak_after if peak_after > peak_before else max(before, after)
            call.found.setdefault((str(device), done.path), _Memory()).add(grown - done.inside[place], peak)
            if call.running:
                call.running[-1].inside[place] += grown

    def _keep(self, step: int) -> None:
        """Keep the numbers of a model call, unless another call in the same step left more memory allocated."""
        found, self._call = self._call.found, _Outermost()
        if not found:
            return
        if step not in self._steps:
            self._steps = {each: _largest(known) for each, known in self._steps.items()}
        known = self._steps.setdefault(step, {})
        for key, memory in found.items():
            most = known.setdefault(key, _Memory())
            most.held, most.peak = max(most.held, memory.held), max(most.peak, memory.peak)

    def _levels(self, devices: Sequence[torch.device]) -> list[Level]:
        return [self._level(device) or (0.0, 0.0) for device in devices]

    def as_facts(self) -> list[ModuleMemory]:
        """For each sampled step, the modules that left the most memory allocated, largest first."""
        return [
            ModuleMemory(step=step, device=device, module=path, held=memory.held, peak=memory.peak)
            for step, known in self._steps.items()
            for (device, path), memory in _largest(known).items()
        ]


def _largest(known: dict[tuple[str, str], _Memory]) -> dict[tuple[str, str], _Memory]:
    """The modules that left the most memory allocated, per device."""
    ordered = sorted(known.items(), key=lambda item: -item[1].held)
    kept: dict[tuple[str, str], _Memory] = {}
    for key, memory in ordered:
        if memory.held > 0 and sum(device == key[0] for device, _ in kept) < MOST_MODULES:
            kept[key] = memory
    return kept


def _level(device: torch.device) -> Level | None:
    counters = memory_counters(device)
    return (counters["allocated"], counters["peak"]) if counters else None
