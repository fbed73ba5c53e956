"""The progress of loops over `epochs()`, so that completed epochs are not repeated after a restart.

Loops are identified by their order. A loop that was left with `break` counts as ended when something new begins; until
then it is still active, because the program may be stopping. A loop inside a loop is a plain `range`: its passes find
their position themselves.
"""

from __future__ import annotations

from typing import TypedDict


class LoopsState(TypedDict):
    """What is stored about the loops."""

    ends: list[int]
    done: int
    first_pass: int
    under_way: bool


class EpochLoops:
    """The loops over epochs of a run: those that ended, and the current one."""

    def __init__(self, state: LoopsState | None = None) -> None:
        self._ends: list[int] = [] if state is None else list(state["ends"])
        """The number of the pass after each loop that has ended."""
        self._done = 0 if state is None else state["done"]
        self._first_pass = 0 if state is None else state["first_pass"]
        self._resumed = state is not None and state["under_way"]
        self._entered = 0
        self._alive = False
        self._left_at: int | None = None

    @property
    def done(self) -> int:
        """Completed epochs of the current loop."""
        return self._done

    def settle(self) -> None:
        """Something new begins: a loop that was left with `break` has ended."""
        if self._left_at is not None:
            self._ends.append(self._left_at)
            self._left_at = None

    def enter(self, next_pass: int) -> tuple[int, int] | None:
        """A loop begins: returns its first epoch and the number of the next pass; `None` if it is already complete."""
        self.settle()
        number = self._entered
        self._entered += 1
        if number < len(self._ends):
            return None
        if not self._resumed:
            self._done, self._first_pass = 0, next_pass
        self._resumed, self._alive = False, True
        return self._done, self._first_pass

    def end_of_last_entered(self) -> int:
        """The number of the pass after the loop that was already complete."""
        return self._ends[self._entered - 1]

    @property
    def nested(self) -> bool:
        """Whether a loop is running: another one would be nested."""
        return self._alive

    def epoch_over(self, next_pass: int) -> None:
        """One more epoch is done."""
        self._done, self._first_pass = self._done + 1, next_pass

    def leave(self, next_pass: int, finished: bool) -> None:
        """The loop has no further epochs, or was left with `break`."""
        self._alive, self._left_at = False, next_pass
        if finished:
            self.settle()

    def state_dict(self) -> LoopsState:
        """Plain values."""
        under_way = self._alive or self._resumed or self._left_at is not None
        return {"ends": list(self._ends), "done": self._done, "first_pass": self._first_pass, "under_way": under_way}
