"""`find_nonfinite`: run one step, and find the first operation that made a non-finite value.

1. The step runs under a recorder that sees every operation. If it returns a finite loss and has not called `backward()`
   itself, backward is run as well.
2. Only bad results count: the loss, the gradients, the weights, what the step returns. A NaN that `where` masks out, or
   the -Inf of a mask that softmax turns into 0, is not a fault.
3. From there, the search goes back through the operations that passed the value on, to those where it began.
4. If several operations could be the origin, the step runs again with all but one repaired: the earliest that alone
   makes the result bad is reported.

Everything is restored: parameters, buffers, gradients, optimizers, random streams and every tensor that the step
overwrites are bitwise as before, also if the step raises. Compiled modules run eagerly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from surefoot.core.nested import attributes_of, kind_of, leaves
from surefoot.core.save_restore import untouched
from surefoot.errors import require
from surefoot.replay.locate.describe import count, nonfinite_number
from surefoot.replay.locate.names import Names
from surefoot.replay.locate.origins import choose, leads_to, origins, path, unsure
from surefoot.replay.locate.recorder import OperationRecorder
from surefoot.replay.locate.result import NonFiniteOrigin, make_result

if TYPE_CHECKING:
    from surefoot.replay.locate.memory_writes import MemoryWrite


_RECENT_OPERATIONS = 12


@dataclass
class OriginSearch:
    """One execution of the step."""

    recorder: OperationRecorder
    outcomes: list[StepOutput]
    error: Exception | None

    @property
    def level(self) -> int:
        """The first kind of result that is bad: a bad loss explains the gradients."""
        return next((level for level in LEVELS if self.candidates(level)), OTHER)

    def candidates(self, level: int) -> list[MemoryWrite]:
        """Where the bad results of a kind may have begun, earliest first."""
        return origins(self._ends(level), meant_too=level != OTHER)

    def is_unsure(self, level: int) -> bool:
        """Whether even a single candidate may not be the cause of the bad result."""
        return unsure(self._ends(level))

    def _ends(self, level: int) -> list[MemoryWrite]:
        return [end for outcome in self.outcomes if outcome.level == level for end in outcome.ends]


def find_nonfinite(
    step_fn: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> NonFiniteOrigin | None:
    """Name the first operation of a step that made a NaN or an infinity; `None` if the results are finite.

    >>> import torch, surefoot
    >>> w = torch.zeros(3, requires_grad=True)
    >>> print(surefoot.find_nonfinite(lambda: w.sqrt().sum()).op)
    SqrtBackward0 -> aten.div.Tensor

    Args:
        step_fn: Runs a forward and returns the loss (or anything that holds it), or runs a whole step, backward and
            optimizer included. It may be called more than once, so it must not take its batch from an iterator.
        model: For the names of modules, parameters and buffers. Without it, the modules that `step_fn` refers to are
            taken.
        optimizer: Restored afterwards if `step_fn` steps it. Those that `step_fn` refers to are found without.
    """
    require(callable(step_fn), f"`step_fn` must be a function that runs one step; got {type(step_fn).__name__}.")
    names = Names(step_fn, model, optimizer)
    return origin_of(lambda repair: run_step(step_fn, names, OperationRecorder(names, repair)))


def origin_of(execute: Callable[[Container[int]], OriginSearch]) -> NonFiniteOrigin | None:
    """The first bad operation of a step that `execute` runs, with some operations repaired if requested."""
    found = first_bad(execute)
    return None if found is None else result_of(*found)


def first_bad(execute: Callable[[Container[int]], OriginSearch]) -> tuple[OriginSearch, MemoryWrite] | None:
    """The same as a record, with the run it was found in."""
    run = execute(())
    candidates = run.candidates(run.level)
    if not candidates:
        if run.error is not None:
            raise run.error
        return None
    if len(candidates) > 1 or run.is_unsure(run.level):
        return run, choose(run, execute)
    return run, candidates[0]


def result_of(run: OriginSearch, origin: MemoryWrite) -> NonFiniteOrigin:
    """A record in words, with what it reached."""
    reached = _reached(run, origin)
    notes = []
    if origin.meant:
        notes.append("the program requested this infinity, and it reached the end of the step")
    if run.recorder.loss_scale is not None and origin.phase == "backward":
        notes.append(f"the loss had been multiplied by {run.recorder.loss_scale:g}")
    if run.error is not None:
        notes.append(f"the step then raised {type(run.error).__name__}: {str(run.error).splitlines()[0][:120]}")
    return make_result(origin, way_of(run, origin), list(dict.fromkeys(each.name for each in reached)), notes)


def way_of(run: OriginSearch, origin: MemoryWrite) -> list[MemoryWrite]:
    """The operations that a bad value passed through, from its origin to the first result it reached."""
    return path(origin, [end for each in _reached(run, origin)[:1] for end in each.ends])


def _reached(run: OriginSearch, origin: MemoryWrite) -> list[StepOutput]:
    reached = [each for each in run.outcomes if leads_to(origin, each.ends)]
    return reached or [each for each in run.outcomes if each.level == run.level]


def run_step(step_fn: Callable[[], Any], names: Names, recorder: OperationRecorder) -> OriginSearch:
    """OriginSearch a step under a recorder, and put everything back."""
    error: Exception | None = None
    returned: Any = None
    with ExitStack() as stack:
        _guard(stack, names)
        stack.callback(recorder.put_back)
        stack.enter_context(_eager())
        # One thread: on a GPU, backward would otherwise run in another, where the stack of the caller is not seen.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        try:
            with recorder:
                returned = step_fn()
                loss = find_loss(returned)
                if loss is not None and _wants_backward(loss, recorder):
                    loss.backward()  # type: ignore[no-untyped-call]
        except Exception as raised:
            error = raised
        found = outcomes_of(returned, recorder, names)
        if error is not None and not found:
            found = _behind(recorder)
    return OriginSearch(recorder, found, error)


def _wants_backward(loss: Tensor, recorder: OperationRecorder) -> bool:
    """A step that ran its own backward gets no second one; a bad loss needs none."""
    if not loss.requires_grad or was_run(loss, recorder.ran):
        return False
    with _disable_current_modes():
        return not count(loss).total


def _behind(recorder: OperationRecorder) -> list[StepOutput]:
    """A step that raised right after it read a bad value probably raised because of it."""
    recent = len(recorder.calls) - recorder.last_bad_at <= _RECENT_OPERATIONS
    if recorder.refused is False:  # the operation would have raised anyway
        return []
    return [StepOutput("an error", (recorder.last_bad,), OTHER)] if recent and recorder.last_bad is not None else []


def _guard(stack: ExitStack, names: Names) -> None:
    """Restore everything at the end, including optimizers that are only found during the step."""
    modules = list(names.modules.values()) or [nn.Module()]
    for module in modules:
        stack.enter_context(untouched(module, generators=names.generators))
    for optimizer in names.optimizers:
        stack.enter_context(untouched(nn.Module(), optimizer))
    known = {id(optimizer) for optimizer in names.optimizers}

    def note_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) not in known:
            known.add(id(optimizer))
            names.add_optimizer(optimizer)
            with _disable_current_modes():
                stack.enter_context(untouched(nn.Module(), optimizer))

    stack.callback(register_optimizer_step_pre_hook(note_optimizer).remove)


def _eager() -> AbstractContextManager[Any]:
    """Run compiled modules eagerly; does nothing if the compiler has not been loaded."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


