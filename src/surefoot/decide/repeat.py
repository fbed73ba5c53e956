"""Which steps are repeated after a return, and which of them without their batches.

A return to an earlier moment undoes steps, and the same data can be fed again. Whether the trouble comes back then tells
what caused it:

1. The first time every step is repeated as it was. Weights, moments or gradients that were damaged by accident are not
   damaged again, and the run is where it would have been.
2. If the trouble comes back at the same place, the step that it began with is left out: a bad batch.
3. If it still comes back, the step before it and every step up to the last unhealthy one are left out: several bad
   batches, or one whose harm showed a step later.

After that the data are not to blame, and the caller does what it does without a repeat. A trouble that comes back is
noticed after a few unhealthy steps, since its place is known. Each trouble takes one of `attempts`; calm stretches give
them back. Pure functions: each gives the next state.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_TRIES = 3
"""How often the same steps are repeated."""
COMES_BACK_STEPS = 3
"""Unhealthy steps among the repeated ones that show that the trouble has come back."""
SAME_TROUBLE_STEPS = 10
"""An onset so many steps after the last repeated step is still of the same trouble."""
MOST_LEFT_OUT = 32
"""Steps that are left out at most for one trouble."""


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


def observe(state: RepeatState, step: int, unhealthy: bool, calm_steps: int) -> tuple[RepeatState, bool]:
    """Account for one step; the second value says that the trouble has come back and can be tried once more."""
    if step < state.until:
        state = state._replace(unhealthy=state.unhealthy + unhealthy, last=max(state.last, step * unhealthy))
        return state, unhealthy and state.unhealthy >= COMES_BACK_STEPS and state.tries < MOST_TRIES
    calm = 0 if unhealthy else state.calm + 1
    given_back = calm > 0 and calm % calm_steps == 0
    return state._replace(calm=calm, troubles=max(state.troubles - given_back, 0)), False


def plan(state: RepeatState, onset: int, last: int, reached: int, attempts: int) -> RepeatState | None:
    """The state for repeating the steps around a trouble; `None` if they were repeated often enough.

    `onset` and `last` are the first and the last unhealthy step, and `reached` steps were taken.
    """
    same = state.tries > 0 and onset <= state.until + SAME_TROUBLE_STEPS
    tries = state.tries + 1 if same else 1
    troubles = state.troubles + (not same)
    if tries > MOST_TRIES or troubles > attempts:
        return None
    first = min(onset, state.onset) if same else onset
    last = max(last, state.last if same else last)
    blamed: tuple[int, ...] = ()
    if tries == 2:
        blamed = (first,)
    elif tries > 2:
        begin = max(first - 1, 0)
        blamed = tuple(range(begin, min(last + 1, begin + MOST_LEFT_OUT)))
    kept = () if same else state.left_out
    # Steps long gone are never met again.
    left_out = tuple(sorted({each for each in (*kept, *blamed) if each > reached - 1_000}))
    return RepeatState(tries, first, last, reached, 0, troubles, 0, left_out)


def give_up(state: RepeatState) -> RepeatState:
    """The steps cannot be repeated once more, whatever comes."""
    return state._replace(tries=MOST_TRIES)
