"""Which steps are repeated after a return, and which of them without their batches.

A return to an earlier moment undoes steps, and the same data can be fed again. Whether the trouble comes back then
shows what caused it:

1. The first time every step is repeated as it was. Weights, moments or gradients that were damaged by accident are not
   damaged again, and the run is where it would have been.
2. If the trouble comes back at the same place, the step that it began with is left out: a bad batch. That is the first
   step with a loss or a gradient norm far above those before it (`first_outlier`), since harm may take some steps to
   show, or else the first unhealthy one.
3. If it still comes back, the step before that and every step up to the last unhealthy one are left out: several bad
   batches, or one that looked like any other.

After that the data are not to blame, and the caller does what it does without a repeat. A trouble that comes back is
noticed after a few unhealthy steps, since its place is known. Each trouble takes one of `attempts`; calm stretches give
them back. Pure functions, each of which gives the next state; `RepeatPlanner` holds the state of one run.
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
"""How often the same steps are repeated."""
COMES_BACK_STEPS = 3
"""Unhealthy steps among the repeated ones that show that the trouble has come back."""
SAME_TROUBLE_STEPS = 10
"""An onset so many steps after the last repeated step is still of the same trouble."""
MOST_LEFT_OUT = 32
"""Steps that are left out at most for one trouble."""
LONGEST_WAY_BACK = 100_000
"""How many steps back the steps are remembered that were left out: no checkpoint to return to is older."""
OUTLIER_WINDOW, LEAST_COMPARED = 64, 8
"""How many steps before it a step is compared with, at most and at least."""
OUTLIER_SPREADS = 12.0
"""How many median deviations above the median an outlier is; for normal noise that is 8 standard deviations."""


class RepeatState(NamedTuple):
    """Where the repeats of a run stand. Counts are of steps unless they say otherwise."""

    tries: int = 0
    """How often the steps of the last trouble were repeated."""
    onset: int = -1
    """The first unhealthy step of that trouble; -1 for none."""
    last: int = -1
    """The last unhealthy step of it."""
    until: int = 0
    """The steps before this one were taken before: they are, or were, repeated."""
    unhealthy: int = 0
    """Unhealthy ones among the repeated steps."""
    troubles: int = 0
    """Troubles that a calm stretch has not given back yet."""
    calm: int = 0
    """Healthy steps in a row after the repeated ones."""
    left_out: tuple[int, ...] = ()
    """Steps whose batches are drawn and not trained on."""
    begins: int = -1
    """The first step that the trouble may have begun with: a moment must be older."""


def observe(state: RepeatState, step: int, unhealthy: bool, calm_steps: int) -> tuple[RepeatState, bool]:
    """Account for one step; the second value says that the trouble has come back and can be tried once more."""
    if step < state.until:
        state = state._replace(unhealthy=state.unhealthy + unhealthy, last=max(state.last, step * unhealthy))
        return state, unhealthy and state.unhealthy >= COMES_BACK_STEPS and state.tries < MOST_TRIES
    calm = 0 if unhealthy else state.calm + 1
    given_back = calm > 0 and calm % calm_steps == 0
    return state._replace(calm=calm, troubles=max(state.troubles - given_back, 0)), False


def first_outlier(records: Iterable[StepRecord], first: int, last: int) -> int | None:
    """Of the steps from `first` to `last` that were applied, the first with a loss or a gradient far above the others.

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
    """The state for repeating the steps around a trouble; `None` if they were repeated often enough.

    `onset` and `last` are the first and the last unhealthy step, `suspect` is the step that may have caused it, and
    `reached` steps were taken.
    """
    same = state.tries > 0 and onset <= state.until + SAME_TROUBLE_STEPS
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
    # Bad batches of earlier troubles stay out; steps long gone are never met again.
    left_out = tuple(sorted({each for each in (*state.left_out, *blamed) if each > reached - LONGEST_WAY_BACK}))
    until = max(reached, state.until) if same else reached
    return RepeatState(tries, first, last, until, 0, troubles, 0, left_out, begins if blamed else first)


def give_up(state: RepeatState) -> RepeatState:
    """The steps cannot be repeated once more, whatever comes."""
    return state._replace(tries=MOST_TRIES)


class RepeatPlanner:
    """Plans the repeats of one run."""

    def __init__(self, recovery: TrainingRecovery | None) -> None:
        self._recovery = recovery
        self.state = RepeatState() if recovery is not None and recovery.repeat else None
        """Where repeats stand; `None` if a return repeats no steps."""

    def advise(self, step: int, unhealthy: bool, advice: Decision) -> Decision:
        """A return at once if the trouble has come back among the repeated steps; else what is advised."""
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
        """How to repeat the steps that a return would undo; `None` if it is to be one to earlier weights.

        The return was decided about `step`, and `reached` steps were taken. `oldest` is the first step that could be
        repeated, and `records` are those of the last steps.
        """
        if self.state is None or self._recovery is None or decision.before is None:
            return None
        onset = decision.before + self._recovery.margin_steps
        suspect = first_outlier(records, oldest, onset)
        return plan(self.state, onset, step, reached, self._recovery.attempts, suspect)

    def give_up(self) -> None:
        """The steps of the trouble under way cannot be repeated once more."""
        if self.state is not None:
            self.state = give_up(self.state)
