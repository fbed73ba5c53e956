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
a few unhealthy steps, because its place is known. Each problem takes one of `attempts`; healthy steps restore them. A
series of bad batches whose end is known (`Decision.through`) is left out at once.

Repeating steps unchanged does no harm to a healthy run: it is where it was, bit for bit. So a suspicion suffices for a
test (`Decision.is_test`): a refused step, gradients or most of the last losses far above all before, gradients that
overflow at smaller and smaller loss scales, a high loss although the weights had moved as usual. An accident does not
recur. What recurs belongs to the data or began before the moment returned to, and nothing is left out because of a
test.

The functions are pure and return the next state; `RepeatPlanner` holds the state of one run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
UNUSUAL_GRADIENT, UNUSUAL_STEPS, UNUSUAL_MOST_STEPS = 10.0, 2, 8
"""The factor above all gradient norms of the window that is worth a test, the least number of consecutive steps with
such gradients, and the number after which the end of them is not awaited."""

OVERFLOW_STEPS = 3
"""The least number of consecutive overflows that is worth a test. They reduce the loss scale to an eighth: gradients
that fitted at a scale fit at half of it, and a scale that has grown too far overflows once."""

RISEN_STEPS = 8
"""The number of last steps whose median loss is compared with the steps before, each time as many have passed."""


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
    tests: int = 0
    """Tests that healthy steps have not restored yet."""
    is_test: bool = False
    """Whether the steps of the last problem were repeated only to see whether it recurs."""


def observe(state: RepeatState, step: int, unhealthy: bool, calm_steps: int) -> tuple[RepeatState, bool]:
    """Process one step; the second value is whether the problem has recurred and can be tried again."""
    if step < state.until:
        state = state._replace(unhealthy=state.unhealthy + unhealthy, last=max(state.last, step * unhealthy))
        recurs = unhealthy and state.unhealthy >= RECURRENCE_STEPS and not state.is_test
        return state, recurs and state.tries < MOST_TRIES
    calm = 0 if unhealthy else state.calm + 1
    restored = calm > 0 and calm % calm_steps == 0
    return state._replace(
        calm=calm, troubles=max(state.troubles - restored, 0), tests=max(state.tests - restored, 0)
    ), False


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


def unusual_gradients(records: Sequence[StepRecord]) -> int | None:
    """The first of the last steps, the newest record last, whose gradients are far above all before them.

    Found when they have just ended, or have lasted for `UNUSUAL_MOST_STEPS`: a test then covers all of them.
    """
    applied = (each for each in reversed(records) if not each.skipped and each.signals.grad_norm is not None)
    last = list(itertools.islice(applied, UNUSUAL_MOST_STEPS + 1))
    if len(last) <= UNUSUAL_MOST_STEPS:
        return None
    norms = [float(each.signals.grad_norm) for each in last]  # type: ignore[arg-type]
    if norms[1] > UNUSUAL_GRADIENT * norms[0]:
        del last[0], norms[0]
        length = next((n for n in range(1, len(norms)) if norms[n - 1] > UNUSUAL_GRADIENT * norms[n]), 0)
    else:
        length = UNUSUAL_MOST_STEPS if norms[-2] > UNUSUAL_GRADIENT * norms[-1] else 0
    if length < UNUSUAL_STEPS:
        return None
    before = norms[length:] + [float(each.signals.grad_norm) for each in itertools.islice(applied, OUTLIER_WINDOW)]  # type: ignore[arg-type]
    is_unusual = len(before) >= OUTLIER_WINDOW // 2 and min(norms[:length]) > UNUSUAL_GRADIENT * max(before) > 0
    return last[length - 1].signals.step if is_unusual else None


def overflowed_steps(records: Sequence[StepRecord]) -> int | None:
    """The first of several consecutive steps whose gradients overflowed, if the last step ends them.

    There must be an applied step before: at its start a run looks for its loss scale.
    """
    if records[-1].skipped:
        return None
    before = itertools.islice(reversed(records), 1, None)
    overflowed = list(itertools.takewhile(lambda each: each.overflow, before))
    if len(overflowed) < OVERFLOW_STEPS or all(each.skipped for each in records if each is not records[-1]):
        return None
    return overflowed[-1].signals.step


def risen_losses(records: Sequence[StepRecord]) -> int | None:
    """The first step to repeat if most of the last losses, and not already of those before them, are outliers.

    Steps in a wrong direction raise the loss little by little, so the steps before the last ones are repeated as well.
    """
    now = records[-1].signals.step
    if (now + 1) % RISEN_STEPS:
        return None
    last = list(itertools.islice(reversed(records), 2 * RISEN_STEPS + OUTLIER_WINDOW))
    losses = [float(each.signals.loss) for each in last if not each.skipped and each.signals.loss is not None]
    if len(losses) < 2 * RISEN_STEPS + OUTLIER_WINDOW // 2 or not all(map(math.isfinite, losses)):
        return None
    blocks = losses[:RISEN_STEPS], losses[RISEN_STEPS : 2 * RISEN_STEPS]
    window = deque(losses[2 * RISEN_STEPS :])
    if statistics.median(window) == min(window):
        return None  # such as a loss of exactly 0 before the first reward
    now_is, was = (_is_outlier(statistics.median_low(block), window) for block in blocks)
    return now - 3 * RISEN_STEPS if now_is and not was else None


