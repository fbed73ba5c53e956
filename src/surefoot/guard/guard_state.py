"""The state of a guard in a checkpoint: the states of the rules, and the progress of the run.

A stabilizer adds the state of its accumulation window to it; an attachment has nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from surefoot.core.formats import STABILIZER_STATE
from surefoot.core.state_tree import pack
from surefoot.errors import SettingError
from surefoot.guard.step_results import settled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch import Tensor

    from surefoot.guard.context import GuardContext
    from surefoot.guard.step_decision import StepPolicyState
    from surefoot.guard.step_results import LiveStepResults, StepResults, StepResultsState


class _GuardStateBase(TypedDict):
    schema: int
    policy: StepPolicyState
    param_norm: Tensor | None
    """The last measured norm of all parameters."""


class LiveGuardState(_GuardStateBase):
    """The state of a guard, including steps whose numbers may not have arrived yet."""

    results: LiveStepResults


class GuardState(_GuardStateBase):
    """The state of a guard, as it is stored."""

    results: StepResultsState


def read_state(guard: GuardContext, results: StepResults, live: bool = False) -> LiveGuardState:
    """The guard's own state, including steps whose numbers may not have arrived yet.

    With `live`, tensors are not copied.
    """
    return {
        "schema": STABILIZER_STATE.version,
        "policy": guard.policy.state_dict(live),
        "param_norm": pack(guard.guarded.measurer.param_norm, live),
        "results": results.state_dict(),
    }


def settled_state(state: LiveGuardState) -> GuardState:
    """The state once the numbers of its last steps have arrived."""
    return {**state, "results": settled(state["results"])}


def in_present_format(state: Mapping[str, Any], what: str = "the state of the guard") -> Any:
    """A saved state, converted to the present format if an earlier version has written it."""
    present: dict[str, Any] = STABILIZER_STATE.read(state, what, SettingError)
    return present


def load_state(guard: GuardContext, results: StepResults, state: Mapping[str, Any]) -> None:
    """Continue from a state of the present format; the models are loaded first.

    A part whose settings have changed starts again.
    """
    load_rules(guard, state)
    norm = state["param_norm"]
    guard.guarded.measurer.param_norm = None if norm is None else norm.to(guard.layout.home)
    results.load_state_dict(state["results"])


def load_rules(guard: GuardContext, state: Mapping[str, Any]) -> None:
    """Load only what belongs to the weights: the states of the rules, the clipper and the loss scale."""
    guard.policy.load_state_dict(state["policy"])
    guard.guarded.forget_recordings()
