"""Records every operation of a step as torch dispatches it, in forward, in backward and in the optimizer.

A dispatch mode works below autograd: it receives the operations that really run, including those of a backward formula.
Autograd's sequence numbers show which line of the user a backward operation belongs to: the node that an operation
creates has the number that was next when the operation was dispatched.

Before an operation overwrites memory that existed before the step, its old contents are copied, so that everything can
be restored. Not covered: values that leave torch (for example through NumPy) and come back.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from surefoot.core.operations import OperationMode, autograd_node
from surefoot.core.save_restore import write
from surefoot.replay.locate.call import BadInput, Call, make_call, mend
from surefoot.replay.locate.describe import FINITE, Counts, count, nonfinite_number, values_of
from surefoot.replay.locate.frames import Place, look
from surefoot.replay.locate.memory_writes import Memory, MemoryWrite, MemoryWrites, Phase
from surefoot.replay.locate.origins import inputs_of, is_log_of_mask, notes_on

if TYPE_CHECKING:
    from surefoot.replay.locate.names import Names

_BLANK = frozenset(
    (
        "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_",
        "resize_as_",
    )
)  # fmt: skip
_MOST_NODES = 64  # that one operation leaves behind


class Made(NamedTuple):
    """The forward operation an autograd node belongs to."""

    op: str
    place: Place | None
    module: nn.Module | None


class Arrival(NamedTuple):
    """Bad values that arrived in the gradient of a leaf."""

    leaf: Tensor
    counts: Counts
    writers: tuple[MemoryWrite, ...]


class OperationRecorder(OperationMode):  # type: ignore[no-untyped-call]
    """Records where bad values begin and where they go; with `repair`, removes them at some operations."""

    def __init__(self, names: Names, repair: Container[int] = ()) -> None:
        super().__init__()
        self.writes = MemoryWrites()
        self.calls: list[str] = []
        self.arrivals: list[Arrival] = []
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Every leaf that got a gradient, with the gradient it had before."""
        self.ran: set[int] = set()
        """Sequence numbers of the autograd nodes that were run."""
        self.last_bad: MemoryWrite | None = None
        self.last_bad_at = 0
        """The number of operations when one last read or made a bad value."""
        self.mended: dict[int, Counts] = {}
        """What was not finite where it was repaired."""
        self.left: list[MemoryWrite] = []
        """The operations that wrote bad values which left torch as Python numbers."""
        self.refused: bool | None = None
        """For an operation that raised: whether it did because of bad values. `None` if none raised."""
        self.loss_scale: float | None = None
        self._names = names
        self._repair = repair
        self._met = 0
        self._made: dict[int, Made] = {}
        self._next_number = 0
        self._latest = Made("", None, None)
        self._latest_wrote = False
        self._overwritten: dict[Any, tuple[Tensor, Tensor]] = {}

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation, and record what it reads and writes."""
        node = autograd_node()
        scene = look(in_backward=node is not None)
        with torch._C.DisableTorchFunction():
            call = make_call(func, len(self.calls), scene, node, args, kwargs)
            self.calls.append(call.op)
            self._before(call)
            try:
                out = func(*args, **kwargs)
            except Exception:
                self.refused = bool(call.bad) and not call.fails_without_its_bad_values()
                raise
            self._after(call, out)
        return out

    def _before(self, call: Call) -> None:
        self._note_node(call)
        self._keep_contents([each.value for each in call.arguments if each.writes])
        call.keep_what_it_overwrites()
        call.bad = self._bad_inputs(call)
        if call.bad:
            self.last_bad_at = len(self.calls)
            self.last_bad = call.bad[0].writers[0]

    def _after(self, call: Call, out: Any) -> None:
        if call.name == "_local_scalar_dense":
            if nonfinite_number(out):  # a Python number from here on, which may come back as an argument
                self.left += [writer for each in call.bad for writer in each.writers]
            return
        results = call.written(out)
        if call.name in _BLANK:
            blank = self._record(call, FINITE, results)
            for value in results:
                self.writes.write(value, None, blank=blank)
            return
        self._judge(call, results)
        self._note_arrival(call)
        self._note_scale(call)

    def _judge(self, call: Call, results: list[Tensor]) -> None:
        counts = [count(value) for value in results]
        record = None
        if any(each.total for each in counts):
            total = Counts(*(sum(column) for column in zip(*counts, strict=True)))
            own = call.find_own(results)
            if call.index in self._repair:
                self.mended[call.index] = total
                _mend_own(call, results, own, total)
                counts = [count(value) for value in results]
                own, total = None, Counts(*(sum(column) for column in zip(*counts, strict=True)))
            if total.total:
                record = self.last_bad = self._bad_record(call, total, results, own)
                self.last_bad_at = len(self.calls)
        for value, each in zip(results, counts, strict=True):
            self.writes.write(value, record if each.total else None)

    # ---- what goes in ---------------------------------------------------------------------------------------------

    def _bad_inputs(self, call: Call) -> list[BadInput]:
        found = []
        for each in call.arguments:
            if not each.reads or values_of(each.value) is None:
                continue
            memory = self.writes.find(each.value) or self._meet(each.value)
            if memory.writers or memory.blank is not None:
                counts = count(each.value)
                blank = [] if memory.blank is None else [memory.blank]
                if counts.total:
                    found.append(BadInput(each.value, counts, list(memory.writers) or blank))
        return found

    def _meet(self, tensor: Tensor) -> Memory:
        """A tensor that existed before the step: it is checked completely, once."""
        memory = self.writes.add(tensor, external=True)
        base = tensor if tensor._base is None else tensor._base
        counts = count(base)
        if counts.total:
            self._met += 1
            if -self._met in self._repair:
                self.mended[-self._met] = counts
                self._keep_contents([base])
                mend(base)
            else:
                memory.writers.append(self._names.record_of(-self._met, base, tensor, counts))
        return memory

    # ---- what comes out -------------------------------------------------------------------------------------------

    def _bad_record(
        self, call: Call, counts: Counts, results: list[Tensor], own: list[Tensor | None] | None
    ) -> MemoryWrite:
        record = self._record(call, counts, results)
        parents = dict.fromkeys(writer for each in call.bad for writer in each.writers)
        if call.has_nonfinite_number:
            parents.update(dict.fromkeys(self.left))
            record.meant = not self.left and counts.nan == 0
        record.parents = tuple(parents)
        record.input_nan = any(each.counts.nan for each in call.bad)
        record.born = bool(call.bad) and own is not None
        if not parents or record.makes_nan or record.born:
            record.inputs, record.notes = inputs_of(call), notes_on(call, results, own)
            record.meant = record.meant or is_log_of_mask(call, record)
        return record

    def _record(self, call: Call, counts: Counts, results: list[Tensor]) -> MemoryWrite:
        scene = call.scene
        phase: Phase = "optimizer" if scene.optimizer else "forward"
        place, module, node, forward_op = scene.place, scene.module, "", ""
        if call.node is not None and not scene.recomputed and not scene.optimizer:
            made = self._made.get(_number(call.node), Made("", None, None))
            phase, module = "backward", module or made.module
            if place is None or isinstance(call.node, BackwardCFunction):  # otherwise a hook of the user's
                node, forward_op = str(call.node.name()).rsplit("::", 1)[-1], made.op
            place = place or made.place
        numel = sum(value.numel() for value in results)
        name = self._names.module(module)
        return MemoryWrite(call.index, call.op, phase, counts, numel, place, name, node, forward_op)

    # ---- autograd -------------------------------------------------------------------------------------------------

    def _note_node(self, call: Call) -> None:
        """Record which operation the nodes since the last one belong to."""
        made = Made(call.op, call.scene.place, call.scene.module)
        if call.node is not None:
            self.ran.add(_number(call.node))
            self._note_leaf(call.node)
            if made.place is None:  # a backward that is itself differentiated: it belongs where its forward does
                made = self._made.get(_number(call.node), made)
        upcoming = int(torch._C._autograd._get_sequence_nr())
        # Autograd makes the node of an operation before it runs; after a write into a view it makes another.
        own = not torch.is_grad_enabled() or any(each.value.requires_grad for each in call.arguments)
        for number in range(max(self._next_number, upcoming - _MOST_NODES), upcoming):
            is_own = not self._latest_wrote or (own and number == upcoming - 1)
            self._made.setdefault(number, made if is_own else self._latest)
        self._next_number, self._latest = upcoming, made
        self._latest_wrote = any(each.writes for each in call.arguments)

    def _note_leaf(self, node: Any) -> None:
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in self.leaves:
            self.leaves[id(leaf)] = (leaf, leaf.grad)

    def _note_arrival(self, call: Call) -> None:
        leaf = getattr(call.node, "variable", None)
        if isinstance(leaf, Tensor):
            self.arrivals += [Arrival(leaf, each.counts, tuple(each.writers)) for each in call.bad]

    def _note_scale(self, call: Call) -> None:
        if call.scene.scaled and call.name == "mul" and call.node is None and len(call.arguments) > 1:
            scale = call.arguments[1].value
            self.loss_scale = float(scale) if scale.numel() == 1 else None

    # ---- putting back ---------------------------------------------------------------------------------------------

    def _keep_contents(self, written: list[Tensor]) -> None:
        for tensor in written:
            memory = self.writes.find(tensor) or self._meet(tensor)
            if memory.external and tensor.layout == torch.strided:
                target = tensor.detach()
                key = (target.data_ptr(), target.dtype, target.shape, target.stride())
                if key not in self._overwritten:
                    self._overwritten[key] = (target, target.clone())

    def put_back(self) -> None:
        """Restore the old contents of everything that existed before the step, and the gradients of leaves."""
        with torch.no_grad():
            for tensor, contents in reversed(self._overwritten.values()):
                with torch.inference_mode(tensor.is_inference()):
                    write(tensor, contents)
            for leaf, gradient in self.leaves.values():
                leaf.grad = gradient
        self._overwritten.clear()


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _mend_own(call: Call, results: list[Tensor], own: list[Tensor | None] | None, counts: Counts) -> None:
    """Remove the bad values that began here, or all if it made NaN from infinities. The others stay."""
    if own is not None:
        for value, where in zip(results, own, strict=True):
            mend(value, where)
    elif counts.nan and not any(each.counts.nan for each in call.bad):
        for value in results:
            mend(value)
