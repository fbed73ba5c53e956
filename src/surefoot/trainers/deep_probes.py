"""The deep probes of a guarded training: what `surefoot run` observes at sampled steps, from inside.

`begin` starts them before the training loop (`watch/training_watch.py`), `follow` once the optimizers are guarded, and
`end` removes them and writes `facts.json` into the run folder. The diagnosis at the end of the training rests on these
facts and on the run log. Without them, it rests on the log alone.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from surefoot.record.run_folder import write_json
from surefoot.watch.training_watch import TrainingWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from surefoot.guard.attach import Attachment
    from surefoot.guard.step_decision import StepDecision
    from surefoot.record.log import RunLog
    from surefoot.trainers.guarded_training import GuardOptions
    from surefoot.types import StepRecord

logger = logging.getLogger("surefoot")

FACTS = "facts.json"


class DeepProbes:
    """The observations of one training besides its guard; none, if they are disabled or would change the run."""

    def __init__(self, watch: TrainingWatch | None = None) -> None:
        self._watch = watch

    @staticmethod
    def begin(options: GuardOptions, models: Sequence[nn.Module]) -> DeepProbes:
        """Observe this process from now on, if the user wants it and there is a run folder for the facts."""
        if not options.probes or not options.diagnose or options.log is None:
            return DeepProbes()
        return DeepProbes(TrainingWatch.begin(models))

    def follow(self, attachments: Sequence[Attachment], schedulers: Iterable[Any] = ()) -> None:
        """The optimizers are guarded, and the state of their guard is loaded: their steps begin."""
        log = attachments[0].log if attachments else None
        if self._watch is None or log is None:
            self.end(None)
            return
        with suppress(OSError):  # a file of an earlier training in the same folder
            (log.folder / FACTS).unlink()
        optimizers = [each.optimizer for each in attachments if each.optimizer is not None]
        self._watch.add(optimizers, schedulers, began_at=attachments[0].steps)
        self._watch.read_from(attachments)

    def decided(self, number: int, decision: StepDecision) -> None:
        """The guard of an optimizer, by its number, has decided on a step that is not applied yet."""
        if self._watch is not None:
            self._watch.decided(number, decision)

    def stepped(self, number: int, record: StepRecord) -> None:
        """The numbers of a step have arrived at the guard."""
        if self._watch is not None:
            self._watch.stepped(number, record)

    def end(self, log: RunLog | None, error: BaseException | None = None) -> None:
        """Stop observing, and write the facts into the folder of the log."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        facts = watch.end(error)
        if facts is None or log is None or not log.folder.is_dir():  # the log has reported the reason
            return
        try:
            write_json(log.folder / FACTS, facts.to_json())
        except OSError as problem:
            logger.warning("surefoot: what was observed could not be written to %s: %s", log.folder, problem)
