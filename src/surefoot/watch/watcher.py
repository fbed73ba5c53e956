"""The watcher: observes a script's training loop through the calls that `patches` reports, and collects the facts.

Every observation runs through `ProbeRunner.safely`, so that a failing one never affects the script. Most steps cost a
few numbers; some are sampled (`step_sampler`) and observed in depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.watch.backward_observer import BackwardObserver
from surefoot.watch.collected_facts import FactsSaver, assemble
from surefoot.watch.compiled_inputs import CompiledInputs
from surefoot.watch.context import WatchContext, WatchOptions
from surefoot.watch.device_memory import DeviceMemory
from surefoot.watch.evaluation import Evaluations
from surefoot.watch.evaluation_losses import EvaluationLosses
from surefoot.watch.incidents import IncidentWriter
from surefoot.watch.indexed_calls import IndexedCalls
from surefoot.watch.loss_scale import LossScale
from surefoot.watch.replica_looks import PROBE as RANKS
from surefoot.watch.replica_looks import ReplicaLooks
from surefoot.watch.step_observer import StepObserver
from surefoot.watch.step_sampler import StepSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from surefoot.record.facts import RunFacts


class Watcher:
    """The parts that observe a run, built from one context. `patches` calls them."""

    def __init__(self, options: WatchOptions | None = None) -> None:
        self.context = context = WatchContext(options or WatchOptions())
        self.state, self.probes, self.registry = context.state, context.probes, context.registry
        self.optimizers, self.calls, self.events = context.optimizers, context.calls, context.events
        self.sampler = StepSampler(context)
        self.incidents = IncidentWriter(context) if context.options.folder is not None else None
        self.compiled_inputs = CompiledInputs(context)
        self.ranks = ReplicaLooks(context)
        self.backward = BackwardObserver(context, self.sampler, self.incidents, self.compiled_inputs, self.ranks)
        self.saver = FactsSaver(context, self.as_facts)
        self.steps = StepObserver(context, self.sampler, self.incidents, self.backward, self.saver, self.ranks)
        self.evaluations = Evaluations(context)
        self.evaluation_losses = EvaluationLosses(context.state, self.evaluations)
        self.loss_scale = LossScale(context)
        self.indexed_calls = IndexedCalls(context)
        self.memory = DeviceMemory(context.state)

    def before_swap(self, tensors: tuple[Tensor, ...]) -> Callable[[], None]:
        """Torch is about to swap tensors, which must have no weak references. Returns a function to call afterwards."""
        self.sampler.forget_tensors()
        self.indexed_calls.forget_tensors()
        self.compiled_inputs.forget_tensors()
        held, by_hand = self.registry.drop_references(tensors), self.backward.manual.drop_references()

        def swapped() -> None:
            self.registry.add_references(held)
            self.backward.manual.add_references(by_hand)

        return swapped

    def as_facts(self, at_end: bool = True) -> RunFacts:
        """All facts of the run."""
        if at_end:
            self.sampler.end()
            self.probes.safely("evaluation", self.evaluations.drop)
        self.probes.safely("backward", self.backward.settle)
        self.sampler.settle(wait=True)
        if at_end:
            self.probes.safely(RANKS, self.ranks.settle)
        self.probes.safely("series", self.steps.guard.settle)
        self.probes.safely("scaler", self.loss_scale.read)
        for record in self.optimizers.all:
            self.probes.safely("series", record.series.read)
        return assemble(self)
