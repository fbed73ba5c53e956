"""Measures and decides a step with one CUDA graph, which replaces about a hundred kernel launches by one.

The rules are written as ordinary tensor operations, so that there is only one implementation. On a GPU their launches
would cost the host milliseconds per step; recorded once into a CUDA graph and replayed, they cost a few microseconds.
After `WARM_STEPS` ordinary steps, the kernels that measure the gradients and the decision are recorded with fixed
inputs and states. The kernels read the addresses of the gradients from tables, which are up to date when the graph is
replayed. A step whose shape differs from the recorded one (another set of gradients, no loss) is decided with ordinary
operations, and so is every step if recording fails.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.act.loss_scale import DynamicLossScaler
from surefoot.core.device import can_record, recorded_graph
from surefoot.core.state_tree import leaves
from surefoot.detect import step_rules
from surefoot.detect.combine import Combined, Sustained
from surefoot.observe.tensors import TensorStatistics

if TYPE_CHECKING:
    from surefoot.guard.step_decision import StepDecider, StepDecision, StepInput, StepPolicy

log = logging.getLogger("surefoot")

WARM_STEPS = 3
MOST_RECORDINGS = 8
RECORDED_SIGNALS = {"loss", "grad_norm", "nonfinite"}
"""The signals that a recording is given. A rule that judges another one, such as a signal of the user's, is not
recorded: it would never see a value."""


class GraphedDecider:
    """Decides steps like `StepDecider`, through a CUDA graph once it is recorded."""

    def __init__(self, decider: StepDecider) -> None:
        self._decider = decider
        self._usable = decider.group is None and _is_ours(decider.policy)
        self._seen: dict[tuple[Any, ...], int] = {}
        self._recorded: dict[tuple[Any, ...], _Recording] = {}

    def decide(self, given: StepInput) -> tuple[StepDecision, Tensor]:
        """The decision, and all its numbers in one vector."""
        key = self._key(given)
        if key is None:
            return self._decide_directly(given)
        recording = self._recorded.get(key)
        if recording is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= WARM_STEPS:
                return self._decide_directly(given)
            if len(self._recorded) >= MOST_RECORDINGS:
                self.forget()
            try:
                recording = self._recorded[key] = _Recording(self._decider, given)
            except Exception as error:  # if recording fails, ordinary operations always work
                self._usable = False
                log.debug("deciding without a CUDA graph: %s", error)
                return self._decide_directly(given)
        return recording.replay(given)

    def forget(self) -> None:
        """Drop the recordings: the states that they use have been replaced."""
        self._recorded.clear()

    def _decide_directly(self, given: StepInput) -> tuple[StepDecision, Tensor]:
        before = self._decider.policy.states
        decision = self._decider.decide(given)
        vector = decision.packed()
        states = leaves(before)
        if self._recorded and states:  # recordings continue to use the same state tensors
            torch._foreach_copy_(states, leaves(self._decider.policy.states))
            self._decider.policy.states = before
        return decision, vector

    def _key(self, given: StepInput) -> tuple[Any, ...] | None:
        """The properties that must be equal for a recording to be used; `None` if the step cannot be recorded."""
        measured = given.statistics
        if not self._usable or not can_record(_device_of(given)):
            return None
        divisor = "tensor" if isinstance(given.divisor, Tensor) else given.divisor
        outer = tuple(each is None for each in given.outer[:2]), given.outer.is_loss_scale
        positions = given.positions is None or given.positions.data_ptr()
        clipped = given.clipped is None, given.was_broken is None
        which = len(measured.norm) if isinstance(measured, TensorStatistics) else measured.key
        return which, given.loss is None, divisor, positions, outer, clipped


class _Recording:
    """One recorded decision with its fixed inputs and outputs."""

    def __init__(self, decider: StepDecider, given: StepInput) -> None:
        self._fixed = [tensor.detach().clone() for tensor in _tensors_of(given)]
        fixed_given = _with_tensors(given, self._fixed)
        states = leaves(decider.policy.states)
        before = decider.policy.states
        try:
            with recorded_graph(_device_of(given)) as self._graph:
                self.decision = decider.decide(fixed_given)
                self.vector = self.decision.packed()
                if states:  # a rule without memory has none
                    torch._foreach_copy_(states, leaves(decider.policy.states))
        finally:
            decider.policy.states = before  # recording ran nothing; from now on the graph advances them in place

    def replay(self, given: StepInput) -> tuple[StepDecision, Tensor]:
        torch._foreach_copy_(self._fixed, _tensors_of(given))
        self._graph.replay()
        return self.decision, self.vector


def _device_of(given: StepInput) -> torch.device:
    measured = given.statistics
    return measured.norm.device if isinstance(measured, TensorStatistics) else measured.tables.device


def _tensors_of(given: StepInput) -> list[Tensor]:
    """The tensors that are copied for a recording. Gradients that it measures itself are not among them."""
    measured = given.statistics.columns() if isinstance(given.statistics, TensorStatistics) else ()
    found = [given.param_norm, torch.as_tensor(given.broken_setting), *measured]
    if given.loss is not None:
        found.append(given.loss)
    if isinstance(given.divisor, Tensor):
        found.append(given.divisor)
    return found + [each for each in (*given.outer[:2], given.clipped, given.was_broken) if each is not None]


def _with_tensors(given: StepInput, tensors: list[Tensor]) -> StepInput:
    param_norm, broken, *rest = tensors
    statistics = given.statistics
    if isinstance(statistics, TensorStatistics):
        (norm, largest, nonfinite), rest = rest[:3], rest[3:]
        statistics = TensorStatistics(norm, largest, nonfinite)
    loss = rest.pop(0) if given.loss is not None else None
    divisor = rest.pop(0) if isinstance(given.divisor, Tensor) else given.divisor
    optional = (*given.outer[:2], given.clipped, given.was_broken)
    scale, found_inf, clipped, was_broken = (None if each is None else rest.pop(0) for each in optional)
    return replace(
        given,
        statistics=statistics,
        loss=loss,
        divisor=divisor,
        param_norm=param_norm,
        broken_setting=broken,
        own={},
        outer=given.outer._replace(scale=scale, found_inf=found_inf),
        clipped=clipped,
        was_broken=was_broken,
    )


def _is_ours(policy: StepPolicy) -> bool:
    """Whether the arithmetic of every part depends on its tensors alone, in the same way at every step."""
    if policy.scaler is not None and not isinstance(policy.scaler, DynamicLossScaler):
        return False
    clipper_is_ours = policy.clipper is None or type(policy.clipper).__module__ == "surefoot.act.clip"
    rules = (policy.rules, policy.setback, policy.lost_progress)
    return clipper_is_ours and all(rule is None or _rule_is_ours(rule) for rule in rules)


def _rule_is_ours(rule: Any) -> bool:
    if isinstance(rule, Combined):
        return all(_rule_is_ours(part) for part in rule.parts)
    if isinstance(rule, Sustained):
        return _rule_is_ours(rule.detector)
    if type(rule).__module__ != step_rules.__name__:
        return False
    judged = {*getattr(rule, "signals", ()), getattr(rule, "signal", "loss")}
    return isinstance(rule, step_rules.Limit) or judged <= RECORDED_SIGNALS
