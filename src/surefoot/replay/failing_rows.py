"""Which rows of the captured batch fail: the script's own loop runs halves of the batch, and halves of those.

Each time the loop draws a batch, it gets a part of the captured one, from the captured state, so that every iteration
is one try and one process suffices. A part is repeated up to the length of the whole batch, for layers and loops that
need a certain number of rows. Parts that fail are halved until single rows are left. If neither half fails alone, the
rows fail only together. If every eighth of the batch fails, single rows are not the cause.

A loop that draws its batches ahead of their steps is detected and not searched, because it is not known which part
failed.

A part fails if its loss or a gradient is not finite, or, for a spike, if its loss is above a given limit.

A step that draws random numbers (noise, dropout) may fail by chance. So the whole batch is first run with `OTHER_DRAWS`
other draws; unless it fails with every one of them, no rows are reported, because each row would have drawn its own
numbers. The probe `other-seed` consists of the same tries. Generators that only the script uses are not detected.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.core.nested import equal
from surefoot.core.random_state import read_streams
from surefoot.keep.staging import map_tensors
from surefoot.record.facts import FailingRows
from surefoot.record.incidents.reading import StoredIncident, number
from surefoot.record.incidents.values import Encoded, tensors_in

MOST_TRIES = 120
MOST_ROWS = 8
"""How many single rows are searched for."""
MANY_PARTS = 8
"""If the batch is in this many parts and all of them fail, single rows are not the cause."""
OTHER_DRAWS = 10
"""The number of other draws of random numbers; a failure in one of three draws is missed once in 60,000 times."""


def microbatch_to_search(incident: StoredIncident) -> int:
    """The microbatch to search: the first whose loss is not finite, or the first."""
    losses = incident.facts["fingerprints"].get("losses") or []
    broken = [any(not math.isfinite(number(loss.get("value"))) for loss in each) for each in losses]
    return broken.index(True) if True in broken else 0


class RowSearch:
    """Bisects the batch. Called at each draw and at each backward; a part is judged when the next one is drawn.

    Without `halves`, the whole batch is run with other random numbers, and nothing else.
    """

    def __init__(self, incident: StoredIncident, bar: float | None, halves: bool = True) -> None:
        self._bar, self._halves = bar, halves
        microbatches, number_of_it = incident.state["window"]["microbatches"], microbatch_to_search(incident)
        microbatch = microbatches[number_of_it]
        parts = microbatch["drawn"] or ([microbatch["given"]] if microbatch["given"] else [])
        lengths = {len(tensor) for tensor in tensors_in(parts) if tensor.dim()}
        self.rows = lengths.pop() if len(lengths) == 1 else 0
        self.why_not = ""
        if not parts:
            self.why_not = "the batch was not drawn from a loader, so its rows are not known"
        elif not self.rows:
            self.why_not = "the tensors of the batch share no first dimension"
        elif self.rows < 2:
            self.why_not = "the batch has a single row"
        self.draw = 0 if halves else 1
        """The random numbers of the current try: 0 are the captured ones."""
        self._streams: Any = None
        """The random streams before the step."""
        self._parts: list[list[int]] = [list(range(self.rows))]
        """Parts still to be tried in this round."""
        self._failing: list[list[int]] = []
        """Parts of this round that failed."""
        self._tried = 0
        self._halved: list[list[int]] = []
        """The parts whose halves are tried in this round."""
        self._is_trying = False
        self._failed: bool | None = None
        """Whether the current try failed, as far as known."""
        self._drawn, self._of_a_step = 0, len(parts)
        self.found = FailingRows(
            of=self.rows,
            fails=None if halves else True,
            microbatch=number_of_it if len(microbatches) > 1 else None,
        )
        """The result so far."""

    def take_turn(self) -> bool:
        """A batch is drawn: judge the previous try, if any. Returns whether a new one begins."""
        if self._is_trying and self._failed is None:
            self._drawn += 1  # another batch of the same step, if it has several
            self.found = replace(self.found, ahead=self._drawn > self._of_a_step)
            return False
        if self._failed is not None:
            self._judge(self._parts.pop(0), self._failed)
        self._failed, self._is_trying, self._drawn = None, not self.is_over, 1
        return self._is_trying

    def begins(self) -> None:
        """The random streams are at the beginning of the try."""
        self._streams = read_streams()

    def note_backward(self, loss: float, finite_gradients: bool) -> None:
        """Backward was run. A step may have several, and fails if any of them fails."""
        if self._streams is not None and not equal(self._streams, read_streams()):
            self.found = replace(self.found, draws=replace(self.found.draws, random=True))
        bad = not finite_gradients or not math.isfinite(loss) or (self._bar is not None and loss > self._bar)
        self._failed = bad or bool(self._failed)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to try."""
        return self.found.done or self.found.ahead or self.found.tries >= MOST_TRIES

    def chosen(self, plain: Encoded) -> Encoded:
        """The part of a captured batch that is tried next, repeated to its old length."""
        part = self._parts[0]
        index = torch.tensor([part[i % len(part)] for i in range(self.rows)])
        return plain if len(part) == self.rows else _selected(plain, index, self.rows)

    def _judge(self, part: list[int], fails: bool) -> None:
        if self.draw:
            draws = self.found.draws
            tried = replace(draws, tries=draws.tries + 1, failed=draws.failed + fails)
            self.found = replace(self.found, draws=tried)
        else:
            self.found = replace(self.found, tries=self.found.tries + 1)
            self._note(part, fails)
        draws = self.found.draws
        is_open = draws.random and self.found.fails and draws.tries < OTHER_DRAWS
        self.draw = draws.tries + 1 if is_open else 0
        if self.draw:
            self._parts = [list(range(self.rows))]
        elif not self._parts and self._halves and draws.failed == draws.tries:
            self._next_round()
        self.found = replace(self.found, done=not self._parts)

    def _note(self, part: list[int], fails: bool) -> None:
        if len(part) == self.rows:
            self.found = replace(self.found, fails=fails)
        if not fails:
            return
        if len(part) == 1:
            self.found = replace(self.found, single=[*self.found.single, part[0]])
        else:
            self._failing.append(part)
        self.found = replace(self.found, narrowed=[part[0], part[-1]])

    def _next_round(self) -> None:
        """Halve the parts that failed. A part whose halves do not fail only fails as a whole."""
        together = [part for part in self._halved if not _has_failing_half(part, self._failing, self.found.single)]
        ends = [[part[0], part[-1]] for part in together]
        self.found = replace(self.found, together=[*self.found.together, *ends])
        if len(self._failing) >= MANY_PARTS and len(self._failing) == self._tried:
            self.found = replace(self.found, everywhere=True)
            return
        if len(self.found.single) >= MOST_ROWS:
            return
        self._halved, self._failing = self._failing, []
        self._parts = [half for part in self._halved for half in _halves(part)]
        self._tried = len(self._parts)


