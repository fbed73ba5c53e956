"""One sampled step: every model call, every loss, every gradient and every update, with names.

Global module hooks follow the model calls (`module_hooks`, `model_calls`), a recorder the operations
(`function_recorder`, `call_facts`). Before each backward call, the autograd graph shows what the loss depends on
(`loss_graph`), and at a few steps an extra backward pass measures more (`extra_backward`). `optimizer_updates` measures
what a step changed. All hooks are removed after the step; other steps are only counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import has_other_ranks, is_readable
from surefoot.record.facts import BackwardCall, NonFiniteNode, SampledStep
from surefoot.watch import autograd_graph as graph
from surefoot.watch import loss_graph
from surefoot.watch.call_facts import CallFacts
from surefoot.watch.data_origin import DataOrigin, data_origins_in
from surefoot.watch.deferred import deferred_so_far, read
from surefoot.watch.extra_backward import measure_causality, measure_terms
from surefoot.watch.function_recorder import CallNotes, FunctionRecorder
from surefoot.watch.model_calls import ModelCalls
from surefoot.watch.module_hooks import ModuleHooks
from surefoot.watch.operation_names import VIEWS
from surefoot.watch.optimizer_updates import OptimizerUpdates, note_if_moved
from surefoot.watch.row_mixing import measure_row_mixing
from surefoot.watch.script_hooks import script_hooks

if TYPE_CHECKING:
    from surefoot.watch.context import WatchContext
    from surefoot.watch.eager_stance import EagerStance
    from surefoot.watch.function_recorder import RecordedCall

LONG_SECONDS = 0.1
"""After this much time, the recorder is removed from an evaluation …"""
FEWEST_RECORDED = 4
"""… once this many model calls were recorded, and before the next one."""


class BackwardPlace(TypedDict):
    """Identifies a call of `backward` and its loss."""

    site: str
    value: float | None
    backward: int
    step: int


class StepRecording:
    """Everything recorded between two steps."""

    def __init__(
        self,
        context: WatchContext,
        use_recorder: bool,
        thorough: bool,
        use_hooks: bool = True,
        eager: EagerStance | None = None,
        most_calls: int | None = None,
    ) -> None:
        """With `most_calls`, records an evaluation: losses and dropout, until models were called more often."""
        self._registry, self._safely = context.registry, context.probes.safely
        self._use_hooks, self.eager = use_hooks, eager
        """Makes compiled code run eagerly in the meantime; it is released together with the hooks."""
        self.is_evaluation = most_calls is not None
        self._used: set[int] = set()
        self._reached: set[int] = set()
        self.step = context.state.steps
        self.thorough = thorough
        self.backward_calls: list[BackwardCall] = []
        self._claimed_last: list[list[int]] = []
        """For each backward, the optimizers that stepped with its gradients."""
        self.updates = OptimizerUpdates(self._registry, self.step)
        self.origins: dict[str, list[tuple[str, str, str]]] = {}
        """For each kind of autograd node: the site, module and name of the recorded calls, in order."""
        self.data_origins: list[DataOrigin] = []
        """How data entered the graph."""
        self.recorder = FunctionRecorder(self._record_call, self._safely) if use_recorder else None
        keeps_outputs = not self.is_evaluation and context.events.logs_outputs(self.step)
        self.calls = CallFacts(self.step, self._registry.id_of, self.recorder, keeps_outputs)
        marks = self.recorder.mark if self.recorder is not None and not self.is_evaluation else None
        self.model_calls = ModelCalls(self.step, self._registry, marks, most_calls)
        self.hooks = ModuleHooks(context, self.recorder, self.model_calls, partial(_has_recorded_enough, self))
        self._node_hooks: loss_graph.NodeHooks | None = None
        self._deferred_before = deferred_so_far()
        self.has_deferred = False
        """Whether some numbers in the facts may be on a device, to be read later."""
        self.seconds = 0.0
        """The host time that surefoot's code has taken in the sampled step; complete when the step has ended."""

    # Beginning and end

    def begin(self) -> None:
        """Register the hooks."""
        if self._use_hooks:
            self.hooks.add()

    def end(self) -> None:
        """Remove the hooks and count the observations of each parameter."""
        self.remove_hooks()
        for number in self._used:
            self._registry.parameters[number].used += 1
            if number not in self._reached:
                self._safely("parameters", note_if_moved, self._registry.parameters[number])
        for number in self._reached:
            self._registry.parameters[number].in_graph += 1
        for number in self.updates.stepped:
            self._registry.parameters[number].sampled += 1
        self._forget_graph()
        self.updates.forget()
        self.model_calls.held = []
        self._node_hooks = None

    def stop_following_calls(self) -> None:
        """Stop following calls; the changes of the step are still recorded."""
        if self.hooks.has_any():
            self.remove_hooks()

    def remove_hooks(self, forget: bool = False) -> None:
        """Remove hooks and recorder, and let compiled code run compiled again. The records are kept.

        With `forget`, the recorded calls are dropped, and the rest of the step is not recorded.
        """
        try:
            self.hooks.remove()
        finally:
            if self.eager is not None:
                self.eager.release()
        if forget:
            if self.recorder is not None:
                self.recorder.forget()
            self.recorder, self.eager = None, None
            self.calls = CallFacts(self.step, self._registry.id_of, None)

    def _forget_graph(self) -> None:
        """Drop all references to the graph; keep the lines of the user's code for each kind of node."""
        if self.recorder is not None:
            self.data_origins = self._safely("data of steps", data_origins_in, self.recorder) or []
            entries = self.recorder.entries
            products = {i for e in entries if e.name in ("matmul", "einsum", "bmm", "mul") for i in e.inputs}
            self.calls.layers.mark_attention(
                lambda call: (
                    call.op == "scaled_dot_product_attention" or bool(products & _passed_on(entries, call.index))
                )
            )
            self.calls.layers.mark_repeats(self.recorder.history)
            self.origins = self.recorder.origins()
            for entry in entries:
                entry.notes = CallNotes()
        self.calls.losses.targets = {}

    def as_facts(self) -> SampledStep:
        """All facts of the step."""
        facts = SampledStep(
            step=self.step,
            model_calls=self.model_calls.as_facts(),
            backward_calls=self.backward_calls,
            updates=self.updates.steps,
            calls=self.calls.as_facts(),
            eager=self.eager is not None,
        )
        if self.recorder is not None:
            breaks = loss_graph.breaks(self.recorder, self.backward_calls)
            facts = replace(facts, breaks=breaks, operations=len(self.recorder.entries))
        self.has_deferred = deferred_so_far() > self._deferred_before
        return facts

    # Operations

    def _record_call(self, entry: Any, args: Any, kwargs: Any, out: Any, tensors: list[Tensor]) -> None:
        if self.is_evaluation:
            if all(map(is_readable, tensors)):
                self._safely("evaluation", self.calls.take_evaluated, entry, args, kwargs, out)
            return
        for tensor in tensors[: len(entry.taken)]:
            if tensor.requires_grad and graph.is_leaf(tensor) and (number := self._registry.id_of(tensor)) is not None:
                self._used.add(number)
                entry.parameters.append(number)
        if isinstance(out, Tensor) and out.dim() == 0 and out.grad_fn is not None:
            entry.notes.scalar = (out.detach(), out.output_nr)
        if all(map(is_readable, tensors)):
            self._safely("operations", self.calls.take, entry, args, kwargs, out)

    # Backward and step

    def before_backward(self, root: Tensor, facts: BackwardPlace) -> None:
        """Read the graph below the tensor that `backward` is called on."""
        self._node_hooks = None
        recorder = self.recorder
        with WithoutHooks():
            below = list(graph.nodes(root.grad_fn))
            parameters = self._record_leaves(below)
            entry = recorder.maker(root) if recorder is not None else None
            call = BackwardCall(
                **facts,
                optimizers=[],
                nodes=len(below),
                operations=loss_graph.chain(root.grad_fn),
                custom=sorted({graph.op(node) for node in below if hasattr(type(node), "_forward_cls")})[:10],
                parameters=parameters,
                entry=entry,
                pairs=loss_graph.pair_rows(self.calls.losses, self.model_calls.held) if recorder is not None else None,
            )
            if entry is not None and recorder is not None:
                call = replace(
                    call,
                    made_from=loss_graph.made_from(recorder, entry),
                    sign=loss_graph.sign(recorder, entry),
                    factor=loss_graph.factor_of(recorder, entry),
                )
            self.backward_calls.append(call)
            if recorder is not None:
                self.model_calls.note_reached({graph.number_of(node, recorder.mark) for node in below})
        if self.thorough and not call.custom and not self._would_affect_script() and not has_other_ranks():
            self._measure_more(call, below)
        if len(below) <= loss_graph.MOST_HOOKED:  # not during an extra backward
            self._node_hooks = loss_graph.NodeHooks(recorder, self._safely)
            self.hooks.keep(self._node_hooks.register(below))
        self.calls.losses.drop_labels()

    def _measure_more(self, call: BackwardCall, below: list[Any]) -> None:
        """Make the measurements that need an extra backward."""
        terms = self._safely("gradient of terms", measure_terms, call, self.recorder, self._registry, below)
        calls, held = self.calls.losses, self.model_calls.held
        causality = self._safely("causality", measure_causality, self.recorder, calls, held, below)
        mixing = self._safely("rows of a batch", measure_row_mixing, self.recorder, calls, held, below)
        self.backward_calls[-1] = replace(call, terms=terms, causality=causality, row_mixing=mixing)

    def _would_affect_script(self) -> bool:
        """Whether an extra backward would call hooks of the script, or fill gradients that it retains.

        With several processes there is no extra backward: it could contain collectives.
        """
        fills = self.recorder is not None and self.recorder.fills_gradients()
        return script_hooks.gradients or script_hooks.saved or fills

    def _record_leaves(self, below: list[Any]) -> list[int]:
        """The numbers of the parameters that the loss depends on; unknown leaves are added to the registry."""
        known = []
        for variable in [variable for node in below if (variable := graph.leaf(node)) is not None]:
            record = self._registry.get(variable)
            if record is None:
                record = self._registry.add(variable)
            self._reached.add(record.id)
            if not record.optimizers:
                note_if_moved(record)
            known.append(record.id)
        return sorted(known)

    def claim_roots(self, optimizer: int) -> None:
        """Assign the backward calls since the last step to an optimizer; if there are none, those of the last step."""
        fresh = [call.optimizers for call in self.backward_calls if not call.optimizers]
        self._claimed_last = fresh or self._claimed_last
        for numbers in self._claimed_last:
            if optimizer not in numbers:
                numbers.append(optimizer)

    def after_backward(self) -> None:
        """Record what the hooks on the nodes of the last backward saw: gradients of results, and non-finite ones."""
        node_hooks, self._node_hooks = self._node_hooks, None
        if len(self.backward_calls) > 1:
            self.updates.after_backward(self.backward_calls[-1].parameters)
        if node_hooks is not None:
            losses = self.calls.losses
            followed = (*losses.products, *losses.single_products, *losses.overlaps)
            products = {product.index: product.index for product in followed}
            with WithoutHooks():
                outputs = node_hooks.gradients_of(self.model_calls.first_outputs())
                weighted = node_hooks.gradients_of(products)
                bad = node_hooks.first_bad()
            self.backward_calls[-1] = replace(
                self.backward_calls[-1],
                nonfinite_node=bad,
                output_gradients=outputs,
                product_gradients=weighted,
            )

    def nonfinite_node(self) -> NonFiniteNode | None:
        """The first node of all backward calls that turned finite gradients into non-finite ones."""
        found = (read(call.nonfinite_node) for call in self.backward_calls)
        return next((node for node in found if node is not None), None)


def _has_recorded_enough(recording: StepRecording) -> bool:
    """Whether the losses of some calls of an evaluation were recorded, and recording takes long."""
    is_long = recording.is_evaluation and recording.seconds > LONG_SECONDS
    return is_long and len(recording.model_calls.calls) >= FEWEST_RECORDED


def _passed_on(entries: list[RecordedCall], index: int) -> set[int]:
    """An entry, and those that only reshape, drop or copy its result."""
    found = {index}
    for entry in entries[index + 1 : index + 12]:
        if (entry.name in VIEWS or entry.name == "dropout") and found & set(entry.inputs):
            found.add(entry.index)
    return found
