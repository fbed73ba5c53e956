"""Selects the checkpoint to load when several processes must load the same one.

Ranks read the folder at different times, and the disk of one may lag behind. So each reads what it finds, the first
rank's choice counts, and it is used if every rank can read it; otherwise the next older one is tried. Ranks that cannot
agree all stop with an error: one that continued alone would train with another state than the rest, or wait for them
indefinitely.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from surefoot.core.wording import count_of
from surefoot.errors import CheckpointError, UsageError
from surefoot.keep.checkpoint.loading import Loaded

if TYPE_CHECKING:
    from surefoot.decide.agreement import Ranks
    from surefoot.keep.checkpoint.manager import CheckpointManager
    from surefoot.keep.checkpoint.parts import SavedParts

log = logging.getLogger("surefoot")

NONE = -1
"""Used instead of a step if there is none."""


class CheckpointSelector:
    """Loads the same checkpoint on all ranks. Every rank must make every call."""

    def __init__(
        self, checkpoints: CheckpointManager | None, ranks: Ranks, place: Callable[[SavedParts], Any] | None
    ) -> None:
        """`place` assembles the state of this rank from the parts that all ranks saved."""
        self._checkpoints, self._ranks, self._place = checkpoints, ranks, place
        # The ranks that train together also save together: each part is verified by one of them.
        self._shares_verifying = checkpoints is not None and ranks.several and checkpoints.world_size == ranks.count

    def check_that_all_save(self) -> None:
        """Raise an error unless every rank saves: without a part of every rank, no checkpoint is complete."""
        count = 0 if self._checkpoints is None else self._checkpoints.world_size
        if not self._ranks.same(count):
            here = "none" if self._checkpoints is None else f"one for {count_of(count, 'rank')}"
            raise UsageError(
                f"every rank needs the same `checkpoints`, because each saves its own part; this rank has {here}, and "
                "another rank does not. Pass `checkpoints=CheckpointManager(folder)` on all ranks."
            )

    def load(self, which: Any) -> Loaded | None:
        """Load the same checkpoint on every rank: the first rank's choice, if all can read it. `None` for a new run."""
        passed_over: set[int] = set()
        while True:
            found = self.load_here(which, passed_over)
            if not self._ranks.several:
                return _raised_or_given(found)
            step = self._ranks.of_first(NONE if found is None or isinstance(found, Exception) else found.step)
            if step == NONE:
                self._refuse_unless_new(found, passed_over)
                return None
            if not isinstance(found, Loaded) or found.step != step:
                found = self.load_here(step)
            if not self._ranks.any(isinstance(found, Exception)):
                return _raised_or_given(found)
            passed_over.add(step)
            if not isinstance(which, str):
                raise CheckpointError(f"step {step} cannot be loaded on every rank: {_here(found)}")
            log.warning("surefoot: step %d is skipped, because not every rank can load it: %s", step, _here(found))

    def load_here(self, which: Any, without: Collection[int] = ()) -> Loaded | CheckpointError | None:
        """The state that this rank finds and needs, or the reason why it cannot be loaded."""
        assert self._checkpoints is not None
        try:
            return self._checkpoints.load(
                which, without=without, place=self._place, shares_verifying=self._shares_verifying
            )
        except CheckpointError as error:
            return error

    def _refuse_unless_new(self, found: Loaded | CheckpointError | None, passed_over: set[int]) -> None:
        """The first rank has nothing to load. If others have, all stop; otherwise each would continue alone."""
        if not self._ranks.any(found is not None or bool(passed_over)):
            return
        if isinstance(found, Exception):
            raise found
        here = f"step {found.step}" if found is not None else "none"
        tried = f", and {sorted(passed_over)} cannot be read by all" if passed_over else ""
        raise CheckpointError(
            f"the ranks do not find the same checkpoints: this one finds {here}{tried}. See the output of the other "
            "ranks. All ranks must use one folder on a shared disk."
        )


def _raised_or_given(found: Loaded | CheckpointError | None) -> Loaded | None:
    if isinstance(found, Exception):
        raise found
    return found


def _here(found: object) -> str:
    return str(found) if isinstance(found, Exception) else "see the output of the other ranks for the reason."
