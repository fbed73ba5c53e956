"""Reads losses from a device without waiting for it.

A loss on a CPU is available immediately. On a GPU it is copied asynchronously. If the host is slower than the GPU, the
copy arrives within a fraction of a millisecond, and the loss is known before its backward pass begins. If the GPU is
slower, it arrives a few steps later; the loss is then judged late, when its graph no longer exists and its step has
been taken.

The host does wait at the first steps, when most mistakes are visible and the device has no backlog, and for some steps
after a non-finite loss, so that what follows is known in time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.core.device import has_failed, has_streams
from surefoot.core.device_copies import begin_reading_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from surefoot.core.device_copies import ArrivingNumber, KnownNumber

FIRST_STEPS = 64
"""The number of first steps whose losses are waited for."""
STEPS_AFTER_TROUBLE = 64
"""The number of steps after a non-finite loss whose losses are waited for."""
PATIENCE_SECONDS = 100e-6
"""How long to wait for a copy before its loss is read late."""
PAUSE = 32
"""After a late copy, this many losses are read late before the next attempt."""


class LossPlace(NamedTuple):
    """Identifies a loss."""

    step: int
    backward: int
    line: Any
    """The line of the script that called `backward`."""
    is_repeated: bool
    """Whether it is not the first evaluation of a closure."""


class LossReadings:
    """Reads the losses of a run, immediately or later."""

    def __init__(self) -> None:
        self._being_copied: deque[tuple[LossPlace, ArrivingNumber | KnownNumber]] = deque()
        self._wait_until = FIRST_STEPS
        self._late_until = 0

    def read(self, loss: Tensor, place: LossPlace) -> tuple[float | None, ArrivingNumber | KnownNumber | None]:
        """The value of a loss with one element, and its copy if it is on a device.

        The value is `None` if it has not arrived yet; `late` will return it. No graph is being captured.
        """
        if not has_streams(loss.device):
            return float(loss), None
        copy = begin_reading_number(loss)
        if place.step < self._wait_until or self._arrives_in_time(copy, place.backward):
            return copy.wait(), copy
        self._being_copied.append((place, copy))
        return None, copy

    def _arrives_in_time(self, copy: ArrivingNumber | KnownNumber, backward: int) -> bool:
        if backward < self._late_until:
            return False
        if copy.has_arrived(within=PATIENCE_SECONDS):
            return True
        self._late_until = backward + PAUSE
        return False

    def late(self, wait: bool = False) -> Iterator[tuple[LossPlace, float]]:
        """The losses that have arrived since, in order; with `wait`, all that are being copied."""
        while self._being_copied and (wait or self._being_copied[0][1].has_arrived()):
            place, copy = self._being_copied.popleft()
            try:
                value = copy.wait()
            except RuntimeError:
                if has_failed():  # the loss is lost too
                    continue
                raise
            yield place, value

    def expect_trouble(self, step: int) -> None:
        """A loss was not finite: wait for the losses of the next steps."""
        self._wait_until = step + STEPS_AFTER_TROUBLE