def _is_same(state: RepeatState, onset: int) -> bool:
    """Whether a problem that begins at `onset` is the one whose steps were repeated last.

    After a test, only a problem that began in the repeated steps has been shown to recur.
    """
    return state.tries > 0 and onset < state.until + (0 if state.is_test else SAME_PROBLEM_STEPS + 1)


def plan_test(state: RepeatState, onset: int, begins: int, reached: int, attempts: int) -> RepeatState | None:
    """The state for repeating steps unchanged, to see whether a problem recurs; `None` if they were repeated before.

    The moment to return to is not newer than `begins`.
    """
    if (state.tries > 0 and onset < state.until) or state.tests >= attempts:
        return None
    return RepeatState(
        1, onset, onset, reached, 0, state.troubles, 0, state.left_out, begins, tests=state.tests + 1, is_test=True
    )


def plan_without(state: RepeatState, onset: int, last: int, reached: int, attempts: int) -> RepeatState | None:
    """The state for repeating the steps around a series of bad batches, from `onset` to `last`, without them."""
    troubles = state.troubles + (not _is_same(state, onset) or state.is_test)
    if troubles > attempts or last - onset >= MOST_LEFT_OUT:
        return None
    left_out, until = _left_out(state, range(onset, last + 1), reached), max(reached, state.until)
    return RepeatState(MOST_TRIES, onset, last, until, 0, troubles, 0, left_out, onset, tests=state.tests)


def _left_out(state: RepeatState, blamed: Iterable[int], reached: int) -> tuple[int, ...]:
    """Bad batches of earlier problems stay left out; much older steps are not needed."""
    return tuple(sorted({each for each in (*state.left_out, *blamed) if each > reached - REMEMBERED_STEPS}))


def plan(
    state: RepeatState, onset: int, last: int, reached: int, attempts: int, suspect: int | None = None
) -> RepeatState | None:
    """The state for repeating the steps around a problem; `None` if they were repeated often enough.

    `onset` and `last` are the first and the last unhealthy step, `suspect` is the step that may have caused it, and
    `reached` steps were taken.
    """
    same = _is_same(state, onset)
    tries = state.tries + 1 if same else 1
    troubles = state.troubles + (not same or state.is_test)
    if tries > MOST_TRIES or troubles > attempts:
        return None
    first = min(onset, state.onset) if same and not state.is_test else onset  # a test begins with a suspicion
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
    left_out = _left_out(state, blamed, reached)
    until = max(reached, state.until) if same else reached
    return RepeatState(tries, first, last, until, 0, troubles, 0, left_out, begins if blamed else first, state.tests)


def give_up(state: RepeatState) -> RepeatState:
    """The steps cannot be repeated again."""
    return state._replace(tries=MOST_TRIES)


class RepeatPlanner:
    """Plans the repeats of one run."""

    def __init__(self, recovery: TrainingRecovery | None) -> None:
        self._recovery = recovery
        self.state = RepeatState() if recovery is not None and recovery.repeat else None
        """The state of the repeats; `None` if a return repeats no steps."""

    def suspicion(self, records: Sequence[StepRecord], refused: bool, alone: bool) -> tuple[int, str] | None:
        """The step and the reason why the last steps are worth repeating: what happened may be an accident.

        `refused` says whether the last one was refused, which all ranks know; gradients are judged only if it is
        `alone`, without other ranks.
        """
        if self.state is None:
            return None
        if refused:
            return records[-1].signals.step, "the step was refused"
        if not alone:
            return None
        if (first := overflowed_steps(records)) is not None:
            return first, f"gradients overflowed in all steps from {first} on, at smaller and smaller loss scales"
        if (first := unusual_gradients(records)) is not None:
            return first, f"gradients from step {first} on were far above all before them"
        first = risen_losses(records)
        return (
            None if first is None else (first, f"most of the last {RISEN_STEPS} losses are far above all before them")
        )

    def advise(
        self, step: int, unhealthy: bool, advice: Decision, suspicion: tuple[int, str] | None = None
    ) -> Decision:
        """An immediate return if the problem has recurred among the repeated steps; otherwise the given decision.

        A `suspicion`, the step that it begins with and its reason, suffices for a test if nothing else is decided.
        """
        if self.state is None or self._recovery is None:
            return advice
        self.state, comes_back = observe(self.state, step, unhealthy, self._recovery.calm_steps)
        if advice.action != "none":
            return advice
        if not comes_back:
            if suspicion is None or plan_test(self.state, suspicion[0], 0, step, self._recovery.attempts) is None:
                return advice
            return replace(advice, action="roll_back", reason=suspicion[1], before=suspicion[0], is_test=True)
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
        attempts = self._recovery.attempts
        onset = decision.before + self._recovery.margin_steps
        if decision.is_test:
            onset = onset if decision.only_if_moved else decision.before  # a suspicion names its first step
            return plan_test(self.state, onset, decision.before, reached, attempts)
        if decision.through is not None:
            return plan_without(self.state, onset, decision.through, reached, attempts)
        suspect, state = first_outlier(records, oldest, onset), self.state
        if state.is_test and state.begins > decision.before:  # it may have returned to damaged weights
            state = state._replace(tries=0)
        return plan(state, onset, step, reached, attempts, suspect)

    def give_up(self) -> None:
        """The steps of the current problem cannot be repeated again."""
        if self.state is not None:
            self.state = give_up(self.state)
