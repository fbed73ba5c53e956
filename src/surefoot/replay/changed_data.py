"""The changes of `surefoot replay --experiments` that affect the data of the captured step.

`other-batches` lets the script keep its own batches, `other-seed` sets other random streams, `tiny-batch` repeats the
captured step with parts of its batch. `experiments.changes` installs all other changes.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surefoot.core.random_state import set_streams
from surefoot.experiments.changes.data import OTHER, change_order
from surefoot.replay.failing_rows import OtherRows, RowSearch, microbatch_to_search

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.record.incidents.contents import MicrobatchState
    from surefoot.record.incidents.reading import StoredIncident
    from surefoot.replay.first_step import FirstStep


class ChangedData:
    """Decides which batch and which random numbers the captured step gets."""

    def __init__(self, experiment: Experiment, incident: StoredIncident) -> None:
        self._experiment, self._incident = experiment, incident
        self._first_step: FirstStep | None = None
        self.change = experiment.order.get("change")
        self.search: RowSearch | None = None
        """The search for failing rows, while there is one."""
        self.others: OtherRows | None = None
        """Replaces captured rows in the script's own batches, with `other-batches`."""
        self.rows: RowSearch | None = None
        """The search whose result is recorded; it is kept when `search` is abandoned."""
        self.why_not: str | None = None
        """Why the change does not apply."""

    def install(self, first_step: FirstStep | None) -> bool:
        """Apply the change if it affects the data; returns whether it does. A target has no first step."""
        self._first_step = first_step
        if self.change == "other-batches":
            self._use_other_batches()
        elif self.change == "other-seed":
            self._use_other_seed()
        elif self.change == "tiny-batch":
            self._search()
        else:
            return False
        return True

    def _use_other_batches(self) -> None:
        self.others = OtherRows(self._incident)
        if self._first_step is not None:
            self._first_step.gives = False
            self._first_step.drawing = self.others.of
            change_order(self._experiment)
        self._experiment.acted += 1

    def _use_other_seed(self) -> None:
        first_step = self._first_step
        if first_step is not None and not first_step.feeds:
            self._does_not_apply("the script makes its data from the same random numbers")
            return
        captured: MicrobatchState = self._incident.state["window"]["microbatches"][microbatch_to_search(self._incident)]
        if self._experiment.order.get("draws") and captured["drawn"] and captured["streams"] is not None:
            self._search(halves=False)
        elif first_step is not None:
            first_step.place_streams = lambda _: seed_otherwise()
        self._experiment.acted += 1

    def _does_not_apply(self, why: str) -> None:
        self.why_not = why
        self._experiment.patience = 0

    def _search(self, halves: bool = True) -> None:
        """Repeat the captured batch: parts of it, or the whole with other random numbers."""
        self.search = self.rows = search = RowSearch(self._incident, self._experiment.order.get("bar"), halves)
        if halves and search.why_not:
            self._does_not_apply(search.why_not)
            return
        self._experiment.acted += 1
        if self._first_step is not None:
            first_step, microbatch = self._first_step, microbatch_to_search(self._incident)

            def draw(batch: Any) -> Any:
                if search.take_turn():
                    first_step.play_again(microbatch)
                elif search.found.ahead and not halves:
                    self._repeat_no_more(first_step)
                elif search.is_over:
                    self._experiment.end("rows")
                return batch

            first_step.choose, first_step.drawing = search.chosen, draw
            first_step.place_streams = self.place_streams

    def _repeat_no_more(self, first_step: FirstStep) -> None:
        """Continue after one try: the script draws batches ahead of their steps, so tries cannot be distinguished."""
        self.search, first_step.drawing = None, lambda batch: batch

    def place_streams(self, captured: Any) -> None:
        """Set the random numbers of a try: the captured ones, or others."""
        if self.search is None:
            return
        if self.search.draw:
            seed_otherwise(self.search.draw)
        else:
            set_streams(captured)
        self.search.begins()


def seed_otherwise(draw: int = 0) -> None:
    """Other random numbers than those of the captured step, different for each `draw`."""
    torch.manual_seed(OTHER + draw)
    random.seed(OTHER + draw)
    np.random.seed(OTHER + draw)
