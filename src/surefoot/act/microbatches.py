"""Runs a batch again in smaller pieces after an out-of-memory error, with the same gradient.

A batch runs forward and backward as a whole if it fits. When memory runs out, the effects of the failed attempt are
undone, the number of rows is halved, and the rest of the batch continues from there; completed pieces are kept. Each
piece counts by its share of the rows (or tokens), so that the gradients add up to those of the whole batch.

Effects of a failed attempt, and how they are undone:

- gradients of the layers that it reached: a piece runs with empty `.grad`, and earlier gradients are set aside. They
  are restored alone after a failure, and with the piece added in place after a success, as autograd itself adds. If
  there are none (the whole batch, no accumulation), nothing is set aside; otherwise it costs the memory of one set of
  gradients.
- activations: the traceback holds them, so its frames are cleared before the next attempt.
- running statistics and other buffers, and the random streams, are restored.

The number of rows that fits is remembered. Occasionally twice as many are tried, less often after each failure.

Not covered: state that a forward keeps outside parameters and buffers, gradients of tensors that belong neither to the
models, nor to the optimizer, nor to the batch, and the user's own random generators.
"""

from __future__ import annotations

import gc
import re
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from surefoot.act.pieces import same_rows, take_rows, tensors_of
from surefoot.core.device import allocated_and_reserved, empty_cache
from surefoot.core.random_state import read_streams, set_streams
from surefoot.core.save_restore import LARGEST_STATISTIC, is_writable, may_have_changed, save_slots, write_all
from surefoot.errors import UsageError, with_causes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from surefoot.types import Scalar

_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|XPU|MPS|NPU)\b[^\n]*out of memory"
    r"|can't allocate memory|not enough memory"  # the allocator of the CPU
    r"|_ALLOC(ATION)?_FAILED\b"  # cuBLAS, cuDNN, cuSOLVER, cuFFT
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports a failed allocation, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


class RowLimitState(TypedDict):
    """The stored state of a `RowLimit`; the fields have the same names."""

    rows: int | None
    calls: int
    wait: int
    on_trial: bool


@dataclass
class RowLimit:
    """The number of rows that fit, as far as is known."""

    probe_after: int = 100
    """The number of calls without an out-of-memory error after which twice the rows are tried again."""
    rows: int | None = None
    """The maximum number of rows at once; `None` while every batch has fitted as a whole."""
    calls: int = 0
    """Calls since the last change."""
    wait: int = 0
    """The number of calls until the next probe; doubles with every failed one. 0: `probe_after`."""
    on_trial: bool = False
    """Whether a probe has raised the limit, and it has not yet held until the next one is due."""
    probing: bool = False

    def size_for(self, rows: int) -> int:
        """The number of a batch's rows to try at once."""
        self.probing = False
        if self.rows is None or rows <= self.rows:
            return rows
        self.probing = self.calls >= (self.wait or self.probe_after)
        if not self.probing:
            return self.rows
        if self.on_trial:
            self.on_trial, self.wait = False, 0
        return min(rows, 2 * self.rows)

    def lower(self, tried: int) -> int:
        """This many rows did not fit; returns the number to try next."""
        if self.probing or self.on_trial:
            self.wait = 2 * (self.wait or self.probe_after)
        if not self.probing or self.rows is None:
            self.rows = (tried + 1) // 2
        self.probing, self.on_trial, self.calls = False, False, 0
        return self.rows

    def finish(self, largest: int) -> None:
        """A batch is complete, in pieces of at most `largest` rows."""
        self.calls += 1
        if self.probing and self.rows is not None and largest > self.rows:
            self.rows, self.calls, self.on_trial = largest, 0, True
        self.probing = False

    def state_dict(self) -> RowLimitState:
        """The state for a resumed run."""
        return {"rows": self.rows, "calls": self.calls, "wait": self.wait, "on_trial": self.on_trial}

    def load_state_dict(self, state: RowLimitState) -> None:
        """Continue with a saved limit."""
        self.rows, self.calls, self.wait = state["rows"], state["calls"], state["wait"]
        self.on_trial, self.probing = state["on_trial"], False


@dataclass(frozen=True)
class Split:
    """How a batch was run that did not fit as a whole."""

    rows: int
    pieces: int
    largest: int
    """Rows of the largest piece."""
    why: str
    """The message of the allocator; empty if the size was remembered."""

    def __str__(self) -> str:
        because = f": {self.why}" if self.why else ", the size that is known to fit"
        return f"{self.rows} rows run in {self.pieces} pieces of at most {self.largest}{because}"

    def evidence(self) -> dict[str, int | str]:
        """The numbers, as evidence."""
        return asdict(self)


