"""The facts that a sampled step records about numeric operations: overflows, values near the edge of a domain, ids out
of range, and the order of rows.
"""

from __future__ import annotations

import math
import weakref
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from surefoot.record.facts import FoldedIdsCall, OverflowCall, RiskyCall, RowOrder
from surefoot.watch.deferred import ABSENT, later, number, reads_at_once
from surefoot.watch.function_recorder import tensors_in
from surefoot.watch.operation_names import ARITHMETIC, SIMILARITIES
from surefoot.watch.tensor_summary import finite_or_none, sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from surefoot.watch.call_history import CallHistory
    from surefoot.watch.function_recorder import DomainFacts, RecordedCall

_MOST_ORDERED = 1 << 20
_AT_ONCE = 1 << 24
"""The number of values tested at a time."""
MOST_OVERFLOWS = 20
FEWEST_CLAMPED = 16
"""The fewest values of which a share at a bound says something."""
MOST_CANDIDATES = 1_000
"""The maximum number of calls of one step that may have overflowed, while this is not known yet."""
MOST_ORDERS = 4
"""The maximum number of indices of one step that may be permutations, while this is not known yet."""


class _Order(NamedTuple):
    """A tensor that rows were picked by, held weakly."""

    number: int
    tensor: weakref.ref[Tensor]
    is_permutation: Any
    """A boolean that may be deferred."""


_orders: list[_Order] = []


