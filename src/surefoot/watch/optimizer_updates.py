"""The effect of an optimizer's step: the gradients, the optimizer's state, and the change of each parameter.

Before a step, a small sample of each parameter is copied; after it, the two are compared. Large tensors are judged by a
sample, and only at sampled steps. Whether an update is too large or too small is decided elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from surefoot.core.without_hooks import WithoutHooks, intercepts_operations
from surefoot.observe.parameters import learning_rate
from surefoot.observe.readable import is_readable, readable
from surefoot.observe.tensors import TensorMeter
from surefoot.record.facts import OptimizerUpdate, ParameterUpdate, PathSlopes
from surefoot.watch.deferred import Count, later, number, numbers, own, reads_at_once
from surefoot.watch.parameter_registry import PassedPoint, weight_facts
from surefoot.watch.tensor_summary import COMPUTED, norms, real, sampled

if TYPE_CHECKING:
    from surefoot.watch.parameter_registry import Parameter, ParameterRegistry


SAMPLE_SIZE = 65_536
"""The number of values of a parameter that are compared."""
PATH_SIZE = 4_096
"""The number of values of a parameter that are kept from one sampled step to the next."""
MOST_MOVES = 16
"""The number of changes measured for a parameter without an optimizer."""
_STACKED = 1 << 22
"""The number of moments sorted at a time."""


class OptimizerUpdates:
    """The optimizer steps within one sampled step: several, if several optimizers alternate."""

    def __init__(self, registry: ParameterRegistry, step: int = 0) -> None:
        self._step = step
        self.steps: list[OptimizerUpdate] = []
        self.stepped: set[int] = set()
        """The numbers of the parameters that an optimizer held."""
        self._registry = registry
        self._before: dict[int, Tensor] = {}
        self._left: tuple[int, Tensor] | None = None
        """A parameter, and its gradient as the last of several backward calls left it."""

    def after_backward(self, reached: list[int]) -> None:
        """Keep the gradient of one of the parameters that `backward` has reached."""
        self._left = None
        tensors = [(number, self._registry.parameters[number].tensor()) for number in reached]
        grads = [(number, tensor.grad) for number, tensor in tensors if tensor is not None and tensor.dim() > 1]
        with WithoutHooks():
            for number, grad in grads:
                values = thin(grad, PATH_SIZE) if grad is not None and grad.layout is torch.strided else None
                if values is not None and values.numel():
                    self._left = number, values.float().clone()
                    return

    def _as_left(self, held: list[_Held]) -> float | None:
        """The cosine between the kept gradient and the one that the step uses."""
        left, self._left = self._left, None
        grad = None if left is None else next((h.tensor.grad for h in held if h.record.id == left[0]), None)
        values = thin(grad, PATH_SIZE) if grad is not None and grad.layout is torch.strided else None
        if left is None or values is None or values.shape != left[1].shape or values.device != left[1].device:
            return None
        cosine: float = number(torch.cosine_similarity(values.float(), left[1], dim=0))
        return cosine

    def before_step(self, turn: int, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients that the optimizer will use, and a sample of each parameter."""
        with WithoutHooks():
            held = [
                _Held(self._registry.add(tensor), tensor, group, optimizer.state.get(tensor, {}))
                for group in optimizer.param_groups
                for tensor in group["params"]
                if not intercepts_operations(tensor)
            ]
            self._registry.measure_again([(each.record, each.tensor) for each in held if not each.record.is_compared])
            gradients = gradient_facts([each.tensor.grad for each in held])
            for each, gradient in zip(held, gradients, strict=True):
                each.record.optimizers.add(turn)
                self.stepped.add(each.record.id)
                _count_gradient(each.record, each.tensor.grad, gradient)
            weights = self._keep_samples(held)
            moments = moment_facts([(each.state, each.group) for each in held])
            rows = [
                ParameterUpdate(parameter=each.record.id, **gradient, weight=weights.get(each.record.id), **moment)
                for each, gradient, moment in zip(held, gradients, moments, strict=True)
            ]
            found = [rate for group in optimizer.param_groups if (rate := learning_rate(group)) is not None]
            rates = [number(own(rate)) if isinstance(rate, Tensor) else rate for rate in found]
            path, as_left = _path(held, self._step), self._as_left(held)
        self.steps.append(OptimizerUpdate(optimizer=turn, rows=rows, lr=rates, path=path, as_left=as_left))

    def _keep_samples(self, held: list[_Held]) -> dict[int, float]:
        """Copy a sample of each parameter; returns their norms, by the number of the parameter."""
        samples = {each.record.id: thin(each.tensor) for each in held}
        kept = {number: values.clone() for number, values in samples.items() if values is not None and values.numel()}
        self._before |= kept
        return dict(zip(kept, norms(list(kept.values())), strict=True))

    def after_step(self, number: int) -> None:
        """Record the change of each parameter."""
        held = self._last_step(number)
        if held is not None:
            with WithoutHooks():
                self._compare(held, number)

    def _compare(self, held: OptimizerUpdate, number: int) -> None:
        pairs: list[tuple[int, Parameter, Tensor]] = []
        moved: list[Tensor] = []
        for place, row in enumerate(held.rows):
            record = self._registry.parameters[row.parameter]
            tensor, old = record.tensor(), self._before.pop(record.id, None)
            new = thin(tensor) if tensor is not None and old is not None else None
            if tensor is not None and old is not None and new is not None and new.shape == old.shape:
                pairs.append((place, record, tensor))
                moved.append(new - old)
        scales = weight_facts([tensor for _, _, tensor in pairs])
        updates, changes = norms(moved), norms(moved, 0)
        for (place, record, tensor), update, changed, size, scale in zip(
            pairs, updates, changes, map(len, moved), scales, strict=True
        ):
            _count_update(record, update, number, is_readable(tensor))
            record.last = scale
            held.rows[place] = replace(
                held.rows[place],
                update=update,
                ratio=later(_ratio, update, held.rows[place].weight),
                stuck=later(_rest, changed, size),
            )

    def _last_step(self, number: int) -> OptimizerUpdate | None:
        return next((step for step in reversed(self.steps) if step.optimizer == number), None)

    def drop_step(self, number: int) -> None:
        """Drop a skipped step: its unchanged parameters are not evidence of anything."""
        held = self._last_step(number)
        if held is not None:
            self.steps = [step for step in self.steps if step is not held]

    def forget(self) -> None:
        """Drop the samples."""
        self._before, self._left = {}, None