_MOST_NODES = 100_000
LOSS, GRADIENT, WEIGHT, OTHER = LEVELS = range(
    4
)  # only others, such as returned logits, may contain the -Inf of a mask


class StepOutput(NamedTuple):
    """A bad result."""

    name: str
    ends: tuple[MemoryWrite, ...]
    """The operations that wrote it."""

    level: int
    """Earlier levels explain later ones: `LOSS`, `GRADIENT`, `WEIGHT`, `OTHER`."""


def find_loss(returned: Any) -> Tensor | None:
    """The loss in the return value of a step: named so, or the first scalar with a graph."""
    named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    single = [value for value in _tensors(returned) if value.numel() == 1 and value.is_floating_point()]
    if isinstance(named, Tensor) and named.numel() == 1:
        return named
    return next((value for value in single if value.requires_grad), single[0] if single else None)


def was_run(loss: Tensor, ran: set[int]) -> bool:
    """Whether backward has already run through the graph of a loss."""
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None:
            continue
        if not hasattr(node, "variable") and int(node._sequence_nr()) in ran:
            return True
        fresh = [below for below, _ in node.next_functions if below is not None and below not in seen]
        seen.update(fresh)
        waiting += fresh
    return False


def outcomes_of(returned: Any, recorder: OperationRecorder, names: Names) -> list[StepOutput]:
    """Every bad result, the loss first."""
    return [*_returned(returned, recorder), *_gradients(recorder, names), *_kept(recorder, names)]


def _returned(returned: Any, recorder: OperationRecorder) -> Iterator[StepOutput]:
    loss = find_loss(returned)
    if nonfinite_number(returned) and recorder.left:
        yield StepOutput("loss", tuple(recorder.left), LOSS)
    for value in _tensors(returned):
        memory = recorder.writes.find(value)
        if memory is not None and count(value).total:
            ends = tuple(memory.writers) or ((memory.blank,) if memory.blank is not None else ())
            is_loss = value is loss
            if ends:
                yield StepOutput("loss", ends, LOSS) if is_loss else StepOutput("output", ends, OTHER)


def _gradients(recorder: OperationRecorder, names: Names) -> Iterator[StepOutput]:
    named = sorted(recorder.arrivals, key=lambda arrival: id(arrival.leaf) not in names.kinds)
    for arrival in named:
        yield StepOutput(f"the gradient of {names.leaf(arrival.leaf)}", arrival.writers, GRADIENT)


def _kept(recorder: OperationRecorder, names: Names) -> Iterator[StepOutput]:
    """Weights, buffers and optimizer state that the step itself made bad."""
    for what, tensor, strict in names.kept():
        memory = recorder.writes.find(tensor)
        writers = () if memory is None else tuple(each for each in memory.writers if each.index >= 0)
        if writers and count(tensor).total:
            yield StepOutput(what, writers, WEIGHT if strict else OTHER)


def _tensors(returned: Any) -> list[Tensor]:
    is_object = kind_of(returned) is None and hasattr(returned, "__dict__")
    return list(leaves(attributes_of(returned) if is_object and not isinstance(returned, Tensor) else returned))
