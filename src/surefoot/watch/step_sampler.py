"""Which steps are sampled, and what the sampled steps found.

The first steps are all sampled; after that, each sampled step is 1.35 times as far into the run as the one before, or
later if there is no time for it yet (`sampling_budget`). More are added when something new begins: an optimizer, a
loaded state, a spike of the loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from surefoot.core.device import forbids_waiting
from surefoot.core.without_hooks import WithoutHooks, without_torch_function
from surefoot.watch.data_origin import data_origins_in, origin_of_data
from surefoot.watch.deferred import ArrivalQueue
from surefoot.watch.eager_stance import EAGER_LOOKS, EagerStance
from surefoot.watch.function_recorder import remove_leftover_recorders
from surefoot.watch.log_rows import WatchLog
from surefoot.watch.optimizer_order import OptimizerOrder
from surefoot.watch.sampling_budget import EXTRA, SamplingBudget
from surefoot.watch.script_hooks import has_modes_of_its_own
from surefoot.watch.step_recording import StepRecording

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.record.facts import NonFiniteLoss, SampledStep
    from surefoot.watch.context import WatchContext
    from surefoot.watch.data_origin import DataOrigin
    from surefoot.watch.optimizer_record import OptimizerRecord
    from surefoot.watch.step_rows import SeriesRow

_function_modes = torch._C._len_torch_function_stack
FIRST_STEPS = 8
"""The number of first steps that are sampled."""
SPACING = 1.35
LONGEST_WAIT, LONGEST_WAIT_ON_DEVICE = 2, 3
"""A step is sampled, regardless of cost, when the number of steps has grown by this factor since the last one …"""
FEWEST_BETWEEN = 16
"""… but not within this many steps, so that short runs on slow machines are also sampled after their beginning."""
THOROUGH_STEPS = (1, 13, 144)
"""The sampled steps that also measure each term's gradient and causality, with an extra backward …"""
THOROUGH_COST = 4.0
"""… so that they cost about as much as this many others. The first is always thorough."""
MANY_EVALUATIONS = 4
MOST_BACKWARDS = 64
"""A sampled step ends after this many backward calls, if no optimizer has stepped."""
EXTRA_STEPS = 3
"""The number of steps that are sampled when something new begins."""