class _GradientFacts(TypedDict, total=False):
    grad: float
    zeros: float
    nonfinite: int
    largest: float


class _MomentFacts(TypedDict, total=False):
    root_second_moment: float
    second_moment: float
    age: float


class _Held(NamedTuple):
    """A parameter of the optimizer that is stepping."""

    record: Parameter
    tensor: Tensor
    group: dict[str, Any]
    state: dict[str, Any]


def _path(held: list[_Held], step: int) -> PathSlopes | None:
    """The slope of the loss at both ends of the way from the last sampled step of these parameters to this one.

    The gradients here are kept for the next one. The batches of the two ends differ, so that their noise is not in
    the product of one's gradient and the way, except for the part that the first of the steps contributed.
    """
    products: dict[torch.device, list[Tensor]] = {}
    since: set[int] = set()
    for each in held:
        grad = each.tensor.grad
        values = thin(each.tensor, PATH_SIZE)
        slope = thin(grad, PATH_SIZE) if grad is not None and grad.layout is torch.strided else None
        before, each.record.passed = each.record.passed, None
        if values is None or slope is None or slope.shape != values.shape or slope.device != values.device:
            continue
        now = each.record.passed = PassedPoint(step, values.float().clone(), slope.float().clone())
        if before is None or before.values.shape != now.values.shape or before.values.device != now.values.device:
            continue
        if len(now.values):
            since.add(before.step)
            moved = now.values - before.values
            pairs = (before.gradient, moved), (now.gradient, moved), (moved, moved)
            found = torch.stack([torch.dot(*pair) for pair in pairs]) * (each.tensor.numel() / len(moved))
            products.setdefault(moved.device, []).append(found)
    if len(since) != 1 or len(products) != 1:
        return None  # the first sampled step, parameters that were not all sampled together, or several devices
    start, end, squares = numbers(torch.stack(next(iter(products.values()))).sum(0))
    return PathSlopes(since=since.pop(), start=start, end=end, length=later(math.sqrt, squares))


