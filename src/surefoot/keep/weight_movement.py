"""Detects weights that have moved further than training usually moves them, which shows that they are damaged.

Each snapshot contains the distance that every parameter moved per step since the previous one, which defines what is
usual. When a problem begins, the same is measured since the last good snapshot, and the two are compared when a return
is considered.

`MovementJumps` compares each interval between two snapshots with all before it, independent of the loss: a learning
rate that is a hundred times too high moves the weights a hundred times as far, even if the loss does not show progress.
In healthy runs an interval hardly ever exceeds all before it by more than a factor of 3. A jump that neither the rates
nor the gradients of these steps explain was not made by training, and the run returns.

`ScriptWrites` finds the steps before which the script itself wrote to the weights: it prunes them, initialises a layer
again or loads other ones. Such a movement is intended and not damage. Memory that is corrupted does not change the
version counters of tensors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from surefoot.core.device_copies import AsyncCopy, begin_reading

if TYPE_CHECKING:
    from torch import Tensor

    Typical = Callable[[str, int, int], float]
    """Returns the median of a signal, given its name, over the steps from the second to before the third argument."""

    from surefoot.keep.snapshots import LiveTensors, Snapshot, TrainedState
    from surefoot.types import StepRecord

UNUSUAL = 2.0
"""The factor by which the movement of all weights must exceed the usual one to count as damage …"""
UNUSUAL_ALONE = 20.0
"""… or that of a single weight, which moves less evenly."""
RECORD = 1.2
"""The factor by which it must also exceed the largest one of any earlier interval at the same learning rate."""
GROWTH = 10.0
"""The maximum factor by which larger gradients may explain a larger movement."""
LEAST = 1e-3
"""… and the movement per step as a share of the norm of all weights: after almost none, any movement is unusual."""


JUMP = 10.0
"""The factor by which the movement in an interval must exceed all earlier ones to be reported …"""
JUMP_LEAST = 0.05
"""… and the movement per step as a share of the norm of all weights: a learning rate that is raised after a slow start
moves them many times further than before, but by a few percent at most …"""
JUMP_AFTER = 3
"""… and the minimum number of earlier intervals."""
INTERVALS_KEPT = 64
"""The number of intervals whose movement is remembered."""
READ_STEPS = 6
"""The number of steps after an interval at which its numbers are read: always the same, so that a run that returns does
so at the same step every time. The host reads the numbers of steps four steps late by default, so these have arrived by
then, and reading them never waits."""


class MovementJump(NamedTuple):
    """An interval in which the weights moved much further than before."""

    first: int
    last: int
    times: float
    """The factor by which the movement per step exceeds that of any earlier interval."""
    share: float
    """The movement per step as a share of the previous norm of all weights."""

    def __str__(self) -> str:
        return (
            f"the weights moved {self.times:.3g} times as far per step from step {self.first} to {self.last} as in any "
            f"interval before: by {self.share:.0%} of their norm. Check the learning rate of these steps"
        )

    def is_unexplained(self, records: Iterable[StepRecord]) -> bool:
        """Whether neither higher rates nor larger gradients than in all steps before explain the movement.

        It was then not the optimizer that moved the weights, or its state is wrong.
        """
        explained = 1.0
        now, before = dict[str, float](), dict[str, float]()
        for record in records:
            step = record.signals.step
            if record.skipped or step >= self.last:
                continue
            largest = before if step < self.first else now
            for name in ("lr", "grad_norm"):
                value = getattr(record.signals, name)
                largest[name] = max(largest.get(name, 0.0), math.inf if value is None else float(value))
        for name in ("lr", "grad_norm"):
            known = 0 < before.get(name, 0.0) < math.inf and now.get(name, math.inf) < math.inf
            explained *= max(now[name] / before[name], 1.0) if known else math.inf
        return self.times > JUMP * explained


WRITES_KEPT = 1_000
"""The number of steps that are remembered because the script wrote to the weights before them."""


class ScriptWrites:
    """Finds writes of the script to the weights, between the end of one step and the update of the next.

    Every operation of torch that writes to a tensor changes its version counter. Writes through `.data` or to raw
    memory do not, so they are not found.
    """

    def __init__(self) -> None:
        self._steps: deque[int] = deque(maxlen=WRITES_KEPT)
        self._known: tuple[int, int] | None = None

    def after_step(self, step: int, parameters: Sequence[Tensor]) -> None:
        """`step` steps are done. Reads nothing from a device."""
        self._known = step, _versions(parameters)

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        """The optimizer is about to write."""
        if self._known is not None and self._known[1] != _versions(parameters):
            self._steps.append(self._known[0])

    def forget(self) -> None:
        """An earlier state was restored since the last step: that was not the script."""
        self._known = None

    def explain(self, first: int, last: int) -> bool:
        """Whether the script wrote before one of the steps from `first` up to `last`, and not also in those before.

        A script that writes all the time, as some optimizers do between two steps, does not explain a larger movement.
        """
        earlier = first - max(last - first, 1)
        return any(first <= step < last for step in self._steps) and not any(
            earlier <= step < first for step in self._steps
        )


def _versions(parameters: Sequence[Tensor]) -> int:
    return sum(map(attrgetter("_version"), parameters))


class _Interval(NamedTuple):
    first: int
    last: int
    numbers: AsyncCopy
    """The movement of the weights per step, and their norm."""


class _Usual(NamedTuple):
    """The intervals so far: the largest movement per step, the last norm of the weights, and their number."""

    largest: float = 0.0
    norm: float = 0.0
    intervals: int = 0


class MovementJumps:
    """Finds intervals in which the weights moved much further than in all before."""

    def __init__(self) -> None:
        self._pending: _Interval | None = None
        self._found: MovementJump | None = None
        self._usual = _Usual()
        self._before_jump = _Usual()
        self._known: deque[tuple[int, int, float]] = deque(maxlen=INTERVALS_KEPT)

    def take(self, first: int, last: int, moved: Tensor, norm: Tensor) -> None:
        """Add an interval: the parameters' movement per step, and the weights' norm. Does not wait for a device."""
        self._read()
        numbers = torch.stack([torch.linalg.vector_norm(moved), norm.to(moved)])
        self._pending = _Interval(first, last, begin_reading(numbers))

    def _read(self) -> None:
        """Judge the last measured interval."""
        if self._pending is None:
            return
        (first, last, numbers), self._pending = self._pending, None
        moved, norm = numbers.wait().tolist()
        if not moved < float("inf"):  # non-finite weights are detected elsewhere
            return
        usual = self._usual
        known = usual.intervals >= JUMP_AFTER and usual.largest > 0
        if known and moved > JUMP * usual.largest and moved > JUMP_LEAST * usual.norm > 0:
            self._found = MovementJump(first, last, moved / usual.largest, moved / usual.norm)
            self._before_jump = usual
        self._usual = _Usual(max(usual.largest, moved), norm, usual.intervals + 1)
        self._known.append((first, last, moved))

    def largest(self, until: int, typical: Typical) -> float:
        """The largest movement per step in an interval up to the step `until`; 0 if none is known.

        A movement at a higher learning rate than that of the last interval is scaled down to it.
        """
        rates = [typical("lr", first, last) for first, last, _ in self._known if last <= until]
        moved = [moved for _, last, moved in self._known if last <= until]
        return max(
            (each * min(rates[-1] / rate, 1.0) for each, rate in zip(moved, rates, strict=True) if rate > 0),
            default=0.0,
        )

    def found(self, step: int) -> MovementJump | None:
        """The last jump that was found after `step` steps and not returned yet."""
        if self._pending is not None and step >= self._pending.last + READ_STEPS:
            self._read()
        found, self._found = self._found, None
        return found

    def undo(self, step: int) -> None:
        """The run has returned to `step`: drop a later interval, and a jump from what is usual."""
        if self._pending is not None and self._pending.last > step:
            self._pending = None
        while self._known and self._known[-1][1] > step:
            self._known.pop()
        if self._before_jump.intervals:
            self._usual, self._before_jump = self._before_jump, _Usual()


class _Onset(NamedTuple):
    """The movement of the weights when the current problem began."""

    last: Snapshot
    """The snapshot that they are compared with."""
    since: int
    """The step at which they were those of the snapshot."""
    step: int
    moved: Tensor
    """The movement of each parameter per step since."""
    outline: list[Any]
    """The structure of the state."""


class WeightMovement:
    """Measures the movement of the weights of one run."""

    def __init__(self, state: TrainedState, every_steps: int, writes: ScriptWrites, jumps: MovementJumps) -> None:
        """Measure the weights in `state`, of which a snapshot is taken every `every_steps`.

        What the script itself `writes` to them is intended, and not unusual. `jumps` knows the earlier intervals.
        """
        self._state, self._every, self._writes, self._jumps = state, every_steps, writes, jumps
        self._onset: _Onset | None = None
        self._returned_at = 0

    def to(self, step: int, last: Snapshot | None, live: LiveTensors, is_slow: bool) -> Tensor | None:
        """The movement of each parameter per step since the last snapshot; `None` if there is none before `step`.

        If measuring is slow, the usual movement measured earlier is returned again.
        """
        if last is None or step <= last.step:
            return None
        if is_slow:  # would copy all weights over the bus
            if last.moved is not None:
                return last.moved
            last.staged.wait()
        return self._state.moved_since(last.staged.part("tensors"), live) / (step - last.step)

    def note_onset(self, step: int, last: Snapshot) -> None:
        """The run is not healthy: if it was until now, record how far the weights have moved since `last`."""
        if self._onset is None:
            self._onset = self._measured(step, last)

    def _measured(self, step: int, last: Snapshot) -> _Onset:
        since, live = max(last.step, self._returned_at), self._state.live()
        moved = self._state.moved_since(last.staged.part("tensors"), live) / max(step - since, 1)
        return _Onset(last, since, step, moved, live.outline)

    def forget(self) -> None:
        """The run is healthy."""
        self._onset = None

    def returned(self, step: int) -> None:
        """After `step` steps the weights are those of a snapshot again, and move from there."""
        self._returned_at = step

    def is_unusual_now(self, step: int, last: Snapshot, typical: Typical) -> bool:
        """Whether the weights have moved unusually far since `last` or the return to it. Waits for the device."""
        return self._is_unusual(self._measured(step, last), typical, if_unknown=False)

    def was_unusual(self, typical: Typical, if_unknown: bool = False, allows_writes: bool = True) -> bool:
        """Whether the weights had moved unusually far, each step, when the unhealthy steps began. Waits for the device.

        The usual movement is the earlier one, or more if the gradients have grown since, up to `GROWTH` times: a task
        that the model begins to learn moves them further. Nor is it unusual if that of an earlier interval was about as
        large: some runs have phases, such as new targets every few hundred steps. If no usual movement was measured, as
        in the first steps after a restart, the result is `if_unknown`: a high loss alone does not prove damage, and the
        state to return to would be that of the restart. What the script wrote to the weights is usual, unless
        `allows_writes` is false.
        """
        if self._onset is None or self._onset.outline != self._state.live().outline:
            return if_unknown
        return self._is_unusual(self._onset, typical, if_unknown, allows_writes)

    def _is_unusual(
        self,
        measured: _Onset,
        typical: Typical,
        if_unknown: bool,
        allows_writes: bool = True,
    ) -> bool:
        last, since, onset, moved, _ = measured
        if allows_writes and self._writes.explain(since, onset):
            return False
        usual = last.moved
        if usual is None:
            return if_unknown
        growth = self._explained(last.step, since, onset, typical)
        all_usual, all_moved = growth * torch.linalg.vector_norm(usual), torch.linalg.vector_norm(moved)
        if bool(all_usual == 0) or bool(all_moved <= LEAST * self._state.norm_of(last.staged.tree)):
            return False
        # A parameter that hardly ever moves, such as a rarely used row, is compared with the others.
        alone = moved > growth * UNUSUAL_ALONE * usual.clamp(min=float(all_usual) / len(usual) ** 0.5)
        bar = torch.clamp(UNUSUAL * all_usual, min=RECORD * self._jumps.largest(last.step, typical))
        return not bool(all_moved <= bar) or bool(alone.any())

    def _explained(self, kept: int, since: int, onset: int, typical: Typical) -> float:
        """The factor by which the movement per step may exceed the usual one, for three reasons.

        - Gradients have grown.
        - The last step, whose loss was the first high one, has already moved the weights by a gradient of its own:
          other data moves them from this step on, while damage came before it.
        - Steps in random directions add up to a distance that grows with the square root of their number, so fewer
          steps than usual move the weights further per step.
        """
        before, steps = typical("grad_norm", kept - self._every, kept), max(onset - since, 1)
        if before <= 0:
            return GROWTH
        growth = min(max(typical("grad_norm", since, onset) / before, 1.0), GROWTH)
        last = min(max(typical("grad_norm", onset - 1, onset) / before, growth), GROWTH)
        return (growth * (steps - 1) + last) / steps * math.sqrt(max(self._every / steps, 1.0))