@dataclass(frozen=True)
class Weighing:
    """The share of a piece in the batch: of the rows, or of what the user counts."""

    rows: int
    weigh: Callable[[Any], Scalar] | None = None
    total: Scalar | None = None
    """The result of `weigh` for the whole batch."""

    def share(self, part: Any, rows: int) -> float:
        """The share of a piece. Reads a weight from the device."""
        if rows == self.rows:
            return 1.0
        if self.weigh is None or self.total is None:
            return rows / self.rows
        weight, total = float(self.weigh(part)), float(self.total)
        if not 0 <= weight < float("inf"):
            raise UsageError(
                f"`weight` must not be negative; got {weight} for a piece of {rows} rows. It counts the rows or tokens "
                "that the loss of the piece is a mean over."
            )
        return weight / total if total else 0.0

    def check(self, batch: Any, cut: int) -> None:
        """Raise `UsageError` if the weights of two pieces do not add up to that of the batch."""
        if self.weigh is None or self.total is None:
            return
        parts = take_rows(batch, 0, cut, self.rows), take_rows(batch, cut, self.rows, self.rows)
        first, second, total = float(self.weigh(parts[0])), float(self.weigh(parts[1])), float(self.total)
        if not abs(first + second - total) <= 1e-3 * abs(total):
            raise UsageError(
                f"`weight` must count: the pieces of a batch weigh {first:g} and {second:g}, and the whole weighs "
                f"{total:g}. Return how many rows or tokens a piece has, such as `(part['labels'] != -100).sum()`."
            )


class Microbatches:
    """Runs batches in as few pieces as fit, for one set of models."""

    def __init__(self, models: Sequence[nn.Module], limit: RowLimit) -> None:
        self.limit = limit
        modules = {id(module): module for model in models for module in model.modules()}.values()
        self._buffers = ChangingBuffers([module for module in modules if module._buffers])
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        self._weights_add_up = False

    def run(
        self,
        loss_fn: Callable[[Any], Tensor],
        batch: Any,
        weighing: Weighing,
        backward: Callable[[Tensor, float], None],
        parameters: Iterable[Tensor],
    ) -> tuple[Tensor | None, Split | None]:
        """Run a batch forward and backward; returns its mean loss, and how it was split if it was.

        `backward` gets the loss of a piece and its share. `parameters` are those of the optimizer, which may not be the
        models'. The loss is `None` if nothing in the batch has any weight.
        """
        before = self.limit.state_dict()
        given = tensors_of(batch)
        leaves = _leaves([*self._parameters, *parameters, *given])

        def attempt(part: Any, rows: int, share: float) -> tuple[Tensor | None, str]:
            kept = _Kept(leaves, given, self._buffers)
            return _attempt(lambda: _forward_backward(loss_fn, part, share, backward), kept, rows, weighing.rows)

        try:
            return self._run_pieces(batch, weighing, attempt)
        except BaseException:
            self.limit.load_state_dict(before)  # a batch that failed says nothing about the next one
            raise

    def _run_pieces(
        self, batch: Any, weighing: Weighing, attempt: Callable[[Any, int, float], tuple[Tensor | None, str]]
    ) -> tuple[Tensor | None, Split | None]:
        size, done, sizes, why = self.limit.size_for(weighing.rows), 0, [0], ""
        total: Tensor | None = None
        while done < weighing.rows:
            rows = _next_piece(weighing.rows - done, size)
            part = self._part(batch, done, rows, weighing)
            share = weighing.share(part, rows)
            if share > 0:  # a mean over no tokens is NaN, and NaN times 0 is NaN
                loss, failure = attempt(part, rows, share)
                if loss is None:
                    size, why = self.limit.lower(rows), failure
                    continue
                total = loss if total is None else total + loss
            done += rows
            sizes.append(rows)
        self.limit.finish(max(sizes))
        split = Split(weighing.rows, len(sizes) - 1, max(sizes), why) if len(sizes) > 2 else None
        return total, split

    def _part(self, batch: Any, start: int, rows: int, weighing: Weighing) -> Any:
        if rows == weighing.rows:
            return same_rows(batch)
        if not self._weights_add_up:
            weighing.check(batch, rows)
            self._weights_add_up = True
        return take_rows(batch, start, start + rows, weighing.rows)