def _count_gradient(record: Parameter, grad: Tensor | None, facts: _GradientFacts) -> None:
    if grad is None:
        return
    record.with_grad += 1
    # Only a part of a sharded gradient is in this process. It may be zero or empty.
    if grad.layout is torch.strided and is_readable(grad) and "grad" in facts:
        record.zero_grad.add(later(_is_zero, facts["grad"]))


def _count_update(record: Parameter, update: float, number: int, is_whole: bool) -> None:
    """`is_whole`: the whole parameter is in this process."""
    is_changed = later(bool, update)
    record.is_compared |= is_whole or is_changed is not False
    record.changed.add(is_changed)
    record.trained_by.setdefault(number, Count()).add(is_changed)
    if is_whole:
        record.unchanged.add(later(_is_zero, update))


def _is_zero(value: float) -> bool:
    return value == 0


def _ratio(update: float, norm: float | None) -> float | None:
    return update / norm if norm else None


def _rest(part: float, size: int) -> float:
    """The share that remains."""
    return (size - part) / size if size else 1.0


def gradient_facts(grads: list[Tensor | None]) -> list[_GradientFacts]:
    """Norm, zeros and largest entry of each gradient. For sparse gradients only the norm is known, for sharded ones the
    numbers of the local part.
    """
    found: list[_GradientFacts] = [{} for _ in grads]
    dense: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for place, grad in enumerate(grads):
        local = readable(grad) if grad is not None else None
        if grad is None or local is None or (local.numel() == 0 and grad.numel()):
            continue
        if local.layout is not torch.strided:
            found[place] = {"grad": number(torch.linalg.vector_norm(local.coalesce().values().float()))}
        else:
            dense.setdefault(local.device, []).append((place, real(local.detach())))
    for held in dense.values():
        measure = _read_gradients if reads_at_once(held[0][1]) else _measure_gradients
        for (place, _), facts in zip(held, measure([local for _, local in held]), strict=True):
            found[place] = facts
    return found


def _read_gradients(grads: list[Tensor]) -> list[_GradientFacts]:
    """Measure gradients on the CPU, from a sample of each."""
    samples = [sampled(grad) for grad in grads]
    return [
        {
            "grad": norm * math.sqrt(grad.numel() / max(1, some.numel())),
            "zeros": _rest(float(torch.count_nonzero(some)), some.numel()) if some.numel() else 0.0,
            "nonfinite": 0 if math.isfinite(norm) else int((~torch.isfinite(some.float())).sum()),
            "largest": _largest(some),
        }
        for grad, some, norm in zip(grads, samples, norms(samples), strict=True)
    ]