class NumericCalls:
    """Operations of one sampled step whose values are examined."""

    def __init__(self, history: CallHistory) -> None:
        self._history = history
        self.risky: list[RiskyCall] = []
        self.folded_ids: list[FoldedIdsCall] = []
        self.overflows: list[OverflowCall] = []
        self.orders: list[RowOrder] = []
        self._overflown, self._ordered = count(), count()
        """The number of overflows and of orders kept, counted when they are known to be such."""

    def folded_ids_of(self, entry: RecordedCall, args: tuple[Any, ...], out: Any) -> None:
        """Integer ids that were clamped or wrapped into a range."""
        if not args or not isinstance(args[0], Tensor) or args[0].is_floating_point() or args[0].dtype is torch.bool:
            return
        if isinstance(out, Tensor) and out.shape == args[0].shape and out.numel() > 1 and not out.is_floating_point():
            place, source = self._history.place(entry), self._history.producer(args[0])
            facts = partial(FoldedIdsCall, **place, source=source)
            changed = (out != args[0]).float().mean()
            _append(self.folded_ids, later(partial(_if_changed, facts), changed, args[0].max(), out.max()))

    def overflow(self, entry: RecordedCall, args: tuple[Any, ...], out: Tensor) -> None:
        """A half-precision result beyond its range, from finite inputs."""
        most = MOST_OVERFLOWS if reads_at_once(out) else MOST_CANDIDATES
        if entry.name not in ARITHMETIC or len(self.overflows) >= most:
            return
        if reads_at_once(out) and not bool(torch.isinf(out).any()):
            return
        given = [value for value in args if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]
        given = [value for value in given if value.device == out.device]
        if not given:
            return
        facts = partial(OverflowCall, **self._history.place(entry), of=out.numel())
        largest = torch.stack([sampled(value).float().abs().max() for value in given]).max()
        found = later(
            partial(_if_overflown, facts, self._overflown), _count(torch.isinf, out), _are_finite(given), largest
        )
        _append(self.overflows, found)

    def domain(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Whether an operation without a graph returned non-finite values, and whether its inputs were finite."""
        made = next((value for value in tensors_in(out) if value.is_floating_point()), None)
        if made is None or made.layout is not torch.strided or made.is_meta:
            return
        if reads_at_once(made) and bool(torch.isfinite(made).all()):
            entry.notes.domain = {"bad": False, "given_finite": None}
            return
        given = [value for value in (*tensors_in(args), *tensors_in(kwargs)) if value.is_floating_point()]
        kept = [value for value in given if value is not made]
        is_finite: Any = None
        lowest: Any = None
        if kept and len(kept) == len(given):  # otherwise an input was overwritten
            is_finite = _are_finite([value for value in given if value.device == made.device])
            edge = sampled(kept[-1 if entry.name == "div" else 0]).float()
            lowest = edge.min() if edge.numel() else None
        nan, inf = _count(torch.isnan, made), _count(torch.isinf, made)
        entry.notes.domain = later(partial(_domain_facts, made.numel()), nan, inf, is_finite, lowest)

    def risk(self, entry: RecordedCall, args: tuple[Any, ...], out: Tensor) -> None:
        """How close an operation came to values for which it, or its derivative, is undefined."""
        if len(self.risky) >= 150 or not args:
            return
        if entry.name == "pow" and len(args) > 1 and _is_whole(args[1]):
            return  # a whole power has a derivative everywhere
        if entry.name == "div":
            edge = args[1] if len(args) > 1 else None
        elif entry.name in ("norm", "normalize", "std", "var", "where", "cdist", "softmax"):
            edge = out
        else:
            edge = args[0]
        if not isinstance(edge, Tensor) or not edge.is_floating_point() or edge.numel() == 0:
            return
        values = sampled(edge).float()
        made = self._history.producer(edge) if entry.name == "log" else None
        is_clamped = made is not None and made.op in ("clamp", "clamp_min", "clip") and edge.numel() >= FEWEST_CLAMPED
        self.risky.append(
            RiskyCall(
                **self._history.place(entry),
                highest=finite_or_none(values.max()),
                nearest_zero=finite_or_none(values.abs().min()),
                sides=sum(entry.grads) if entry.name in SIMILARITIES else None,
                at_floor=number((values == values.min()).float().mean()) if is_clamped else None,
            )
        )

    def order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rows that are picked by a permutation or a part of one: the permutation, and whether it is new."""
        index = next((v for v in (*args[1:], *kwargs.values()) if isinstance(v, Tensor)), None)
        if index is None or index.dtype is not torch.int64 or index.dim() != 1:
            return
        if len(self.orders) >= (1 if reads_at_once(index) else MOST_ORDERS):
            return
        order = index._base if index._base is not None else index
        if order.dim() != 1 or not 8 <= order.numel() <= _MOST_ORDERED:
            return
        known = next((held for held in _orders if held.tensor() is order), None)
        if known is None:
            ordered = torch.arange(order.numel(), device=order.device)
            is_one = number((order.sort().values == ordered).all())
            if is_one is False:
                return
            known = _Order(_orders[-1].number + 1 if _orders else 0, weakref.ref(order), is_one)
            _orders[:] = [*[held for held in _orders if held.tensor() is not None][-16:], known]
        facts = partial(RowOrder, length=order.numel(), number=known.number)
        found = later(partial(_if_permutation, facts, self._ordered), known.is_permutation, order[:32].clone())
        _append(self.orders, found)


def _append(facts: list[Any], found: Any) -> None:
    if found is not ABSENT:
        facts.append(found)


def _if_changed(facts: partial[FoldedIdsCall], changed: float, highest: int, kept: int) -> FoldedIdsCall:
    return facts(changed=changed, highest=highest, kept=kept) if changed else ABSENT


def _if_overflown(
    facts: partial[OverflowCall], found: Iterator[int], infinite: int, is_finite: bool, largest: float
) -> OverflowCall:
    is_kept = infinite and is_finite and next(found) < MOST_OVERFLOWS
    return facts(infinite=infinite, largest_in=largest) if is_kept else cast("OverflowCall", ABSENT)


def _if_permutation(facts: partial[RowOrder], found: Iterator[int], is_permutation: bool, first: Tensor) -> RowOrder:
    """Only the first order of a step is kept."""
    return facts(fingerprint=hash(tuple(first.tolist()))) if is_permutation and next(found) == 0 else ABSENT


def _domain_facts(
    of: int, nan: int, inf: int, is_finite: bool | None, lowest: float | None
) -> DomainFacts:  # fmt: skip
    if not nan + inf:
        return {"bad": False, "given_finite": None}
    found: DomainFacts = {"bad": True, "given_finite": is_finite, "nan": nan, "inf": inf, "of": of}
    if is_finite is not None:
        found["lowest"] = lowest if lowest is not None and math.isfinite(lowest) else None
    return found


def _count(test: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """The number of values for which a test holds, without allocating a mask for all of them."""
    parts = [test(part).sum() for part in torch.split(values.detach().reshape(-1), _AT_ONCE)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _are_finite(tensors: list[Tensor]) -> Tensor:
    """Whether all values of tensors on one device are finite. Minimum and maximum are enough: both propagate NaN."""
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor.detach())]
    return torch.stack([torch.isfinite(end) for end in ends]).all() if ends else torch.tensor(True)


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()