def _next_piece(rest: int, size: int) -> int:
    """The number of rows of the next piece: as few pieces as possible, of even size, so that none is tiny."""
    return -(-rest // -(-rest // size))


def _leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that backward leaves a gradient on, each once."""
    return [t for t in {id(t): t for t in tensors}.values() if t.requires_grad and t.is_leaf]


def _forward_backward(
    loss_fn: Callable[[Any], Tensor], part: Any, share: float, backward: Callable[[Tensor, float], None]
) -> Tensor:
    """Run one piece; returns its part of the mean loss. Activations are released with this frame."""
    loss = loss_fn(part)
    backward(loss, share)
    seen = loss.detach().reshape(())
    if share == 1:
        return seen
    return (seen.float() if seen.dtype in (torch.float16, torch.bfloat16) else seen) * share


def _attempt(run: Callable[[], Tensor], kept: _Kept, rows: int, total_rows: int) -> tuple[Tensor | None, str]:
    """Run one piece; returns its loss, or `None` and the message of the allocator."""
    try:
        loss = run()
    except BaseException as error:
        if not is_out_of_memory(error):
            kept.add_back()
            if rows < total_rows:
                _note(
                    error, f"surefoot: in a piece of {rows} of {total_rows} rows, because more did not fit into memory."
                )
            raise
        failure = f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}{_in_use()}"
        kept.put_back()
        if kept.batch_changed:
            raise UsageError(
                "out of memory, and the batch cannot be run again in smaller pieces: the loss function has changed it "
                "in place. Write into a copy, such as `x = x / 255` for `x /= 255`."
            ) from error
        if rows == 1:
            _note(error, f"surefoot: the batch of {total_rows} rows was divided down to one row, which did not fit.")
            raise
        _clear_frames(error)
    else:
        kept.add_back()
        return loss, ""
    # Only outside the except block is the traceback released, and with it everything that the failed attempt held.
    gc.collect()
    empty_cache()
    return None, failure


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(text)


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of a traceback, including those of earlier errors."""
    for each in with_causes(error):
        traceback.clear_frames(each.__traceback__)


def _in_use() -> str:
    usage = allocated_and_reserved()
    if usage is None:
        return ""
    allocated, reserved = (used / 2**30 for used in usage)
    return f" [allocated {allocated:.2f} GiB, reserved {reserved:.2f} GiB]"


class _Kept:
    """The state before a piece. Gradients are set aside: the piece starts with none."""

    def __init__(self, leaves: Sequence[Tensor], given: Sequence[Tensor], buffers: ChangingBuffers) -> None:
        self._leaves = leaves
        self._set_aside = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
        self._given = [(tensor, tensor._version) for tensor in given if not tensor.is_inference()]
        self._streams = read_streams()
        self._put_buffers_back = buffers.copy()
        for leaf, _ in self._set_aside:
            leaf.grad = None

    @property
    def batch_changed(self) -> bool:
        """Whether the piece wrote into the batch."""
        return any(tensor._version != version for tensor, version in self._given)

    def put_back(self) -> None:
        """Undo all effects of the piece."""
        for leaf in self._leaves:
            leaf.grad = None
        for leaf, gradient in self._set_aside:
            leaf.grad = gradient
        set_streams(self._streams)
        self._put_buffers_back()

    @torch.no_grad()
    def add_back(self) -> None:
        """Add the gradients of the piece to those before, in place, as autograd would."""
        for leaf, before in self._set_aside:
            if leaf.grad is None:
                leaf.grad = before
            elif before.is_sparse and not leaf.grad.is_sparse:
                leaf.grad = leaf.grad + before  # a sparse gradient cannot be added to a dense one in place
            else:
                leaf.grad = before.add_(leaf.grad)


class ChangingBuffers:
    """Copies of the buffers that a forward may change: running statistics, counters, queues."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # By name, not by tensor: a queue that is replaced at every step must not be kept alive.
        self._first_seen: dict[tuple[int, str], tuple[int, int]] = {}

    def copy(self) -> Callable[[], None]:
        """Copy the current buffers; returns the function that restores them."""
        put_slots_back = save_slots(self._modules)
        copies = [
            (module, buffer, buffer._version, buffer.detach().clone())
            for i, module in enumerate(self._modules)
            for name, buffer in module._buffers.items()
            if buffer is not None and self._may_change((i, name), buffer)
        ]

        def put_back() -> None:
            put_slots_back()
            changed = [
                (buffer, copy)
                for module, buffer, version, copy in copies
                if may_have_changed(module, buffer._version != version)
            ]
            write_all([buffer for buffer, _ in changed], [copy for _, copy in changed])

        return put_back

    def _may_change(self, place: tuple[int, str], buffer: Tensor) -> bool:
        """Whether a buffer may change: small ones may; a large one is taken for a table or a mask until it changes."""
        if not is_writable(buffer):
            return False
        now = (id(buffer), buffer._version)
        return buffer.numel() <= LARGEST_STATISTIC or self._first_seen.setdefault(place, now) != now