def _largest(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return abs(float(torch.maximum(-low, high)))


def _measure_gradients(grads: list[Tensor]) -> list[_GradientFacts]:
    """Measure gradients on one device: one pass over all of them, and a sample of each to count zeros."""
    norm, largest, nonfinite = TensorMeter().measure(grads).columns()
    samples = [sampled(grad, SAMPLE_SIZE) for grad in grads]
    columns = [numbers(norm), norms(samples, 0), numbers(nonfinite), numbers(largest)]
    return [
        {
            "grad": size,
            "zeros": later(_rest, kept, some.numel()) if some.numel() else 0.0,
            "nonfinite": later(int, broken),
            "largest": later(_unless_broken, most, broken),
        }
        for some, size, kept, broken, most in zip(samples, *columns, strict=True)
    ]


def _unless_broken(largest: float, broken: float) -> float:
    return math.nan if broken else largest


def moment_facts(states: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[_MomentFacts]:
    """The second moment of each parameter in an adaptive optimizer, and the number of steps that it covers.

    Args:
        states: The state of each parameter, and its parameter group.
    """
    found: list[_MomentFacts] = [{} for _ in states]
    seconds: dict[int, Tensor] = {}
    for place, (state, _) in enumerate(states):
        second = next((state[key] for key in ("exp_avg_sq", "square_avg", "sum") if key in state), None)
        values = thin(second) if isinstance(second, Tensor) else None
        if values is None or not values.numel():
            continue
        seconds[place] = values
    middles = _middle_and_mean(seconds)
    ages = _ages({place: states[place][0].get("step", 1) for place in seconds})
    for place, (middle, mean) in middles.items():
        group = states[place][1]
        beta = float(group["betas"][1]) if "betas" in group else None
        found[place] = {
            "root_second_moment": later(_unbiased, middle, ages[place], beta),
            "second_moment": mean,
            "age": ages[place],
        }
    return found


def _middle_and_mean(samples: dict[int, Tensor]) -> dict[int, tuple[float, float]]:
    """The median root of each sample, and the root of its mean. Samples of the same kind are stacked."""
    kinds: dict[Any, list[int]] = {}
    for place, values in samples.items():
        kinds.setdefault((values.device, values.dtype, len(values)), []).append(place)
    found: dict[int, tuple[float, float]] = {}
    for (_, _, size), places in kinds.items():
        at_once = max(1, _STACKED // size)
        for start in range(0, len(places), at_once):
            members = places[start : start + at_once]
            rows = torch.stack([samples[place] for place in members]).float()
            means = numbers(rows.mean(1).sqrt())
            middles = numbers(_medians(rows.sqrt_()))
            found |= dict(zip(members, zip(middles, means, strict=True), strict=True))
    return found


def _medians(rows: Tensor) -> Tensor:
    """The lower median of each row. In deterministic mode, torch supports `median(1)` only on the CPU."""
    if reads_at_once(rows):
        return rows.median(1).values
    ordered = rows.sort(1).values  # NaN is last
    return torch.where(ordered[:, -1].isnan(), math.nan, ordered[:, (rows.shape[1] - 1) // 2])


def _ages(steps: dict[int, Any]) -> dict[int, float]:
    """The number of steps that each state covers. The counters of fused optimizers are on the device."""
    found: dict[int, float] = {}
    away: dict[torch.device, list[int]] = {}
    for place, step in steps.items():
        if isinstance(step, Tensor) and not reads_at_once(step):
            away.setdefault(step.device, []).append(place)
        else:
            found[place] = float(step) or 1.0
    for places in away.values():
        counts = numbers(torch.stack([steps[place].detach().reshape(()).float() for place in places]))
        found |= {place: later(_at_least_one, age) for place, age in zip(places, counts, strict=True)}
    return found


def _at_least_one(age: float) -> float:
    return age or 1.0


def _unbiased(root: float, age: float, beta: float | None) -> float:
    scale = 1 - beta**age if beta is not None else 1.0
    return root / math.sqrt(scale or 1)


def note_if_moved(record: Parameter) -> None:
    """Record whether a parameter without an optimizer has changed since the last sampled step."""
    tensor = record.tensor()
    if tensor is None:
        return
    sample = thin(tensor)
    if sample is None:
        return
    if record.sample is not None and record.sample.shape == sample.shape and record.sample.device == sample.device:
        record.moved_alone.add(number((record.sample != sample).any()))
        if len(record.moves) < MOST_MOVES:
            change = sample.float() - record.sample.float()
            before, moved = torch.linalg.vector_norm(record.sample.float()), torch.linalg.vector_norm(change)
            record.moves.append(number(moved / before.clamp_min(torch.finfo(torch.float32).tiny)))
            if record.gradient is not None and record.gradient.shape == change.shape:
                record.along.append(number(torch.cosine_similarity(change, record.gradient, dim=0)))
    record.sample, record.gradient = sample.clone(), None


def keep_gradient(record: Parameter) -> None:
    """Keep the gradient of the values that `note_if_moved` compares next."""
    tensor = record.tensor()
    gradient = None if tensor is None or tensor.grad is None else thin(tensor.grad)
    record.gradient = None if gradient is None else gradient.float().clone()


def thin(tensor: Tensor, most: int = SAMPLE_SIZE) -> Tensor | None:
    """The flattened local values, thinned evenly to at most `most`; `None` if they cannot be read."""
    local = readable(tensor)
    if local is None:
        return None
    dense = local.detach() if local.layout is torch.strided else local.detach().to_dense()
    values = sampled(real(dense), most)
    return values if values.dtype in COMPUTED else values.float()
