"""A deep look at one step: every model call, every loss, every gradient and every update, with names.

This file holds its beginning and end, and the hooks on module calls. `passes` notes each model call, `roots` reads the
graph under each backward, `questions` asks for more with an extra backward, `updates` measures what a step changed.

Global module hooks follow the calls, a tape the operations, the autograd graph says what the loss depends on. All of it
is taken off again when the step is over; other steps are only counted.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from surefoot.observe.readable import has_company, is_readable
from surefoot.watch import autograd_graph as graph
from surefoot.watch import loss_graph as roots
from surefoot.watch.call_facts import VIEWS, CallFacts
from surefoot.watch.data_origin import DataOrigin, trails
from surefoot.watch.extra_backward import ask_causality, ask_terms
from surefoot.watch.function_recorder import FunctionRecorder, tensors_in
from surefoot.watch.model_calls import ModelCalls
from surefoot.watch.optimizer_updates import OptimizerUpdates, note_if_moved
from surefoot.watch.script_hooks import WithoutHooks, is_calm, listeners

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.parameter_registry import ParameterRegistry

_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class SampledStep:
    """Everything seen between two steps."""

    def __init__(
        self,
        step: int,
        book: ParameterRegistry,
        safely: Callable[..., Any],
        use_tape: bool,
        thorough: bool,
        hooked: bool = True,
    ) -> None:
        self._hooked = hooked
        self._used: set[int] = set()
        self._reached: set[int] = set()
        self.step = step
        self.thorough = thorough
        self.roots: list[dict[str, Any]] = []
        self._claimed_last: list[dict[str, Any]] = []
        """The roots whose gradients the last step took."""
        self.updates = OptimizerUpdates(book)
        self.origins: dict[str, list[tuple[str, str, str]]] = {}
        """For each kind of autograd node: the site, module and call of those on the tape, in order."""
        self.trails: list[DataOrigin] = []
        """How data came into the graph."""
        self._book, self._safely = book, safely
        self.notes = CallFacts(book.id_of)
        self.tape: FunctionRecorder | None = FunctionRecorder(self._take_note, safely) if use_tape else None
        self.notes.tape = self.tape
        self.passes = ModelCalls(step, book, self.tape.mark if thorough and self.tape is not None else None)
        self._handles: list[Any] = []
        self._stack: list[tuple[int, str]] = []
        """The modules that are running: identity and path of each."""
        self._paths: dict[int, str] = {}
        self._entered = False
        self._heard: roots.BackwardRoots | None = None
        self._hidden_tape = 0
        self._thread = get_ident()

    # Beginning and end

    def begin(self) -> None:
        """Put the hooks on."""
        if not self._hooked:
            return
        self._handles = [
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True),
        ]
        if self.tape is not None:
            self._entered = True
            self.tape.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Take everything off again."""
        self.take_off()
        for number in self._used:
            self._book.parameters[number].used += 1
            if number not in self._reached:
                self._safely("parameters", note_if_moved, self._book.parameters[number])
        for number in self._reached:
            self._book.parameters[number].in_graph += 1
        for number in self.updates.stepped:
            self._book.parameters[number].looked += 1
        self._forget()
        self.updates.forget()
        self.passes.held = []
        self._heard = None

    def rest(self) -> None:
        """Follow no more calls; what the step changes is still seen."""
        if self._handles:
            self.take_off()

    def take_off(self) -> None:
        """Hooks and tape off; what was seen stays."""
        for handle in self._handles:
            handle.remove()
            if isinstance(handle, RemovableHandle):  # torch forgets one of its own tables
                _global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        if self._entered and self.tape is not None:
            self._entered = False
            self.tape.paused += 1
            self.tape.leave()

    def _forget(self) -> None:
        """Let go of the graph; keep where in the user's code each kind of node came from."""
        if self.tape is not None:
            self.trails = self._safely("data of steps", trails, self.tape) or []
            products = {i for e in self.tape.entries if e.name in ("matmul", "einsum", "bmm", "mul") for i in e.inputs}
            for note in self.notes.softmaxes:
                note.setdefault(
                    "attends",
                    note["op"] == "scaled_dot_product_attention" or bool(products & self._passed_on(note["index"])),
                )
            for entry in self.tape.entries:
                if entry.kind:
                    self.origins.setdefault(entry.kind, []).append((entry.site, entry.module, entry.name))
                entry.note = {}
        self.notes.targets = {}

    def _passed_on(self, index: int) -> set[int]:
        """An entry and those that only reshape, drop or copy its result."""
        assert self.tape is not None
        found = {index}
        for entry in self.tape.entries[index + 1 : index + 12]:
            if (entry.name in VIEWS or entry.name == "dropout") and found & set(entry.inputs):
                found.add(entry.index)
        return found

    def as_facts(self) -> dict[str, Any]:
        """For the run folder."""
        facts: dict[str, Any] = {"step": self.step, "passes": self.passes.notes, "roots": self.roots}
        facts["steps"] = self.updates.steps
        facts["notes"] = self.notes.as_facts()
        if self.tape is not None:
            facts["breaks"] = roots.breaks(self.tape, self.roots)
            facts["operations"] = len(self.tape.entries)
        return facts

    # Calls of modules

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if self._watches():
            self._safely("model calls", self._enter_call, module, args)

    def _after_call(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """`rest` is the keyword arguments and the result; after an exception, torch leaves the former out."""
        if self._watches():
            kwargs, out = rest if len(rest) == 2 else ({}, None)
            self._safely("model calls", self._leave_call, module, args, kwargs, out)

    def _watches(self) -> bool:
        return get_ident() == self._thread and is_calm()

    def _enter_call(self, module: nn.Module, args: Any) -> None:
        if (
            self._entered
            and self.tape is not None
            and isinstance(module, _FAST_PATHS)
            and not self._hidden_tape
            and not _may_need_gradients(module, args)
            and self.tape.is_entered()
        ):
            # These modules take another (slower, slightly different) path while a mode is on.
            self.tape.leave()
            self._hidden_tape = id(module)
        if self.tape is not None and not self._stack:
            self._safely("names", self._name_parts, module)
        self._stack.append((id(module), self._path(module)))
        if module._backward_hooks or module._backward_pre_hooks:
            listeners.gradients = True
        if self.tape is not None:
            self.tape.module = self._stack[-1][1]

    def _leave_call(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        while self._stack and self._stack.pop()[0] != id(module):
            pass  # a call below was left by an exception
        if self._hidden_tape == id(module) and self.tape is not None:
            self._hidden_tape = 0
            if self._entered:
                self.tape.__enter__()  # type: ignore[no-untyped-call]
        self._book.note_gathered(module)
        if self.tape is not None:
            self.tape.module = self._stack[-1][1] if self._stack else ""
        if not self._stack:
            self._safely("model calls", self.passes.take, module, args, kwargs, out, self._position())

    def note_compiled(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A call of a compiled model."""
        self.passes.take(getattr(module, "_orig_mod", module), args, kwargs, out, self._position())

    def _position(self) -> int | None:
        """Where the tape stands."""
        return len(self.tape.entries) if self.tape is not None else None

    def _name_parts(self, root: nn.Module) -> None:
        if id(root) not in self._paths and any(True for _ in root.parameters()):
            prefix = self._book.add_model(root)
            for path, part in root.named_modules():
                self._paths[id(part)] = f"{prefix}.{path}" if path else prefix

    def _path(self, module: nn.Module) -> str:
        return self._paths.get(id(module)) or type(module).__name__

    # Operations

    def _take_note(self, entry: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = [*tensors_in(args), *tensors_in(kwargs)]
        for tensor in given:
            if tensor.is_leaf and tensor.requires_grad and (number := self._book.id_of(tensor)) is not None:
                self._used.add(number)
                entry.parameters.append(number)
        if isinstance(out, Tensor) and out.dim() == 0 and out.grad_fn is not None:
            entry.note["scalar"] = (out.detach(), out.output_nr)
        if all(map(is_readable, (*given, *tensors_in(out)))):
            self._safely("operations", self.notes.take, entry, args, kwargs, out)

    # Backward and step

    def before_backward(self, root: Tensor, facts: dict[str, Any]) -> None:
        """Read the graph under the tensor that `backward` is called on."""
        self._heard = None
        facts["for"] = []
        with WithoutHooks():
            below = list(graph.nodes(root.grad_fn))
            facts["nodes"] = len(below)
            facts["operations"] = roots.chain(root.grad_fn)
            facts["custom"] = sorted({graph.op(node) for node in below if hasattr(type(node), "_forward_cls")})[:10]
            self._note_leaves(below, facts)
            entry = self.tape.maker(root) if self.tape is not None else None
            facts["entry"] = entry
            if entry is not None and self.tape is not None:
                facts["made_from"] = roots.made_from(self.tape, entry)
                facts["sign"] = roots.sign(self.tape, entry)
                facts["factor"] = roots.factor_of(self.tape, entry)
            facts["pairs"] = roots.pair_rows(self.notes, self.passes.held) if self.tape is not None else None
            self.roots.append(facts)
            if len(below) <= roots.MOST_HEARD:
                self._heard = roots.BackwardRoots(self.tape, self._safely)
                self._handles.extend(self._heard.listen(below))
        heard = listeners.gradients or listeners.saved or (self.tape is not None and self.tape.fills_gradients())
        quiet = not facts["custom"] and not heard
        if self.thorough and quiet and not has_company():  # a backward may hold collectives
            self._safely("gradient of terms", ask_terms, facts, self.tape, self._book, below)
            self._safely("causality", ask_causality, facts, self.tape, self.notes, self.passes.held, below)

    def _note_leaves(self, below: list[Any], facts: dict[str, Any]) -> None:
        """The parameters the loss depends on; those that nobody announced are entered."""
        known, strange = [], []
        for variable in [variable for node in below if (variable := graph.leaf(node)) is not None]:
            record = self._book.get(variable)
            if record is None:
                strange.append({"shape": list(variable.shape), "parameter": isinstance(variable, nn.Parameter)})
                record = self._book.add(variable)
            self._reached.add(record.id)
            if not record.optimizers:
                note_if_moved(record)
            known.append(record.id)
        facts["parameters"] = sorted(known)
        facts["strange"] = strange[:20]

    def claim_roots(self, optimizer: int) -> None:
        """An optimizer steps: for the backwards since the last step, or, if there were none, for the same as that."""
        fresh = [root for root in self.roots if not root["for"]]
        self._claimed_last = fresh or self._claimed_last
        for root in self._claimed_last:
            if optimizer not in root["for"]:
                root["for"].append(optimizer)

    def after_backward(self) -> None:
        """Find the first node of the last backward that turned finite gradients into something else."""
        heard, self._heard = self._heard, None
        if heard is not None:
            with WithoutHooks():
                bad = heard.first_bad()
            if bad is not None:
                self.roots[-1]["backward_nonfinite"] = bad


def _may_need_gradients(module: nn.Module, args: Any) -> bool:
    """Whether a module that has a fast path is kept from it by autograd, or by being in training."""
    if module.training:
        return True
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in [*tensors_in(args), *module.parameters()])
