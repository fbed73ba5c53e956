"""The state of a gradient scaler, read without waiting for the device: its scale after each update, and skipped steps.

A fused optimizer is called for every step and skips those with an overflow in its kernel: only the scaler's `found_inf`
shows it. On a device, the scale and `found_inf` are copied and read when they have arrived, so the current scale is
known with a delay; on the CPU they are read immediately.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.core.device_copies import begin_reading_number
from surefoot.watch.log_rows import WatchLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.core.device_copies import ArrivingNumber, KnownNumber
    from surefoot.watch.context import WatchContext
    from surefoot.watch.watch_state import LossScalerState

MOST_SKIPS = 500
MOST_SCALES = 2_000
MOST_SCALERS = 64


class ScaleOnDevice:
    """A scale that is being copied from a device; dividing a number by it reads it."""

    def __init__(self, number: ArrivingNumber | KnownNumber) -> None:
        self._number = number

    def __float__(self) -> float:
        return self._number.wait()

    def __rtruediv__(self, number: float) -> float:
        return number / float(self)


class LossScale:
    """Follows the gradient scaler of a run."""

    def __init__(self, context: WatchContext) -> None:
        self._state: LossScalerState = context.state.scaler
        self._run, self._events = context.state, context.events
        self._waiting: deque[tuple[ArrivingNumber | KnownNumber, Callable[[float], None]]] = deque()
        """The numbers that are being copied, each with the function that receives it."""
        self._held: weakref.ref[Tensor] | None = None
        """The scale of the last scaler, which uses one tensor for its whole lifetime."""

    def scaled(self, scale: Any, initial: Any) -> None:
        """A loss was multiplied by the scale; `initial` is the initial scale of the scaler."""
        if not isinstance(scale, Tensor):
            return
        if self._held is None or self._held() is not scale:
            self._held = self._run.scale = weakref.ref(scale)
            if len(self._state.made_at) < MOST_SCALERS:
                self._state.made_at.append(self._state.attempts)
        if scale.device.type == "cpu":
            self._state.scale = self._state.unscale_by = float(scale)
            return
        if self._state.scale is None and isinstance(initial, (int, float)):
            self._state.scale = float(initial)
        self._state.unscale_by = ScaleOnDevice(begin_reading_number(scale))

    def updated(self, scale: Any) -> None:
        """The scaler has chosen the scale of the next step."""
        if isinstance(scale, Tensor):
            self._read(scale, self._take_scale)

    def _take_scale(self, found: float) -> None:
        trace = self._state.trace
        self._state.scale = found
        trace.append(self._state.scale)
        if len(trace) > MOST_SCALES:
            del trace[500:1000]

    def skipped(self) -> None:
        """The last attempt was skipped."""
        self._note_skip(self._state.attempts - 1)

    def stepped_with(self, found_inf: list[Tensor]) -> None:
        """An optimizer that skips overflows itself made the last attempt; it skipped if one of these is not 0."""
        if not found_inf:
            return
        attempt, step = self._state.attempts - 1, self._run.steps - 1

        def take(found: float) -> None:
            if found:
                self._note_skip(attempt)
                self._events.write(WatchLog.overflow, step, self._state.scale)

        same = [each.detach().reshape(1).to(found_inf[0].device, non_blocking=True) for each in found_inf]
        self._read(same[0] if len(same) == 1 else torch.cat(same).amax(), take)

    def _note_skip(self, attempt: int) -> None:
        self._state.skips += 1
        self._state.skip_steps.append(attempt)
        del self._state.skip_steps[:-MOST_SKIPS]

    def _read(self, number: Tensor, take: Callable[[float], None]) -> None:
        """Pass a number to `take`: immediately on the CPU, otherwise when it has arrived."""
        self._waiting.append((begin_reading_number(number), take))
        while self._waiting and self._waiting[0][0].has_arrived():
            self._take_first()

    def _take_first(self) -> None:
        number, take = self._waiting.popleft()
        take(number.wait())

    def read(self) -> None:
        """Read everything that is being copied. Waits for the device."""
        if isinstance(self._state.unscale_by, ScaleOnDevice):
            pending, self._state.unscale_by = self._state.unscale_by, None
            self._state.unscale_by = float(pending)
        while self._waiting:
            self._take_first()
