"""Decides which steps are repeated after a return, and which of them without their batches.

A return to an earlier moment undoes steps, and the same data can be used again. Whether the problem then recurs shows
its cause:

1. The first time, every step is repeated unchanged. Weights, moments or gradients that were damaged by accident are not
damaged again, and the run is where it would have been.
2. If the problem recurs at the same place, the step that it began with is left out: a bad batch. That is the first step
with a loss or a gradient norm far above the earlier ones (`first_outlier`), because damage may take some steps to show,
or else the first unhealthy one.
3. If it still recurs, the step before that and every step up to the last unhealthy one are left out: several bad
batches, or one that looked like any other.

After that the data are not the cause, and the caller proceeds without a repeat. A problem that recurs is detected after
a few unhealthy steps, because its place is known. Each problem takes one of `attempts`; healthy steps restore them. The
functions are pure and return the next state; `RepeatPlanner` holds the state of one run.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from surefoot.decide.recovery import TrainingRecovery
    from surefoot.types import Decision, StepRecord

MOST_TRIES = 3
"""The number of times the same steps are repeated."""
RECURRENCE_STEPS = 3
"""The number of unhealthy steps among the repeated ones that show that the problem has recurred."""
SAME_PROBLEM_STEPS = 10
"""An onset up to this many steps after the last repeated step belongs to the same problem."""
MOST_LEFT_OUT = 32
"""The maximum number of steps that are left out for one problem."""
REMEMBERED_STEPS = 100_000
"""The number of steps for which left-out steps are remembered: no checkpoint to return to is older."""
OUTLIER_WINDOW, LEAST_COMPARED = 64, 8
"""The maximum and minimum number of earlier steps that a step is compared with."""
OUTLIER_SPREADS = 12.0
"""The number of median deviations above the median of an outlier; for normal noise, 8 standard deviations."""


class RepeatState(NamedTuple):
    """The state of the repeats of a run. Counts are of steps unless noted otherwise."""

    tries: int = 0
    """The number of times the steps of the last problem were repeated."""
    onset: int = -1
    """The first unhealthy step of that problem; -1 for none."""
    last: int = -1
    """The last unhealthy step of it."""
    until: int = 0
    """The steps before this one were taken before: they are, or were, repeated."""
    unhealthy: int = 0
    """Unhealthy ones among the repeated steps."""
    troubles: int = 0
    """Problems that healthy steps have not restored yet."""
    calm: int = 0
    """Consecutive healthy steps after the repeated ones."""
    left_out: tuple[int, ...] = ()
    """Steps whose batches are drawn but not trained on."""
    begins: int = -1
    """The first step that the problem may have begun with: a moment must be older."""


def observe(state: RepeatState, step: int, unhealthy: bool, calm_steps: int) -> tuple[RepeatState, bool]:
    """Process one step; the second value is whether the problem has recurred and can be tried again."""
    if step < state.until:
        state = state._replace(unhealthy=state.unhealthy + unhealthy, last=max(state.last, step * unhealthy))
        return state, unhealthy and state.unhealthy >= RECURRENCE_STEPS and state.tries < MOST_TRIES
    calm = 0 if unhealthy else state.calm + 1
    given_back = calm > 0 and calm % calm_steps == 0
    return state._replace(calm=calm, troubles=max(state.troubles - given_back, 0)), False


def first_outlier(records: Iterable[StepRecord], first: int, last: int) -> int | None:
    """The first applied step from `first` to `last` with a loss or a gradient far above the others.

    A value is compared with the median of the steps before, in units of their median deviation from it.
    """
    before: dict[str, deque[float]] = {name: deque(maxlen=OUTLIER_WINDOW) for name in ("loss", "grad_norm")}
    for record in records:
        if record.skipped:
            continue
        for name, window in before.items():
            value = getattr(record.signals, name)
            if value is None or not math.isfinite(value):
                continue
            if first <= record.signals.step <= last and _is_outlier(float(value), window):
                return record.signals.step
            window.append(float(value))
    return None


def _is_outlier(value: float, window: deque[float]) -> bool:
    if len(window) < LEAST_COMPARED:
        return False
    middle = statistics.median(window)
    spread = statistics.median(abs(each - middle) for each in window)
    return value > middle + max(OUTLIER_SPREADS * spread, abs(middle))


def plan(
    state: RepeatState, onset: int, last: int, reached: int, attempts: int, suspect: int | None = None
) -> RepeatState | None:
    """The state for repeating the steps around a problem; `None` if they were repeated often enough.

    `onset` and `last` are the first and the last unhealthy step, `suspect` is the step that may have caused it, and
    `reached` steps were taken.
    """
    same = state.tries > 0 and onset <= state.until + SAME_PROBLEM_STEPS
    tries = state.tries + 1 if same else 1
    troubles = state.troubles + (not same)
    if tries > MOST_TRIES or troubles > attempts:
        return None
    first = min(onset, state.onset) if same else onset
    begins = first if suspect is None else min(suspect, first)
    if same and state.left_out:
        begins = min(begins, state.begins)
    last = max(last, state.last if same else last)
    blamed: tuple[int, ...] = ()
    if tries == 2:
        blamed = (begins,)
    elif tries > 2:
        begins = max(begins - 1, 0)
        blamed = tuple(range(begins, min(last + 1, begins + MOST_LEFT_OUT)))
    # Bad batches of earlier problems stay left out; much older steps are not needed.
    left_out = tuple(sorted({each for each in (*state.left_out, *blamed) if each > reached - REMEMBERED_STEPS}))
    until = max(reached, state.until) if same else reached
    return RepeatState(tries, first, last, until, 0, troubles, 0, left_out, begins if blamed else first)


def give_up(state: RepeatState) -> RepeatState:
    """The steps cannot be repeated again."""
    return state._replace(tries=MOST_TRIES)


class RepeatPlanner:
    """Plans the repeats of one run."""

    def __init__(self, recovery: TrainingRecovery | None) -> None:
        self._recovery = recovery
        self.state = RepeatState() if recovery is not None and recovery.repeat else None
        """The state of the repeats; `None` if a return repeats no steps."""

    def advise(self, step: int, unhealthy: bool, advice: Decision) -> Decision:
        """An immediate return if the problem has recurred among the repeated steps; otherwise the given decision."""
        if self.state is None or self._recovery is None:
            return advice
        self.state, comes_back = observe(self.state, step, unhealthy, self._recovery.calm_steps)
        if not comes_back or advice.action != "none":
            return advice
        reason = f"the problem of step {self.state.onset} occurred again when the steps were repeated"
        before = self.state.onset - self._recovery.margin_steps
        return replace(advice, action="roll_back", reason=reason, before=before, only_repeat=True)

    def plan(
        self, decision: Decision, step: int, reached: int, oldest: int, records: Iterable[StepRecord]
    ) -> RepeatState | None:
        """How to repeat the steps that a return would undo; `None` if only the weights return.

        The return was decided for `step`, and `reached` steps were taken. `oldest` is the first step that could be
        repeated, and `records` are those of the last steps.
        """
        if self.state is None or self._recovery is None or decision.before is None:
            return None
        onset = decision.before + self._recovery.margin_steps
        suspect = first_outlier(records, oldest, onset)
        return plan(self.state, onset, step, reached, self._recovery.attempts, suspect)

    def give_up(self) -> None:
        """The steps of the current problem cannot be repeated again."""
        if self.state is not None:
            self.state = give_up(self.state)
