"""Calls without gradients, between the steps: which model, in which mode, on what data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.watch.step_recording import StepRecording

if TYPE_CHECKING:
    from surefoot.record.facts import ModelCall
    from surefoot.watch.context import WatchContext

FIRST_BLOCKS = 12
MOST_CALLS = 400


class Evaluations:
    """Opened when the user's code, or a trainer that it calls, turns gradients off; closed when that is over."""

    def __init__(self, context: WatchContext) -> None:
        self._context, self._state = context, context.state
        self._sampled: StepRecording | None = None
        self._depth = 0
        self.blocks = 0
        self.opened = 0
        """How many blocks were opened, those before the first step and inside sampled steps included."""
        self.calls: list[ModelCall] = []

    def open(self) -> None:
        """Start watching model calls, unless a sampled step already does."""
        self._depth += 1
        self.opened += self._depth == 1
        if self._depth > 1 or self._state.sampled is not None or self._sampled is not None or not self._state.steps:
            return
        self.blocks += 1
        sampled = self.blocks <= FIRST_BLOCKS or self.blocks & (self.blocks - 1) == 0
        if not sampled or len(self.calls) >= MOST_CALLS:
            return
        self._sampled = StepRecording(
            self._context, use_recorder=False, thorough=False, use_hooks=not self._state.compiled
        )
        self._sampled.begin()

    def close(self) -> bool | None:
        """The block is over; returns whether a model was called in it, or `None` if it was not watched or goes on."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self._sampled is None:
            return None
        has_calls = bool(self._sampled.model_calls.calls)
        self.drop()
        return has_calls

    def forget_empty(self) -> None:
        """The last block, a library's, was no evaluation: it does not count."""
        self.blocks -= 1

    def drop(self) -> None:
        """Stop watching and keep the calls."""
        sampled, self._sampled = self._sampled, None
        self._depth = 0
        if sampled is not None:
            sampled.end()
            calls = sampled.model_calls.calls
            self.calls += [replace(call, block=self.blocks, block_calls=len(calls)) for call in calls[:16]]
