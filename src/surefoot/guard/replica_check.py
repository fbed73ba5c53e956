"""Checks occasionally whether the replicas of a model are still equal on all ranks.

A rank's parameters and optimizer state are reduced to one 64-bit fingerprint, on the device and without waiting. It is
sent in the all-reduce that the ranks use at every step to agree. With up to 21 ranks, each has its own position in the
vector, so that the sum over the ranks is a list of all fingerprints. With more ranks, each sends the 64 bits of its
fingerprint as 64 numbers: the sums are the number of ranks that have each bit, and equal replicas have all or none.
Only if that shows a difference, the all-reduce eight steps later contains the list. No collective is added, and steps
that are not checked send nothing. The host reads the sums when they have arrived. The fingerprint of the majority is
taken as the correct one, or that of the lowest rank if there is no majority.

When ranks differ, the next check is more detailed: the first different rank and the one that it is compared with also
send a fingerprint of each tensor, so that the first tensor that differs is known. Checked steps are chosen by their
number alone, because every rank must put the same number of values into the all-reduce.

Only plain replicas are checked: DDP, with an optimizer of torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.device_copies import begin_reading
from surefoot.core.weak_reference import weak_reference
from surefoot.decide.agreement import copies_of_first
from surefoot.guard.model_sampling import RANK_STEPS
from surefoot.observe.fingerprints import fingerprint, fingerprints, state_fingerprints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from surefoot.core.device_copies import AsyncCopy
    from surefoot.decide.agreement import Ranks
    from surefoot.guard.run_history import RunHistory
    from surefoot.observe.parameters import Layout
    from surefoot.types import StepRecord

CAUSE = "dist.replicas-diverged"
_PIECES = (0, 22), (22, 21), (43, 21)
"""First bit and length of the three numbers that a fingerprint is sent as: float32 holds 24 bits exactly."""
_BITS = 64
LISTED = _BITS // len(_PIECES)
"""With up to this many ranks, each sends a list, which is shorter than the bits."""
NAMED_AFTER_STEPS = 8
"""The list is sent this many steps after a difference in the bits: every rank has read the sums by then."""
_HALVES = (0, 16), (16, 16)
"""The same for the 32 bits of one tensor."""


@dataclass(frozen=True)
class Divergence:
    """Ranks with different parameters or optimizer state."""

    step: int
    """The step before which the difference was found."""
    last_equal_step: int | None
    odd: tuple[int, ...]
    """The ranks that differ from the majority."""
    reference: int
    """The lowest rank of the majority."""
    tensor: str | None = None
    """The first tensor that differs; `None` before the detailed check."""

    def summary(self) -> str:
        """One sentence with the ranks and the steps."""
        who = f"rank {self.odd[0]}" if len(self.odd) == 1 else f"ranks {', '.join(map(str, self.odd[:8]))}"
        since = "" if self.last_equal_step is None else f"; they were equal before step {self.last_equal_step:,}"
        where = "parameters or optimizer state" if self.tensor is None else f"values of {self.tensor}"
        return f"{who} and rank {self.reference} hold different {where} before step {self.step:,}{since}"


@dataclass(frozen=True)
class _Sent:
    """A check whose result is being copied to the host."""

    step: int
    sums: AsyncCopy
    closer: Divergence | None
    """The difference that is compared in detail."""
    is_list: bool = True
    """Whether it contains a list of fingerprints, rather than the counts of their bits."""


class ReplicaCheck:
    """Computes the fingerprints of this rank, and compares those of all ranks."""

    def __init__(self, layout: Layout, optimizer: Any, ranks: Ranks) -> None:
        self._layout, self._optimizer = layout, weak_reference(optimizer)
        self._place, self._count = ranks.place, ranks.count
        self._sent: list[_Sent] = []
        self._sends_list = True
        """Whether the vector of the current step is a list."""
        self._differs_at: int | None = None
        """The check whose bits differed, until a list has identified the ranks."""
        self._named_at: int | None = None
        """The step that sends a list if the last bits differed."""
        self._last_equal: int | None = None
        self._known: Divergence | None = None
        self._found: list[Divergence] = []

    def numbers(self, step: int) -> Tensor | None:
        """The numbers that this rank adds to the all-reduce of a step; `None` if the step is not checked."""
        is_due, is_follow_up = RANK_STEPS.due(step), step == self._named_at
        if self._sent:
            # Every rank must know by now whether to send details; the result arrived long ago.
            self._read(wait=is_due or is_follow_up)
        if not is_due and not (is_follow_up and self._differs_at is not None):
            return None
        home = self._layout.home
        parameters = [parameter for _, parameter in self._layout.parameters]
        each = fingerprints([parameter.detach() for parameter in parameters], home)
        each = each * 3 + state_fingerprints(self._optimizer(), parameters, home)
        self._sends_list = self._count <= LISTED or self._differs_at is not None or self._known is not None
        if not self._sends_list:
            self._named_at = step + NAMED_AFTER_STEPS
            return _bits(fingerprint(each))
        lists = torch.zeros(self._count, len(_PIECES), device=home)
        lists[self._place] = _split(fingerprint(each), _PIECES)
        closer = self._closer
        if closer is None:
            return lists.reshape(-1)
        tensors = torch.zeros(2, len(parameters), len(_HALVES), device=home)
        for row, rank in enumerate((closer.odd[0], closer.reference)):
            if rank == self._place:
                tensors[row] = _split(each ^ (each >> 32), _HALVES)
        return torch.cat([lists.reshape(-1), tensors.reshape(-1)])

    def take(self, step: int, sums: Tensor) -> None:
        """The sums of the numbers of all ranks have been computed."""
        self._sent.append(_Sent(step, begin_reading(sums), self._closer, self._sends_list))

    def report_to(self, history: RunHistory) -> Callable[[StepRecord], None]:
        """A function that records the findings in the history when it is called with a step."""

        def report(record: StepRecord) -> None:
            if self._sent:
                self._read(wait=False)
            while self._found:
                found = self._found.pop(0)
                evidence = {
                    "rank": found.odd[0],
                    "ranks": list(found.odd[:64]),
                    "compared_with_rank": found.reference,
                    "first_step": found.step,
                    "last_equal_step": found.last_equal_step,
                    "first_tensor": found.tensor,
                }
                history.note(record.signals, CAUSE, "error", found.summary(), evidence=evidence)

        return report

    @property
    def _closer(self) -> Divergence | None:
        """The difference that the next check examines in detail, if its tensor is not known yet."""
        return self._known if self._known is not None and self._known.tensor is None else None

    def _read(self, wait: bool) -> None:
        while self._sent and (wait or self._sent[0].sums.has_arrived()):
            sent = self._sent.pop(0)
            numbers = sent.sums.wait().tolist()
            if sent.is_list:
                self._judge(sent.step, numbers, sent.closer)
            else:
                self._judge_bits(sent.step, numbers)

    def _judge_bits(self, step: int, counts: list[float]) -> None:
        if all(count in (0, self._count) for count in counts):
            self._last_equal = step
        else:
            self._differs_at = step

    def _judge(self, step: int, numbers: list[float], closer: Divergence | None) -> None:
        found_at = step if self._differs_at is None else self._differs_at
        self._differs_at = None
        size = len(_PIECES)
        held = [tuple(numbers[size * rank : size * (rank + 1)]) for rank in range(self._count)]
        votes = Counter(held)
        if len(votes) == 1:
            self._last_equal, self._known = step, None
            return
        usual = max(votes, key=lambda each: (votes[each], -held.index(each)))
        odd = tuple(rank for rank, each in enumerate(held) if each != usual)
        if closer is not None and self._known is not None:
            self._name_tensor(numbers[size * self._count :], closer)
        if self._known is None or self._known.odd != odd:
            self._known = Divergence(found_at, self._last_equal, odd, held.index(usual))
            self._found.append(self._known)

    def _name_tensor(self, numbers: list[float], closer: Divergence) -> None:
        middle = len(numbers) // 2
        mine, theirs = numbers[:middle], numbers[middle:]
        names = [name for name, _ in self._layout.parameters]
        places = [place // len(_HALVES) for place in range(middle) if mine[place] != theirs[place]]
        if places and places[0] < len(names):
            self._known = Divergence(
                closer.step, closer.last_equal_step, closer.odd, closer.reference, names[places[0]]
            )
            self._found.append(self._known)


def _split(value: Tensor, pieces: Sequence[tuple[int, int]]) -> Tensor:
    """Integers as several smaller ones, exact in float32, along a new last dimension."""
    return torch.stack([(value >> first) & ((1 << length) - 1) for first, length in pieces], -1).to(torch.float32)


def _bits(value: Tensor) -> Tensor:
    """The bits of one integer, as separate numbers."""
    return ((value.reshape(1) >> torch.arange(_BITS, device=value.device)) & 1).to(torch.float32)


def replica_check(models: Sequence[nn.Module], optimizer: Any, layout: Layout, ranks: Ranks) -> ReplicaCheck | None:
    """The check for a model that several ranks hold copies of; `None` for any other."""
    return ReplicaCheck(layout, optimizer, ranks) if ranks.several and copies_of_first(models, optimizer) else None
