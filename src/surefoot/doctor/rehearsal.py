"""A short training run of a copy, recorded like one of `surefoot run`, so that the same rules judge it.

The copy trains at the user's rate over all batches that were taken. A rate that a schedule is still warming up counts
as its value after the warm-up, and is reached gradually. If there is no optimizer, Adam is used.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from surefoot.doctor.model_copy import ModelCopy, is_warming_up, needs_closure
from surefoot.doctor.probe_facts import crash_facts
from surefoot.watch.context import WatchOptions
from surefoot.watch.user_frames import user_frame
from surefoot.watch.watcher import Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.doctor.context import CheckContext
    from surefoot.record.facts import RunFacts

STEPS = 60
_SHARE = 0.07
_STAND_IN_RATE = 1e-3


def rehearse(context: CheckContext) -> RunFacts:
    """Train a copy for a while and return what was recorded; an error ends the run, as it would end a script."""
    trial, watcher = context.trial(), Watcher(WatchOptions(is_preflight=True))
    if trial.optimizer is None and trial.parameters:
        trial.optimizer = torch.optim.Adam(trial.parameters, lr=_STAND_IN_RATE)
    error = None
    try:
        _train(context, trial, watcher)
    except Exception as raised:
        error = raised
    facts = watcher.as_facts()
    return replace(
        facts,
        optimizers=[
            replace(each, site="") for each in facts.optimizers
        ],  # the line that made the copy is not informative
        crash=None if error is None else crash_facts(error),
    )


def _train(context: CheckContext, trial: ModelCopy, watcher: Watcher) -> None:
    optimizer = trial.optimizer
    if optimizer is None:  # nothing can be trained
        watcher.sampler.begin()
        _backward(trial, watcher, context.batch())
        return
    ramps = is_warming_up(optimizer)
    trial.scale_rates(1.0)
    rates = trial.rates
    watcher.steps.optimizer_made(optimizer)
    for step in context.steps(STEPS, _SHARE):
        if ramps:
            trial.set_rates([rate * min(1.0, 2 * (step + 1) / STEPS) for rate in rates])
        batch = context.batch(step)
        loss = math.nan
        if needs_closure(optimizer):
            watcher.steps.before(optimizer, True)
            loss = float(optimizer.step(partial(_backward, trial, watcher, batch)))
        else:
            loss = float(_backward(trial, watcher, batch).detach())
            if context.clip is not None:
                watcher.calls.last_clip = {"clip_norm": trial.gradient_norm(), "clip_limit": context.clip}
            watcher.steps.before(optimizer, False)
            optimizer.step()
        watcher.steps.after(optimizer)
        if not math.isfinite(loss):
            return


def _backward(trial: ModelCopy, watcher: Watcher, batch: Any) -> Tensor:
    def before(loss: Tensor) -> None:
        watcher.backward.before(loss)
        if user_frame() is None:  # in a script, lines distinguish its losses; here there is only this one
            watcher.context.data.note(loss, None, watcher.state.steps, watcher.state.backwards)

    loss = trial.backward(batch, before)
    watcher.backward.after()
    return loss