class StepSampler:
    """Begins and ends the sampled steps, and keeps their facts."""

    def __init__(self, context: WatchContext) -> None:
        self._context, self._state, self._probes = context, context.state, context.probes
        self._most = context.options.most_sampled_steps
        self._order = OptimizerOrder()
        self.sampled_steps: list[SampledStep] = []
        self._arriving: ArrivalQueue[SampledStep] = ArrivalQueue(self._keep)
        self._budget = SamplingBudget()
        self.eager = EagerStance()
        """Makes compiled code run eagerly in sampled steps, if this was requested."""
        self.origins: dict[str, list[tuple[str, str, str]]] = {}
        """For each kind of autograd node: the site, module and call that made it in the last sampled step."""
        self._data_origins: list[DataOrigin] = []
        """How data entered the graph in the last sampled step."""
        self._next_step = 0
        self._latest_step = FEWEST_BETWEEN
        self._extra_steps = 0
        self._first_backward = 0
        self._evaluations = 0
        """The number of closure evaluations in the last step."""
        self._cycle: set[int] = set()
        """The optimizers that have stepped since the sampled step began."""

    def begin(self) -> None:
        """Sample from here to the end of the next step."""
        state = self._state
        if state.sampled is not None or state.sampling_stopped or self._arriving.count >= self._most:
            return
        if "looking" in self._probes.problems or forbids_waiting():
            return
        if state.evaluated is not None:
            state.evaluated.remove_hooks()
        is_asked = state.compiled and self._context.options.eager_looks and EAGER_LOOKS not in self._probes.problems
        is_eager = is_asked and self.eager.take()
        is_plain = is_eager or not state.compiled
        try:
            state.sampled = StepRecording(
                self._context,
                use_recorder=is_plain and not has_modes_of_its_own(),
                thorough=state.steps in THOROUGH_STEPS and self._budget.allows(cost=THOROUGH_COST),
                use_hooks=is_plain,
                eager=self.eager if is_eager else None,
            )
        except BaseException:
            self.eager.release()
            raise
        self._budget.begin()
        self._first_backward = state.backwards
        self._cycle = set()
        self._probes.safely("looking", state.sampled.begin)

    def end(self) -> None:
        """Remove the hooks and keep the records."""
        sampled, self._state.sampled = self._state.sampled, None
        if sampled is None:
            return
        try:
            with without_torch_function():
                sampled.end()
        except Exception as error:
            sampled.remove_hooks()
            self._probes.switch_off("looking", error)
        facts = self._probes.safely("looking", sampled.as_facts)
        if facts is not None:
            self._context.events.write(WatchLog.sampled_tensors, facts, sampled.calls.layers.outputs)
            sampled.calls.layers.outputs.clear()  # `sampled` may live until the next garbage collection
            sampled.seconds += self._probes.seconds_so_far()
            self._arriving.add(replace(facts, host_seconds=round(sampled.seconds, 6)), sampled.has_deferred)
            self._probes.safely("looking", self._arriving.settle, False)
            self.origins = sampled.origins or self.origins
            if sampled.recorder is not None:  # none: the data entered as it was
                self._data_origins = sampled.data_origins
        if sampled.recorder is not None:
            sampled.recorder.forget()
        is_limited = self._state.on_device and not self._context.options.is_preflight
        self._budget.is_on_device = is_limited
        self._budget.pay(sampled.seconds)
        longest_wait = LONGEST_WAIT_ON_DEVICE if is_limited else LONGEST_WAIT
        self._latest_step = max(sampled.step + FEWEST_BETWEEN, longest_wait * sampled.step)
        if self._arriving.count < FIRST_STEPS or self._extra_steps > 0:
            self._extra_steps -= 1
            # A step that evaluates a closure many times counts as many steps: sampling every second one is enough.
            self._next_step = self._state.steps + (self._evaluations > MANY_EVALUATIONS)
        else:
            self._next_step = max(self._state.steps + 1, math.ceil(sampled.step * SPACING))

    def _keep(self, facts: SampledStep) -> None:
        self.sampled_steps.append(facts)
        self._context.events.write(WatchLog.sampled_step, facts)

    def settle(self, wait: bool) -> None:
        """Keep the facts of sampled steps whose numbers have arrived from the device; with `wait`, of all."""
        if self._arriving.waiting:
            self._probes.safely("looking", self._arriving.settle, wait)

    def sample_soon(self) -> None:
        """Something new began: sample the next few steps."""
        if not self._budget.allows(times=EXTRA):
            return
        if self._state.steps:
            self._extra_steps = EXTRA_STEPS
        if self._state.sampled is None:
            self.begin()

    def restart(self) -> None:
        """End the sampled step in progress and begin another one."""
        self.end()
        self.begin()

    # Backward and steps

    def after_backward(self) -> None:
        """`backward` has finished."""
        state = self._state
        if state.sampled is None:
            return
        self._probes.safely("backward", state.sampled.after_backward)
        if state.sampled is not None and state.backwards_at_closure is not None:
            self._probes.safely("looking", state.sampled.stop_following_calls)
        if state.sampled is not None and state.backwards - self._first_backward >= MOST_BACKWARDS:
            self.end()

    def before_step(self, record: OptimizerRecord, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step."""
        state = self._state
        if state.sampled is None:
            return
        state.sampled.claim_roots(record.number)
        if record.number in self._cycle and not has_closure:
            self._finish_cycle()
        if state.sampled is not None:
            record.sampled_steps += 1
            self._probes.safely("gradients", state.sampled.updates.before_step, record.number, optimizer)
            if state.sampled.recorder is not None:
                state.sampled.recorder.enter_step(has_closure)

    def leave_step(self, record: OptimizerRecord, evaluations: int) -> None:
        """An optimizer's step has ended, after this many evaluations of its closure; its row is not complete yet."""
        self._evaluations = evaluations
        sampled = self._state.sampled
        if sampled is None:
            return
        if sampled.recorder is not None:
            sampled.recorder.leave_step()
        if evaluations:
            sampled.claim_roots(record.number)

    def after_step(self, record: OptimizerRecord, row: SeriesRow) -> None:
        """An optimizer has stepped: end the sampled step, or begin one if it is due."""
        state = self._state
        if self._arriving.waiting:
            self.settle(wait=False)
        if state.sampled is None:
            if _function_modes():
                remove_leftover_recorders()
            optimizers = self._context.optimizers.all
            is_rare = len(optimizers) > 1 and self._order.is_rare_next(record, optimizers)
            is_due = is_rare or state.steps >= self._next_step
            is_new = self._context.data.begins_pass(state.steps) and self._budget.allows(times=EXTRA)
            if (is_due and self._budget.allows()) or is_new or state.steps >= self._latest_step:
                self.begin()
            return
        with WithoutHooks():
            is_skipped = bool(row.get("skipped"))  # on a device; a sampled step waits for it anyway
        updates = state.sampled.updates
        self._probes.safely("updates", updates.drop_step if is_skipped else updates.after_step, record.number)
        self._cycle.add(record.number)
        if len(self._context.optimizers.alive()) == 1:
            self._finish_cycle()

    def _finish_cycle(self) -> None:
        self.end()
        if self._state.steps >= self._next_step and self._budget.allows(EXTRA if self._extra_steps > 0 else 1.0):
            self.begin()

    # Origins of bad values

    def origins_now(self) -> dict[str, list[tuple[str, str, str]]]:
        """The lines that called operations, in the sampled step in progress, or else in the last one."""
        sampled = self._state.sampled
        return self.origins if sampled is None or sampled.recorder is None else sampled.recorder.origins()

    def data_origin(self, facts: NonFiniteLoss, tensor: Tensor | None, drawn: list[list[Tensor]]) -> NonFiniteLoss:
        """Add the origin of non-finite data, and whether it was finite when it was loaded.

        Args:
            facts: What is known about the bad tensor.
            tensor: The tensor, if the graph holds it.
            drawn: The batches that data loaders returned for this step.
        """
        if facts.dtype == "float16" and not facts.nan:
            return facts  # a cast may have made it non-finite
        sampled = self._state.sampled
        if sampled is not None and sampled.recorder is not None:
            known = data_origins_in(sampled.recorder)
            if known:
                return origin_of_data(facts, tensor, known, True, drawn)
        return origin_of_data(facts, tensor, self._data_origins, False, drawn)

    def forget_tensors(self) -> None:
        """Drop weak references to tensors."""
        self.end()
        self._data_origins = []
