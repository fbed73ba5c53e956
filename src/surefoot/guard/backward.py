"""From losses to the gradients of one optimizer step: backward, loss scale, accumulation, pieces, ranks.

`GradientWindow` covers everything between two optimizer steps: the microbatches of the window, the divisor that their
gradients still need, and whether other code has changed them.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.act.accumulate import AccumulationWindow, read_if_free
from surefoot.act.microbatches import Microbatches, RowLimit, Split, Weighing
from surefoot.act.pieces import count_rows
from surefoot.core.state_tree import pack
from surefoot.decide.agreement import add_up, average_gradients, set_gradient_sync
from surefoot.decide.uneven_ranks import check_separable, without_collectives
from surefoot.errors import UsageError
from surefoot.guard.changed_settings import warn_of_other_accumulation
from surefoot.keep.restore import as_gradient
from surefoot.keep.staging import map_tensors
from surefoot.observe.tensors import dense_views
from surefoot.types import Scalar, Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import nn

    from surefoot.act.accumulate import WindowValues
    from surefoot.act.microbatches import RowLimitState
    from surefoot.decide.unguardable import SetupOfRanks
    from surefoot.guard.run_history import RunHistory
    from surefoot.guard.step_decision import StepPolicy
    from surefoot.observe.parameters import Layout
    from surefoot.types import NamedParameter


log = logging.getLogger("surefoot")


class GradientWarnings:
    """Warnings about gradients that other code has changed, and about batches that do not fit in memory."""

    def __init__(self, models: Sequence[nn.Module], history: RunHistory) -> None:
        self._models, self._history = models, history

    def lost_gradients(self, step: int, window: AccumulationWindow) -> None:
        """The gradients of a backward no longer exist: `zero_grad()` was called in between."""
        self._history.warn_once(
            Signals(step),
            "optim.lost-microbatch",
            f"the gradients of {window.count} of {window.length} microbatches were discarded before the step: with "
            "`accumulate` the stabilizer calls `zero_grad()`; remove the call from the loop",
        )

    def clipped_outside(self, step: int) -> None:
        """Other code changed gradients that are still multiplied by the loss scale."""
        self._history.warn_once(
            Signals(step),
            "clip.before-unscale",
            "gradients were changed in place between backward() and step(), while they are still multiplied by the "
            "loss scale: a limit applied there has no meaning. Pass `clip=` instead",
        )

    def split(self, step: int, split: Split) -> None:
        """Report once that batches do not fit into memory as a whole, and once the effect on batch norm."""
        signals = Signals(step)
        if "memory.split" not in self._history.by_kind:
            log.info("surefoot: step %d: %s", step, split)
            self._history.note(signals, "memory.split", "info", str(split), evidence=split.evidence())
        if any(isinstance(m, _BatchNorm) and m.training for model in self._models for m in model.modules()):
            self._history.warn_once(
                signals,
                "memory.split-batch-norm",
                f"batches run in pieces of {split.largest} rows, because more did not fit into memory, and batch norm "
                "computes its statistics over a piece, which is noisier than over the batch. Use group norm instead",
            )


class BatchPieces:
    """Runs one batch forward and backward, in as few pieces as fit in memory."""

    def __init__(self, models: Sequence[nn.Module], layout: Layout) -> None:
        self._models, self._layout = models, layout
        self.row_limit = RowLimit()
        """The number of rows that fit."""
        self._microbatches: Microbatches | None = None

    def check(self) -> None:
        """Raise `UsageError` if the models cannot be run in pieces."""
        if self._microbatches is None:
            check_separable(self._models)
            self._microbatches = Microbatches(self._models, self.row_limit)

    def run(
        self,
        loss_fn: Callable[[Any], Tensor],
        batch: Any,
        weighing: Weighing,
        scaled_backward: Callable[[Tensor, Scalar | None], None],
    ) -> tuple[Tensor, Split | None]:
        """Run a batch; returns its loss, and the split if there was one. Call `check` first."""
        assert self._microbatches is not None

        def backward(loss: Tensor, share: float) -> None:
            if share < 1 and isinstance(loss, Tensor) and not loss.requires_grad:
                return  # a piece without targets may have a constant loss although the batch does not
            check_loss(loss)
            scaled_backward(loss if share == 1 else loss * share, weighing.total)

        parameters = [parameter for _, parameter in self._layout.parameters]
        loss, split = self._microbatches.run(loss_fn, batch, weighing, backward, parameters)
        # The batch is only padding and contributes no gradient.
        return torch.zeros((), device=self._layout.home) if loss is None else loss, split


class GradientWindowState(TypedDict):
    """The stored state of a `GradientWindow`."""

    sums: WindowValues | None
    """`None` if there was no microbatch since the last step."""
    gradients: list[Tensor | None]
    """The gradient of each parameter; empty if there was no microbatch."""
    row_limit: RowLimitState
    accumulate: int | None
    """The number of microbatches of a step; `None` if the state was saved by a version that did not store it."""


class ClosedMicrobatches:
    """The microbatches that were completed so far, in all windows."""

    def __init__(self) -> None:
        self.count = 0
        self.thread: int | None = None
        """The thread that trains; `None` after a state was loaded."""

    def add(self) -> None:
        """Count one more."""
        self.count, self.thread = self.count + 1, threading.get_ident()

    def have_used(self, batches: int, before: int) -> bool:
        """Whether this many batches have all been used, and none was drawn ahead, in this or another thread.

        `before` is the value of `count` at the first of them; `None` if the run was stopped after the last one and then
        resumed.
        """
        return batches <= self.count - before and self.thread in (None, threading.get_ident())


class GradientWindow:
    """The microbatches since the last optimizer step, and their gradients."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        layout: Layout,
        policy: StepPolicy,
        warnings: GradientWarnings,
        group: dist.ProcessGroup | None,
        accumulate: int,
        zero_grad: bool,
        setup: SetupOfRanks | None,
    ) -> None:
        self._models, self._layout, self._policy, self._group = models, layout, policy, group
        self.warnings, self._zero_grad = warnings, zero_grad
        self.step = 0
        """The optimizer step that the window belongs to."""
        self.closed = ClosedMicrobatches()
        self.sums = AccumulationWindow(accumulate, across_ranks=group is not None)
        self.pieces = BatchPieces(models, layout)
        self._changes: GradientChanges | None = None
        self._setup = setup
        self._announce_sync()

    # ---- one microbatch -------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: Scalar | None, options: dict[str, Any]) -> None:
        """Run backward on one loss of a microbatch."""
        check_loss(loss)
        if self._setup is not None:
            self._setup.check(self.step)
        self._drop_stale_gradients()
        if _has_gradient(weight) or self._group is not None:  # ranks wait for each other in backward
            self._scaled_backward(loss, weight, **options)
        else:
            self.sums.scaled(loss, weight)
        self._add_loss(loss, weight)

    def run_pieces(
        self, loss_fn: Callable[[Any], Tensor], batch: Any, weight: Callable[[Any], Scalar] | None
    ) -> Tensor:
        """Run one microbatch forward and backward, in as few pieces as fit; returns its loss."""
        self.pieces.check()
        try:
            with without_collectives(self._models, self._group, _is_last(self.sums)):
                weighing = Weighing(count_rows(batch), weight, None if weight is None else weight(batch))
                self._drop_stale_gradients()
                loss, split = self.pieces.run(loss_fn, batch, weighing, self._scaled_backward)
        except Exception:
            if self._group is not None:  # all ranks failed together, and start again together
                self._layout.drop_gradients()
                self.sums = self.sums.cleared()
                self._announce_sync()
            raise
        if split is not None:
            self.warnings.split(self.step, split)
        self._add_loss(loss, weighing.total)
        return loss

    def _scaled_backward(self, loss: Tensor, weight: Scalar | None, **options: Any) -> None:
        scale = self._policy.loss_scale()
        with torch.enable_grad():  # the loss has its graph, even if backward is called under `no_grad`
            scaled = self.sums.scaled(loss, weight)
            if scale is not None:
                scaled = scaled * scale.to(scaled.device)
        scaled.backward(**options)  # type: ignore[no-untyped-call]

    def _add_loss(self, loss: Tensor, weight: Scalar | None) -> None:
        """Record a microbatch, or one loss of it."""
        self.sums.add(loss, weight)
        if self._policy.scaler is not None:
            self._changes = GradientChanges(self._layout.parameters)

    # ---- the window -----------------------------------------------------------------------------------------------

    def _announce_sync(self) -> None:
        """Under DDP and FSDP2, average gradients over ranks only at the last microbatch of a window."""
        if self.sums.length > 1:
            set_gradient_sync(self._models, _is_last(self.sums))

    def close_microbatch(self) -> bool:
        """Complete the microbatch; returns whether the window is complete."""
        self.sums.close()
        self.closed.add()
        if not self.sums.full:
            self._announce_sync()
        return self.sums.full

    def close_early(self) -> bool:
        """Close a window with fewer microbatches than usual; returns whether it contains any."""
        if self.sums.open:
            self.sums.close()
        if self.sums.count and not self.sums.full:
            average_gradients(dense_views(self._layout.with_gradient()[1]), self._group)
        return self.sums.count > 0

    def check_unchanged(self) -> None:
        """Warn if other code has changed gradients that are still multiplied by the loss scale."""
        if self._changes is not None and self._changes.broken:
            self.warnings.clipped_outside(self.step)

    def begin(self, step: int) -> None:
        """Start an empty window for the next optimizer step."""
        self.step, self.sums, self._changes = step, self.sums.cleared(), None
        self._announce_sync()

    def evaluate(self, closure: Callable[[], Tensor]) -> Tensor:
        """Run a closure that calls backward, or leaves gradients, in its own window."""
        self.sums = self.sums.cleared()
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            raise UsageError("the closure returned None; it must return the loss.")
        if not self.sums.open:
            self.sums.add(torch.as_tensor(loss, device=self._layout.home), None)
        return loss

    def divisor(self) -> Scalar:
        """The divisor that accumulation leaves for the gradients; weights are summed over the ranks."""
        divisor, home = self.sums.divisor, self._layout.home
        dtype = torch.float64 if _is_double(self._layout) else torch.float32
        on_host = not self.sums.weighted or (self._group is None and home.type == "cpu")
        if not isinstance(divisor, Tensor):
            if on_host and (dtype is torch.float32 or divisor == 1):
                return divisor
            # A number would be a constant in a CUDA graph; `torch.tensor` would wait for the device, a fill does not.
            divisor = torch.full((), divisor, dtype=dtype, device=home)
        total = divisor.to(home, dtype)
        if on_host or self._group is None:
            return total
        return add_up(total, self._group) / torch.distributed.get_world_size(self._group)

    def _drop_stale_gradients(self) -> None:
        """Before a microbatch: drop gradients that other code left, or detect that some were deleted."""
        if self._zero_grad and self.sums.loss_sum is None:
            self._layout.drop_gradients()  # left by the backward of another model, as in a GAN
        window = self.sums
        if window.is_empty or any(p.grad is not None for _, p in self._layout.parameters):
            return
        if window.length == 1:  # as after a batch that failed: drop it and continue with the next
            self.sums = window.cleared()
        else:
            self.warnings.lost_gradients(self.step, window)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, live: bool) -> GradientWindowState:
        """The current window with its gradients so far, if there is one; with `live`, tensors are not copied."""
        under_way = self.sums.loss_sum is not None
        gradients = [parameter.grad for _, parameter in self._layout.parameters] if under_way else []
        return {
            "sums": pack(self.sums.state_dict(), live) if under_way else None,
            "gradients": pack(gradients, live),
            "row_limit": self.pieces.row_limit.state_dict(),
            "accumulate": self.sums.length,
        }

    def load_state_dict(self, state: GradientWindowState, step: int) -> None:
        """Continue an unfinished window with its gradients so far."""
        self._layout.drop_gradients()
        self.closed.thread = None
        self.pieces.row_limit.load_state_dict(state["row_limit"])
        if not self.sums.across_ranks:  # otherwise `GlobalBatch` compares, and may adapt it
            warn_of_other_accumulation(state["accumulate"], self.sums.length)
        self.begin(step)
        if state["sums"] is None:
            return
        self.sums.load_state_dict(map_tensors(state["sums"], lambda tensor: tensor.to(self._layout.home)))
        self._announce_sync()
        for (_, parameter), gradient in zip(self._layout.parameters, state["gradients"], strict=True):
            if gradient is not None:
                parameter.grad = as_gradient(gradient, parameter)


