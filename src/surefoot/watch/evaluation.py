"""Blocks without gradients, between the steps: which model, in which mode, on which data, with which losses.

In some of the blocks the recorder is also active, until models have been called a few times: it records the losses with
their targets, and dropout. These blocks have their own time budget, a part of that of sampled steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.record.facts import EvaluationBlock
from surefoot.watch.call_facts import MOST_FACTS
from surefoot.watch.loss_graph import pairs_of
from surefoot.watch.sampling_budget import SamplingBudget
from surefoot.watch.script_hooks import has_modes_of_its_own
from surefoot.watch.step_recording import StepRecording

if TYPE_CHECKING:
    from surefoot.record.facts import ModelCall
    from surefoot.watch.context import WatchContext

FIRST_BLOCKS = 12
MOST_CALLS = 400
CALLS_OF_BLOCK = 16
"""The maximum number of model calls recorded in one block."""
PART = 0.25
"""The share of the budget of sampled steps for the recorder in blocks without gradients."""


class Evaluations:
    """Opened when the user's code, or a trainer that it calls, disables gradients; closed when the block ends."""

    def __init__(self, context: WatchContext) -> None:
        self._context, self._state = context, context.state
        self._sampled: StepRecording | None = None
        self._depth = 0
        self._budget = SamplingBudget(PART)
        self.blocks = 0
        self.opened = 0
        """The number of blocks opened, including those before the first step and inside sampled steps."""
        self._watched = 0
        self._empty = 0
        self.calls: list[ModelCall] = []
        self.recorded: list[EvaluationBlock] = []
        """What the recorder found, one entry for each block in which it was active."""

    def open(self) -> None:
        """Start observing model calls, unless a sampled step already does."""
        self._depth += 1
        self.opened += self._depth == 1
        if self._depth > 1 or self._state.sampled is not None or self._sampled is not None or not self._state.steps:
            return
        self.blocks += 1
        sampled = self.blocks <= FIRST_BLOCKS or self.blocks & (self.blocks - 1) == 0
        if not sampled or len(self.calls) >= MOST_CALLS:
            return
        use_hooks = not self._state.compiled
        use_recorder = use_hooks and self._budget.allows() and not has_modes_of_its_own()
        self._sampled = StepRecording(
            self._context,
            use_recorder=use_recorder and not self._state.sampling_stopped,
            thorough=False,
            use_hooks=use_hooks,
            most_calls=CALLS_OF_BLOCK,
        )
        self._state.evaluated = self._sampled
        self._budget.begin()
        self._sampled.begin()

    def close(self) -> bool | None:
        """End the block; returns whether a model was called in it, or `None` if it was not observed or continues."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self._sampled is None:
            return None
        has_calls = bool(self._sampled.model_calls.calls)
        self.drop()
        return has_calls

    def forget_empty(self) -> None:
        """Do not count the last block: it was opened by a library and called no model."""
        self.blocks -= 1
        self._watched -= 1
        self._empty -= not self._state.compiled

    @property
    def blocks_with_calls(self) -> int:
        """The estimated number of blocks that called a model, from the share among the observed ones.

        Many loops clamp or average weights without gradients at every step, which is not an evaluation.
        """
        return round(self.blocks * (1 - self._empty / self._watched)) if self._watched else self.blocks

    def drop(self) -> None:
        """Stop observing and keep the calls."""
        sampled, self._sampled = self._sampled, None
        self._state.evaluated = None
        self._depth = 0
        if sampled is None:
            return
        seen = _seen(sampled, self.blocks) if sampled.recorder is not None else None
        sampled.end()
        if sampled.recorder is not None:
            sampled.recorder.forget()
            self._budget.pay(sampled.seconds)
        calls = sampled.model_calls.calls
        self._watched += 1
        self._empty += not calls and not self._state.compiled  # calls of compiled models are not observed
        self.calls += [replace(call, block=self.blocks, block_calls=len(calls)) for call in calls[:CALLS_OF_BLOCK]]
        if seen is not None and calls and (seen.losses or seen.dropouts):
            self.recorded.append(seen)


def _seen(recording: StepRecording, block: int) -> EvaluationBlock:
    """The record of a block, made before its end, which drops the targets."""
    calls, last = recording.calls, recording.model_calls.last_features
    return EvaluationBlock(
        block=block,
        step=recording.step,
        losses=calls.losses.losses[:MOST_FACTS],
        dropouts=calls.layers.dropouts[:MOST_FACTS],
        pairs=pairs_of(calls.losses, last) if last is not None else None,
    )
