"""What a sampled step records about operations: overflows, values near an edge, ids out of range, orders of rows."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.record.facts import FoldedIdsCall, OverflowCall, RiskyCall, RowOrder
from surefoot.watch.function_recorder import tensors_in
from surefoot.watch.operation_names import ARITHMETIC
from surefoot.watch.tensor_summary import finite_or_none, sampled

if TYPE_CHECKING:
    from surefoot.watch.call_history import CallHistory
    from surefoot.watch.function_recorder import DomainFacts, RecordedCall

_MOST_ORDERED = 1 << 20
_orders: list[tuple[int, weakref.ref[Tensor]]] = []
"""The permutations that rows were picked by, numbered."""


class NumericCalls:
    """Operations of one sampled step whose values need a second look."""

    def __init__(self, history: CallHistory) -> None:
        self._history = history
        self.risky: list[RiskyCall] = []
        self.folded_ids: list[FoldedIdsCall] = []
        self.overflows: list[OverflowCall] = []
        self.orders: list[RowOrder] = []

    def folded_ids_of(self, entry: RecordedCall, args: tuple[Any, ...], out: Any) -> None:
        """Integer ids that were forced into a range."""
        if not args or not isinstance(args[0], Tensor) or args[0].is_floating_point() or args[0].dtype is torch.bool:
            return
        if isinstance(out, Tensor) and out.shape == args[0].shape and out.numel() > 1 and not out.is_floating_point():
            changed = float((out != args[0]).float().mean())
            if changed:
                self.folded_ids.append(
                    FoldedIdsCall(
                        **self._history.place(entry),
                        changed=changed,
                        highest=int(args[0].max()),
                        kept=int(out.max()),
                        source=self._history.producer(args[0]),
                    )
                )

    def overflow(self, entry: RecordedCall, args: tuple[Any, ...], out: Tensor) -> None:
        """A half-precision result beyond its range, from finite inputs."""
        if entry.name not in ARITHMETIC or len(self.overflows) >= 20 or not bool(torch.isinf(out).any()):
            return
        given = [value for value in args if isinstance(value, Tensor) and value.is_floating_point()]
        if given and all(bool(torch.isfinite(value).all()) for value in given):
            largest = max(float(sampled(value).float().abs().max()) for value in given if value.numel())
            self.overflows.append(
                OverflowCall(
                    **self._history.place(entry),
                    infinite=int(torch.isinf(out).sum()),
                    of=out.numel(),
                    largest_in=largest,
                )
            )

    def domain(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Whether an operation without a graph made something non-finite, and whether what it was given was finite."""
        made = next((value for value in tensors_in(out) if value.is_floating_point()), None)
        if made is None or made.layout is not torch.strided or made.is_meta:
            return
        given = [value for value in (*tensors_in(args), *tensors_in(kwargs)) if value.is_floating_point()]
        bad = not bool(torch.isfinite(made).all())
        note: DomainFacts = {"bad": bad, "given_finite": None}
        if bad:
            note |= {"nan": int(torch.isnan(made).sum()), "inf": int(torch.isinf(made).sum()), "of": made.numel()}
            kept = [value for value in given if value is not made]
            if kept and len(kept) == len(given):  # else it was written over
                note["given_finite"] = all(bool(torch.isfinite(value).all()) for value in given)
                edge = sampled(kept[-1 if entry.name == "div" else 0]).float()
                note["lowest"] = finite_or_none(edge.min()) if edge.numel() else None
        entry.notes.domain = note

    def risk(self, entry: RecordedCall, args: tuple[Any, ...], out: Tensor) -> None:
        """How near an operation came to where it, or its derivative, is not defined."""
        if len(self.risky) >= 150 or not args:
            return
        if entry.name == "pow" and len(args) > 1 and _is_whole(args[1]):
            return  # a square has a derivative everywhere
        if entry.name == "div":
            edge = args[1] if len(args) > 1 else None
        elif entry.name in ("norm", "normalize", "std", "var", "where", "cdist", "softmax"):
            edge = out
        else:
            edge = args[0]
        if not isinstance(edge, Tensor) or not edge.is_floating_point() or edge.numel() == 0:
            return
        values = sampled(edge).float()
        self.risky.append(
            RiskyCall(
                **self._history.place(entry),
                lowest=finite_or_none(values.min()),
                highest=finite_or_none(values.max()),
                nearest_zero=finite_or_none(values.abs().min()),
                out_nonfinite=int((~torch.isfinite(sampled(out))).sum()),
                in_nonfinite=int((~torch.isfinite(sampled(args[0]))).sum()) if isinstance(args[0], Tensor) else 0,
                dtype=entry.out_dtype,
            )
        )

    def order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rows that are picked by a permutation or by a part of one: which permutation, and whether it is a new one."""
        index = next((v for v in (*args[1:], *kwargs.values()) if isinstance(v, Tensor)), None)
        if index is None or index.dtype is not torch.int64 or index.dim() != 1 or self.orders:
            return
        order = index._base if index._base is not None else index
        if order.dim() != 1 or not 8 <= order.numel() <= _MOST_ORDERED:
            return
        number = next((number for number, ref in _orders if ref() is order), None)
        if number is None:
            if not torch.equal(order.sort().values, torch.arange(order.numel(), device=order.device)):
                return
            number = _orders[-1][0] + 1 if _orders else 0
            _orders[:] = [*[held for held in _orders if held[1]() is not None][-16:], (number, weakref.ref(order))]
        fingerprint = hash(tuple(order[:32].tolist()))
        self.orders.append(RowOrder(length=order.numel(), fingerprint=fingerprint, number=number))


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()
