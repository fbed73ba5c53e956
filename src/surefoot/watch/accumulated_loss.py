"""The loss of a step with several backward calls, whether or not the script divides the loss of each microbatch.

`loss / 4` before backward makes four values whose sum is the loss; the mean of undivided values is the loss. The graph
shows which case applies: the last operations before backward divide or multiply by a number, and a sum over targets has
a known number of them. The loss of the step is the sum of the values divided by the sum of their shares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from surefoot.core.without_hooks import WithoutHooks
from surefoot.watch import autograd_graph as graph
from surefoot.watch.script_hooks import script_hooks

if TYPE_CHECKING:
    from surefoot.core.device_copies import ArrivingNumber, KnownNumber

_SCALING = frozenset(("Div", "Mul"))
_FOLLOWED = _SCALING | {"View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Expand"}
"""Operations with one input that change the loss by a factor at most."""
_CLASS_LOSSES = ("NllLoss", "NllLoss2D")
_SUM = 2
"""torch's number for `reduction="sum"`."""
_CLOSE = 0.02
MOST_BACKWARDS = 10_000
"""The maximum number of losses since the last step that are kept. A loop that never steps has more."""


def share_of(root: Tensor, scaled: bool) -> float | None:
    """The share of its microbatch's mean loss that a value is: 0.25 for `loss / 4`; `None` if that is not known.

    The share is not known if the number is on a device: reading it would wait for the device.

    Args:
        root: What backward is called on.
        scaled: Whether a gradient scaler made it. The factor of the scaler is ignored.
    """
    if script_hooks.saved or root.grad_fn is None or root.numel() != 1:
        return None
    share = 1.0
    node: Any = root.grad_fn.next_functions[0][0] if scaled else root.grad_fn
    if node is None:
        return None
    op = graph.op(node)
    if op not in _FOLLOWED and not (op in _CLASS_LOSSES and node._saved_reduction == _SUM):
        return share  # the usual case
    with WithoutHooks():
        for _ in range(8):
            if op in _CLASS_LOSSES and node._saved_reduction == _SUM:
                counted = _number(node._saved_total_weight)
                return None if counted is None else share * counted
            if op not in _FOLLOWED:
                break  # its inputs are not looked at: a compiled model has one for every parameter
            below = [n for n, _ in node.next_functions if n is not None]
            if len(below) != 1:
                break
            if op in _SCALING:
                number = _number(getattr(node, "_saved_other", None))
                if not number:
                    return None
                share = share / number if op == "Div" else share * number
            node = below[0]
            op = graph.op(node)
    return share


def _number(value: Any) -> float | None:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.device.type != "cpu":
        return None
    return abs(float(value))


class Accumulation:
    """How the values of a script's microbatches add up to the loss of a step."""

    def __init__(self) -> None:
        self._size: int | None = None
        """The number that the script divides by."""

    def loss_of(self, values: list[Any], shares: list[float | None]) -> Any:
        """The loss of a step from the numbers or tensors that backward was called on; `None` if there are none."""
        if not values:
            return None
        divisor = self.divisor_of(len(values), shares)
        return values[0] if len(values) == 1 and divisor == 1 else sum(values) / divisor

    def is_whole(self, share: float | None) -> bool:
        """Whether one value is the loss of a step, so that its divisor is 1."""
        return self._size is None or share is None or share == 1.0

    def divisor_of(self, count: int, shares: list[float | None]) -> float:
        """What the sum of the values is divided by."""
        known = [share for share in shares if share is not None]
        return math.fsum(known) if len(known) == count and self._divides(known) else count

    def _divides(self, shares: list[float]) -> bool:
        """Whether the values are parts of one loss. The last step of an epoch may have fewer than the others."""
        if len(shares) > 1 and abs(math.fsum(shares) - 1.0) < _CLOSE:
            if max(shares) - min(shares) < _CLOSE * max(shares):
                self._size = len(shares)
            return True
        size = self._size
        return size is not None and len(shares) < size and all(abs(share * size - 1.0) < _CLOSE for share in shares)


class ArrivingLoss:
    """The loss of a step whose values are being copied from a device."""

    def __init__(self, parts: list[ArrivingNumber | KnownNumber], divisor: float) -> None:
        self._parts, self._divisor = parts, divisor

    def has_arrived(self) -> bool:
        """Whether `wait` returns without waiting."""
        return all(part.has_arrived() for part in self._parts)

    def wait(self) -> float:
        """The loss. Waits for the device if a value has not arrived."""
        return math.fsum(part.wait() for part in self._parts) / self._divisor


class StepLosses:
    """The losses that `backward` was called on since the last step: numbers, or tensors that have not been read yet."""

    def __init__(self) -> None:
        self._accumulation = Accumulation()
        self.values: list[Any] = []
        self._shares: list[float | None] = []
        """For each value, the share of its microbatch's loss that it is."""
        self._copies: list[ArrivingNumber | KnownNumber | None] = []
        """For each value, its copy on the host; `None` for a value on the CPU."""
        self._previous: list[Any] = []
        """The loss of the last step, for an optimizer that steps without a backward of its own."""

    def add(self, value: Any, share: float | None, copy: ArrivingNumber | KnownNumber | None = None) -> None:
        """Add the loss of one backward, and its copy if it is on a device."""
        self.values.append(value)
        self._shares.append(share)
        self._copies.append(copy)
        if len(self.values) > MOST_BACKWARDS:
            del self.values[0], self._shares[0], self._copies[0]

    def loss_so_far(self) -> Any:
        """The loss of the current step, from the backward calls since the last one; `None` if there were none."""
        return self._accumulation.loss_of(self.values, self._shares)

    def close_step(self, evaluations: int) -> Any:
        """The loss of the step that ends here: a number, or one that is still being copied.

        `evaluations` is the number of times a closure was evaluated inside the step. The first evaluation is the loss
        at the current point, or of the last microbatch; later ones are left out.
        """
        values, shares, copies = self.values or self._previous, self._shares, self._copies
        if len(copies) == 1 and not evaluations and copies[0] is not None and self._accumulation.is_whole(shares[0]):
            loss: Any = copies[0] if isinstance(values[0], Tensor) else values[0]
            self._previous = [loss]
            self.values, self._shares, self._copies = [], [], []
            return loss
        if evaluations:
            first = len(values) - evaluations + 1
            values, shares, copies = values[:first], shares[:first], copies[:first]
        known = [copy for copy in copies if copy is not None]
        if len(known) == len(values) and any(isinstance(value, Tensor) for value in values):
            loss = ArrivingLoss(known, self._accumulation.divisor_of(len(values), shares))
        else:
            loss = self._accumulation.loss_of(values, shares)
        self._previous = [loss] if values else []
        self._begin_step()
        return loss

    def close_skipped_step(self) -> None:
        """A scaler has skipped the step: its losses belong to no row."""
        loss = self._accumulation.loss_of(self.values, self._shares)
        self._previous = [] if loss is None else [loss]
        self._begin_step()

    def _begin_step(self) -> None:
        self.values, self._shares, self._copies = [], [], []
