"""Assembles the facts of a run from everything that the parts of a watcher have recorded. Nothing is judged here.

They are also written during the run, so that a killed run can be diagnosed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from surefoot.core.user_code import source_lines
from surefoot.record.facts import Permutation, RunFacts, Seeds
from surefoot.watch.deferred import read_each

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.record.facts import SampledStep
    from surefoot.watch.context import WatchContext
    from surefoot.watch.watcher import Watcher


MOST_PERMUTATIONS = 200


def assemble(watcher: Watcher) -> RunFacts:
    """The facts so far."""
    state, registry, calls, backward = watcher.state, watcher.registry, watcher.calls, watcher.backward
    calls.batches[:] = read_each(calls.batches)
    return RunFacts(
        steps=state.steps,
        backwards=state.backwards,
        models=registry.models,
        parameters=[record.as_facts(registry.label(record)) for record in registry.parameters],
        optimizers=[record.as_facts() for record in watcher.optimizers.all],
        updated_by_hand=[registry.id_of(tensor) for tensor in backward.manual.tensors()],
        backward_series=backward.series.as_facts(),
        schedulers=[record.as_facts() for record in calls.schedulers],
        sampled_steps=watcher.sampler.sampled_steps,
        events=watcher.events.events,
        evaluations=read_each(watcher.evaluations.calls),
        evaluation_calls=read_each(watcher.evaluations.recorded),
        evaluation_passes=watcher.evaluation_losses.as_facts(),
        evaluation_blocks=watcher.evaluations.blocks_with_calls,
        seeds=Seeds(**calls.seeds),
        reseeds=calls.reseeds,
        step_data=watcher.context.data.as_facts(),
        permutations=_permutations(watcher.sampler.sampled_steps),
        clippings=calls.clips,
        loaders=[record.as_facts() for record in calls.loaders],
        batches=calls.batches,
        loss_scaler=state.scaler.as_facts(),
        policy_entropies=calls.policy,
        policy_divergences=calls.divergences,
        retained_graphs=backward.retained_graphs.retained,
        held_memory=watcher.memory.held,
        module_memory=watcher.context.module_memory.as_facts(),
        compiled=state.compiled,
        trainer=state.trainer,
        eager_looks=watcher.context.options.eager_looks,
        problems=watcher.probes.problems,
        source_lines=source_lines(),
        guard=watcher.steps.guard.as_facts(),
    )


def _permutations(sampled_steps: list[SampledStep]) -> list[Permutation]:
    """The permutations by which rows were picked, each at the first sampled step that recorded it."""
    found: dict[int, Permutation] = {}
    for sampled in sampled_steps:
        for order in sampled.calls.orders:
            known = Permutation(
                step=sampled.step, length=order.length, fingerprint=order.fingerprint, number=order.number
            )
            found.setdefault(order.number, known)
    return list(found.values())[:MOST_PERMUTATIONS]


FIRST_SAVE_S = 15.0
"""The time in seconds until the facts are first written."""
LONGEST_WAIT_S = 300.0
GROWTH = 1.5
"""Each interval is longer than the one before by this factor …"""
SHARE = 0.01
"""… or so long that saving takes no more than this share of the time."""


class FactsSaver:
    """Saves the facts at growing intervals."""

    def __init__(self, context: WatchContext, facts: Callable[[bool], RunFacts]) -> None:
        """`facts(at_end)` returns the facts so far."""
        self._save, self._safely, self._facts = context.options.save, context.probes.safely, facts
        self._wait_s = FIRST_SAVE_S
        self._due_at = time.monotonic() + FIRST_SAVE_S

    def save_if_due(self) -> None:
        """Save, unless it was done recently."""
        if self._save is not None and time.monotonic() >= self._due_at:
            began = time.monotonic()
            self._safely("saving", self.save)
            now = time.monotonic()
            self._wait_s = min(LONGEST_WAIT_S, GROWTH * self._wait_s)
            self._due_at = now + max(self._wait_s, (now - began) / SHARE)

    def save(self, at_end: bool = False) -> None:
        """Save now; with `at_end`, the sampled step in progress ends first."""
        if self._save is not None:
            self._save(self._facts(at_end))
