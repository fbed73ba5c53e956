"""Training whose optimizer step belongs to an engine, such as DeepSpeed: its losses are logged, and nothing is guarded.

Such an engine unscales, clips and applies gradients by itself, and there is no step of torch's to stand in front of.
What is left is said once: nobody should believe that a run is protected when it is not.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from surefoot.decide.agreement import Ranks
from surefoot.guard.log_rows import open_log
from surefoot.record.messages import StepRow
from surefoot.trainers.guarded_training import Replacements, report_diagnosis

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.trainers.guarded_training import GuardOptions

logger = logging.getLogger("surefoot")


class WatchedEngine:
    """Logs the loss of every step of an engine."""

    def __init__(self, options: GuardOptions, engine: str, step: int = 0) -> None:
        logger.warning(
            "surefoot: %s owns the optimizer step, so that steps are not guarded: the loss of each one is logged, and "
            "broken steps are not skipped.",
            engine,
        )
        self._options = options
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.log = open_log(options.log, Ranks(dist.group.WORLD if several else None, torch.device("cpu")))
        self.replaced = Replacements()
        self._step = step
        self._losses: list[Tensor] = []
        self._are_shares = False

    def add_loss(self, loss: Tensor, *, is_share: bool = False) -> None:
        """The loss of one microbatch; `is_share` says whether it is divided for accumulation already."""
        self._losses.append(loss.detach())
        self._are_shares = is_share

    def stepped(self) -> None:
        """A step is over: log it. Waits for the loss."""
        whole = sum(float(loss) for loss in self._losses)
        loss = None if not self._losses else whole if self._are_shares else whole / len(self._losses)
        self._losses.clear()
        if self.log is not None:
            self.log.take(StepRow(self._step, time.time(), loss=loss))
        self._step += 1

    def finish(self, diagnose: bool = True) -> None:
        """Training has ended: write the log, and say what the losses show."""
        self.replaced.undo()
        if self.log is None or self.log is self._options.log or self.log.closed:  # the user's own is closed by the user
            return
        self.log.close()
        if diagnose and self._options.diagnose:
            report_diagnosis(self.log.folder)