def check_loss(loss: object) -> None:
    """Raise `UsageError` for a loss that backward cannot run on."""
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"`backward` takes the loss tensor; got {type(loss).__name__}. Pass the loss itself, not `loss.item()`."
        )
    if loss.numel() != 1:
        raise UsageError(f"the loss must be one number; got shape {tuple(loss.shape)}. Reduce it with `.mean()` first.")
    if loss.is_complex():
        raise UsageError("the loss must be a real number; got a complex one. Take its `.real` part, or `.abs()`.")
    if not loss.requires_grad:
        raise UsageError(
            "the loss has no graph, so no gradient can flow: it was detached, computed under `no_grad`, or depends on "
            "no parameter that requires a gradient."
        )


def _is_last(window: AccumulationWindow) -> bool:
    return window.count == window.length - 1


def _has_gradient(weight: Scalar | None) -> bool:
    """Whether a microbatch of this weight needs a backward: not if it is known to have no rows.

    A weight on a device is not read: the gradient is multiplied by 0 there.
    """
    number = read_if_free(weight)
    return number is None or isinstance(number, Tensor) or number != 0


def _is_double(layout: Layout) -> bool:
    return torch.float64 in {parameter.dtype for _, parameter in layout.parameters}


WATCHED = 4
"""The number of gradients that are checked: code that clips changes all of them."""


class GradientChanges:
    """Detects gradients that were changed in place between backward and step.

    It stores the version counters of a few of them. Comparing these does not access the device.
    """

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        gradients = (parameter.grad for _, parameter in parameters)
        found = [gradient for gradient in gradients if gradient is not None][:WATCHED]
        self._versions: list[tuple[Tensor, int]] = [(gradient, gradient._version) for gradient in found]

    @property
    def broken(self) -> bool:
        """Whether any of them has been changed since."""
        return any(gradient._version != version for gradient, version in self._versions)