def _halves(part: list[int]) -> tuple[list[int], list[int]]:
    middle = len(part) // 2
    return part[:middle], part[middle:]


def _has_failing_half(part: list[int], failing: list[list[int]], single: list[int]) -> bool:
    return any(half in failing or (len(half) == 1 and half[0] in single) for half in _halves(part))


def _selected(plain: Encoded, index: Tensor, length: int) -> Encoded:
    """The same plain data with other rows."""
    value = plain.get("value")
    if plain["is"] == "tensor" and isinstance(value, Tensor):
        if not value.dim() or len(value) != length:
            return plain
        selected = plain.copy()
        selected.pop("strides", None)
        selected.pop("beyond", None)
        selected["value"] = value.index_select(0, index.to(value.device))
        return selected
    if "items" not in plain:
        return plain
    if plain["is"] in ("list", "tuple"):
        return {**plain, "items": [_selected(item, index, length) for item in plain["items"]]}
    return {**plain, "items": [[name, _selected(item, index, length)] for name, item in plain["items"]]}


class OtherRows:
    """The script's own batches without the rows of the captured one, which a small data set returns again."""

    def __init__(self, incident: StoredIncident) -> None:
        self._known: set[bytes] = set()
        for microbatch in incident.state["window"]["microbatches"]:
            self._known.update(_row_prints([microbatch["drawn"], microbatch["given"]]))
        self._kept = 0
        self._last: Any = None
        """A copy of the last batch without captured rows, for batches that contain only captured rows."""

    def of(self, batch: Any) -> Any:
        """The batch, captured rows replaced by others: of its own, or those of a batch before. If there are none, it is
        as it was."""
        prints = _row_prints(batch)
        known = [row in self._known for row in prints]
        others = [i for i, is_known in enumerate(known) if not is_known]
        if len(others) == len(prints):
            self._last = map_tensors(batch, Tensor.clone)
            return batch
        if not others and self._last is not None:
            return map_tensors(self._last, Tensor.clone)
        if not others:
            self._kept += len(prints)
            return batch
        index = torch.tensor([others[i % len(others)] if is_known else i for i, is_known in enumerate(known)])

        def change(tensor: Tensor) -> Tensor:
            same = tensor.dim() and len(tensor) == len(prints)
            return tensor.index_select(0, index.to(tensor.device)) if same else tensor

        return map_tensors(batch, change)

    def take_kept(self) -> int:
        """How many captured rows could not be replaced since the last call."""
        kept, self._kept = self._kept, 0
        return kept


def _row_prints(batch: Any) -> list[bytes]:
    """Every row of the first tensor with rows, as bytes."""
    tensor = next((each for each in tensors_in(batch) if each.dim()), None)
    if tensor is None or not tensor.numel():
        return []
    table = tensor.detach().cpu().contiguous().view(len(tensor), -1)
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in table]
