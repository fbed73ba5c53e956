"""The origin of a step's data: the operations that ran without a graph before a tensor entered the graph.

The graph below a loss begins where gradients begin. A `log` of the batch, or its standardisation, is computed before
that, so the graph contains only the result, which looks like data. The recorder of a sampled step has the operations in
between. Those of the last sampled step are used for a later step, together with what is known about that step's own
batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.observe.readable import is_readable
from surefoot.record.facts import UngraphedCall
from surefoot.watch.deferred import later, read_each
from surefoot.watch.function_recorder import tensors_in
from surefoot.watch.operation_names import RECURRENT, WEIGHT_LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from surefoot.record.facts import DrawnBatch, NonFiniteLoss
    from surefoot.watch.function_recorder import DomainFacts, FunctionRecorder, RecordedCall

MOST_ORIGINS = 64
_MOST_CALLS = 200
"""The maximum number of calls followed back from one tensor."""
_UNREADABLE = frozenset({"tensor", "as_tensor", "from_numpy", "frombuffer", "asarray", "empty", "empty_like"})
"""Calls that take values from outside torch. Whether those were finite cannot be determined later."""
_LOGARITHMS = frozenset({"log", "log2", "log10", "log1p", "logit"})
_NEARLY_AS_MANY = 0.25
"""A tensor may have been computed from a batch if their numbers of values differ by at most this factor."""


@dataclass
class DataOrigin:
    """How one tensor entered the graph."""

    consumer: tuple[str, str, str]
    """Site, module and name of the call that took it into the graph."""
    shape: list[int]
    risky: list[UngraphedCall]
    """The calls on its path that are not defined for all values, first to last."""
    from_model: bool
    """Whether a model, or the graph itself, made it."""
    sources: list[Any] = field(default_factory=list)
    """Weak references to the tensors it was made from."""
    storage: int | None = None
    """The address of its values."""
    readable: bool = True
    """Whether it was made from these tensors, random numbers and constants only."""


def data_origins_in(recorder: FunctionRecorder) -> list[DataOrigin]:
    """The origin of each tensor that entered the graph from outside, one for each call that took it."""
    found: dict[tuple[Any, ...], DataOrigin] = {}
    for entry in recorder.entries:
        if not entry.out_grad or not entry.inputs:
            continue
        for index in entry.inputs:
            made = recorder.entries[index]
            key = (entry.site, entry.module, entry.name, tuple(made.out_shape or ()))
            if made.out_grad or not made.out_dtype.startswith(("float", "bfloat")) or key in found:
                continue
            if len(found) >= MOST_ORIGINS:
                return list(found.values())
            found[key] = _origin(recorder, entry, made)
    return list(found.values())


def _origin(recorder: FunctionRecorder, consumer: RecordedCall, made: RecordedCall) -> DataOrigin:
    path = sorted(recorder.history(made.index, _MOST_CALLS), key=lambda entry: entry.index)
    from_model = any(e.out_grad or e.parameters or e.name in WEIGHT_LAYERS or e.name in RECURRENT for e in path)
    own = {id(result) for e in path if e.result is not None and (result := e.result()) is not None}
    sources: dict[int, Any] = {}
    readable = len(path) < _MOST_CALLS and not any(e.name in _UNREADABLE for e in path)
    for e in path:
        if len(e.inputs) < len(e.taken):  # one of the tensors was not made by a recorded call
            outside = {id(tensor): ref for ref in e.taken if (tensor := ref()) is not None and id(tensor) not in own}
            readable = readable and bool(outside)
            sources |= outside
    return DataOrigin(
        (consumer.site, consumer.module, consumer.name),
        list(made.out_shape or []),
        [
            later(partial(_ungraphed, e.name, e.site, e.module), e.notes.domain)
            for e in path
            if e.notes.domain is not None
        ],
        from_model,
        list(sources.values()),
        None if made.result is None or (result := made.result()) is None else place_of(result),
        readable,
    )


def _ungraphed(call: str, site: str, module: str, domain: DomainFacts) -> UngraphedCall:
    return UngraphedCall(call=call, site=site, module=module, **domain)


def origin_of_data(
    facts: NonFiniteLoss, tensor: Tensor | None, known: Iterable[DataOrigin], here: bool, drawn: list[Any]
) -> NonFiniteLoss:
    """Add what is known about the path of the data to the facts of a bad loss whose origin is data.

    Args:
        facts: What is known of the origin: the shape of the tensor, and the call that took it into the graph.
        tensor: The tensor itself, where the graph holds it.
        known: The origins of data in this step if `here`, or else in the last sampled step.
        drawn: The unchanged batches that data loaders returned for this step.
    """
    origin = _match(facts, list(known), None if tensor is None or not here else place_of(tensor))
    risky = [] if origin is None else read_each(origin.risky)
    found = facts
    if origin is not None and not facts.site:
        site, module, call = origin.consumer
        found = replace(found, site=site, module=module, call=call)
    if not here:  # non-finite values in a sampled step with a finite loss are there on purpose, as in a mask
        risky = [each for each in risky if not each.bad]
    else:
        risky = [each for each in risky if each.bad]
        if risky and risky[0].given_finite:
            return replace(found, kind="operation", without_graph=True, exact=True, made_by=risky[0])
    was_finite = _were_finite(facts, origin, drawn)
    words = [f"{each.call} at {each.site}" for each in risky]
    logarithm = next((each for each in reversed(risky) if each.call.rstrip("_") in _LOGARITHMS), None)
    if was_finite is None and logarithm is not None and facts.minus_inf and not facts.nan:
        risky, was_finite = [logarithm], True  # a logarithm of a non-finite value is not -inf
    if was_finite is False:
        return replace(found, came_in_finite=False)
    if origin is not None and origin.from_model:
        return replace(found, kind="unknown", from_model=True)
    if was_finite and not risky and (tensor is None or (origin is not None and not origin.sources and not here)):
        # That it was data is itself an inference: an overflow looks the same. And for a tensor that was made from
        # nothing, such as random numbers, the last sampled step does not show what was written into it since.
        return found
    if was_finite:
        likely = risky[0 if here else -1] if risky else None
        found = replace(found, kind="operation", without_graph=True, exact=False, made_by=likely)
    return replace(found, passed=words) if words and not here else found


def _match(facts: NonFiniteLoss, known: list[DataOrigin], storage: int | None) -> DataOrigin | None:
    """The origin of the tensor in question: by its memory, by the call that took it, or else by its size."""
    same = [each for each in known if storage is not None and each.storage == storage]
    if same:
        return same[-1]
    place = (facts.site, facts.module, facts.call)
    size = math.prod(facts.shape or [0])
    fitting = [each for each in known if math.prod(each.shape) == size]
    exact = [each for each in known if each.consumer == place]
    both = [each for each in exact if each in fitting]
    chosen = both or (exact if facts.tensor == "the other operand" else []) or fitting
    return chosen[0] if chosen else None


def _were_finite(facts: NonFiniteLoss, origin: DataOrigin | None, drawn: list[Any]) -> bool | None:
    """Whether the values were finite before any operation; `None` if that is not known."""
    size = math.prod(facts.shape or [0])
    if origin is not None and origin.from_model:
        origin = None  # weights are not data
    sources = [] if origin is None else [tensor for ref in origin.sources if (tensor := ref()) is not None]
    if any(not is_finite(tensor) for tensor in sources):
        return False
    whole = origin is not None and origin.readable and len(sources) == len(origin.sources)
    if whole and any(tensor.numel() > size for tensor in sources):  # the whole dataset, not one step's batch
        return True
    batch = [tensor for each in drawn for tensor in tensors_in(each)]
    if any(not is_finite(tensor) for tensor in batch):
        return False
    if whole and not sources:  # made from nothing, perhaps in an earlier step: the batch was checked first
        return True
    return True if any(_can_be_from(facts.shape or [0], tensor) for tensor in batch) else None


def draws_ahead(batches: Iterable[DrawnBatch]) -> bool:
    """Whether a loader draws the next batch before the last one is used, as trainers do to detect the last batch.

    Then the batch that was drawn last does not belong to the current step. Such a loop draws two batches before its
    first backward, and one before each later one.
    """
    begins: dict[tuple[int, int], list[int]] = {}
    for batch in batches:
        begin = begins.setdefault((batch.loader, batch.iteration), [])
        if len(begin) < 3 and batch.grad_mode:
            begin.append(batch.backward)
    return any(len(begin) == 3 and begin[0] == begin[1] < begin[2] for begin in begins.values())


def _can_be_from(shape: list[int], batch: Tensor) -> bool:
    """Whether a tensor of this shape may come from a batch: it has the same rows, and not many more values."""
    if not batch.dim() or not len(batch) or batch.numel() < _NEARLY_AS_MANY * math.prod(shape):
        return False
    return shape[0] == len(batch) or (len(shape) > 1 and shape[0] % len(batch) == 0)


def is_finite(value: Tensor) -> bool:
    """Whether every value is finite. Integers, and tensors that cannot be read, count as finite."""
    if (
        not is_readable(value)
        or not value.is_floating_point()
        or not value.numel()
        or value.layout is not torch.strided
    ):
        return True
    return math.isfinite(float(value.detach().float().sum())) or bool(torch.isfinite(value).all())


def place_of(tensor: Tensor) -> int | None:
    """The address of the storage, which views share; `None` for tensors without a storage."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None
