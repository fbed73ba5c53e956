"""Training whose optimizer step belongs to an engine, such as DeepSpeed: losses are logged, and nothing is guarded.

Such an engine unscales, clips and applies gradients by itself, and there is no torch step to guard. This is logged
once, so that the run is not assumed to be protected.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from surefoot.core.device_copies import begin_reading_number
from surefoot.decide.agreement import Ranks, rank_and_world_size
from surefoot.guard.log_rows import open_log
from surefoot.record.messages import StepRow
from surefoot.trainers.guarded_training import LossWindow, report_diagnosis
from surefoot.trainers.replacements import Replacements

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.core.device_copies import ArrivingNumber, KnownNumber
    from surefoot.trainers.guarded_training import GuardOptions

logger = logging.getLogger("surefoot")


class WatchedEngine:
    """Logs the loss of every step of an engine."""

    def __init__(self, options: GuardOptions, engine: str, step: int = 0) -> None:
        logger.warning(
            "surefoot: %s runs the optimizer step itself, so steps are not guarded: losses are logged, but bad steps "
            "are not skipped.",
            engine,
        )
        self._options = options
        several = rank_and_world_size()[1] > 1
        self.log = open_log(options.log, Ranks(dist.group.WORLD if several else None, torch.device("cpu")))
        self.replaced = Replacements()
        self._step = step
        self._window = LossWindow()
        self._loss: Tensor | None = None
        self._arriving: deque[tuple[int, float, ArrivingNumber | KnownNumber | None]] = deque()
        """Steps whose losses are being copied to the host, with the time at which they ended."""

    def add_loss(self, loss: Tensor, *, is_share: bool = False, is_propagated: bool = True) -> None:
        """The loss of one microbatch; `is_share` is whether it is already divided for accumulation."""
        if self.log is not None:
            self._loss = self._window.add(loss, is_share=is_share, is_propagated=True)

    def stepped(self) -> None:
        """A step has ended: log it when its loss has arrived. Does not wait."""
        step, loss = self._step, self._loss
        self._step += 1
        self._loss = None
        self._window.clear()
        if self.log is None:
            return
        self._arriving.append((step, time.time(), None if loss is None else begin_reading_number(loss)))
        self._write(wait=False)

    def _write(self, wait: bool) -> None:
        """Log the steps whose losses have arrived, in order, or all of them."""
        while self.log is not None and self._arriving:
            step, when, loss = self._arriving[0]
            if not wait and loss is not None and not loss.has_arrived():
                return
            self._arriving.popleft()
            self.log.take(StepRow(step, when, loss=None if loss is None else loss.wait()))

    def finish(self, diagnose: bool = True, error: BaseException | None = None) -> None:
        """Training has ended, perhaps by an error: write the log, and report the diagnosis of the losses."""
        self.replaced.undo()
        if self.log is None or self.log is self._options.log or self.log.closed:  # the user closes their own log
            return
        try:
            self._write(wait=True)
        except RuntimeError as error:  # the device has failed
            logger.warning("surefoot: the losses of the last steps have not arrived: %s", error)
        self.log.close()
        if diagnose and self._options.diagnose:
            report_diagnosis(self.log.folder)
