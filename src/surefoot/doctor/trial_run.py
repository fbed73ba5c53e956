"""After the ten steps, on request: train a copy for a while, and report when and where it becomes unstable.

The copy trains with the user's optimizer (or Adam at 1e-3) over the batches that were taken, and the detectors of
`TrainingStabilizer` judge every step. The first alarm ends it. No step is skipped; gradients are clipped at the user's
limit, if it was given.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from surefoot.act.torch_clip import clip_grad_norm
from surefoot.doctor.checks import Check, failed, passed, skipped, warned
from surefoot.doctor.model_copy import ModelCopy, needs_closure
from surefoot.guard.attach import attach_with
from surefoot.guard.context import GuardSettings

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.types import Incident

STEP = 11
_NAME = "trial run"
_EXPECTED = "no alarm"
_STAND_IN_RATE = 1e-3
_SHARE = 1.0


def check_trial_run(context: CheckContext, num_steps: int) -> list[Check]:
    """Train a copy until an alarm is raised, or for `num_steps` steps, within the time of all probes once more."""
    trial = context.trial()
    if not trial.parameters:
        return [skipped(STEP, _NAME, "nothing requires a gradient, so nothing can be trained")]
    if trial.optimizer is None:
        trial.optimizer = torch.optim.Adam(trial.parameters, lr=_STAND_IN_RATE)
    losses, found = _train(context, trial, num_steps)
    if found is not None:
        story = f"at step {found.step} of {num_steps}: {found.kind}: {found.summary}"
        make = failed if found.severity == "error" else warned
        return [make(STEP, _NAME, story, found.step, _EXPECTED, _fix(context))]
    if not math.isfinite(losses[-1]):
        story = f"at step {len(losses) - 1} of {num_steps}: the loss is {losses[-1]}"
        return [failed(STEP, _NAME, story, len(losses) - 1, _EXPECTED, _fix(context))]
    story = f"the loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps"
    if len(losses) < num_steps:
        story += f"; there was not enough time for {num_steps}"
    return [passed(STEP, _NAME, story, len(losses), _EXPECTED)]


def _train(context: CheckContext, trial: ModelCopy, num_steps: int) -> tuple[list[float], Incident | None]:
    """The losses, and the first alarm."""
    alarms: list[Incident] = []
    settings = GuardSettings(mode="watch", on_event=alarms.append, decide_on="host", announce=False)
    attachment = attach_with(trial.model, trial.optimizer, settings)
    losses: list[float] = []
    try:
        for step in context.steps(num_steps, _SHARE):
            losses.append(_step(context, trial, attachment, context.batch(step)))
            serious = next((alarm for alarm in alarms if alarm.severity != "info"), None)
            if serious is not None or not math.isfinite(losses[-1]):
                return losses, serious
    finally:
        attachment.detach()
    return losses, None


def _step(context: CheckContext, trial: ModelCopy, attachment: Any, batch: Any) -> float:
    def backward() -> Any:
        loss = trial.backward(batch, lambda _: None)
        attachment.observe(loss=loss.detach())
        if context.clip is not None:
            _, factor = clip_grad_norm(trial.parameters, context.clip)
            if factor is not None:  # the gradients are judged as they were before clipping
                attachment.observe(clip_factor=factor)
        return loss

    if needs_closure(trial.optimizer):
        return float(trial.optimizer.step(backward).detach())
    loss = backward()
    trial.optimizer.step()
    return float(loss.detach())


def _fix(context: CheckContext) -> str:
    causes = [check.cause for check in context.checks if check.cause is not None and check.status in ("fail", "warn")]
    if causes:
        return f"Fix {causes[0]} first: it may explain this."
    return "Lower the learning rate to a third, or clip the gradient norm, and run this again."
