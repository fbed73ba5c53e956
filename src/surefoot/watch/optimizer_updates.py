"""What an optimizer's step does: the gradients it is given, its own state, and how far each parameter moves.

Before a step a thin sample of each parameter is put aside; after it the two are compared. Large tensors are judged by a
sample, and only at the steps that are looked at. Whether an update is too large or too small is decided elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from surefoot.observe.parameters import learning_rate
from surefoot.observe.readable import is_readable, readable
from surefoot.record.facts import OptimizerUpdate, ParameterUpdate
from surefoot.watch.parameter_registry import weight_facts
from surefoot.watch.script_hooks import WithoutHooks, intercepts_operations
from surefoot.watch.tensor_summary import sampled

if TYPE_CHECKING:
    from surefoot.watch.parameter_registry import Parameter, ParameterRegistry


class OptimizerUpdates:
    """The steps of one sampled step: several, if several optimizers take turns."""

    def __init__(self, registry: ParameterRegistry) -> None:
        self.steps: list[OptimizerUpdate] = []
        self.stepped: set[int] = set()
        """The numbers of the parameters that an optimizer held."""
        self._registry = registry
        self._before: dict[int, Tensor] = {}

    def before_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Gradients as the optimizer will see them, and a sample of each parameter to compare with."""
        with WithoutHooks():
            rows = [
                self._row(number, tensor, group, optimizer.state.get(tensor, {}))
                for group in optimizer.param_groups
                for tensor in group["params"]
                if not intercepts_operations(tensor)
            ]
        rates = [float(rate) for group in optimizer.param_groups if (rate := learning_rate(group)) is not None]
        self.steps.append(OptimizerUpdate(optimizer=number, rows=rows, lr=rates))

    def _row(self, number: int, tensor: Tensor, group: dict[str, Any], state: dict[str, Any]) -> ParameterUpdate:
        record = self._registry.add(tensor)
        record.optimizers.add(number)
        self.stepped.add(record.id)
        if not record.changed + record.unchanged:
            self._registry.see_again(record, tensor)
        gradient = gradient_facts(tensor.grad) if tensor.grad is not None else _GradientFacts()
        if tensor.grad is not None:
            record.with_grad += 1
            # Of a sharded one only a part is seen here, which may be zero or empty.
            whole = tensor.grad.layout is torch.strided and is_readable(tensor.grad)
            record.zero_grad += whole and gradient.get("grad") == 0.0
        values = thin(tensor)
        weight = None
        if values is not None and values.numel():
            self._before[record.id] = values.clone()
            weight = float(torch.linalg.vector_norm(values.float()))
        return ParameterUpdate(parameter=record.id, **gradient, weight=weight, **moment_facts(state, group))

    def after_step(self, number: int) -> None:
        """What the step did to each parameter."""
        held = self._last_step(number)
        if held is not None:
            with WithoutHooks():
                held.rows[:] = [self._with_update(row, number) for row in held.rows]

    def _last_step(self, number: int) -> OptimizerUpdate | None:
        return next((step for step in reversed(self.steps) if step.optimizer == number), None)

    def _with_update(self, row: ParameterUpdate, number: int) -> ParameterUpdate:
        record = self._registry.parameters[row.parameter]
        tensor, old = record.tensor(), self._before.pop(record.id, None)
        if tensor is None or old is None:
            return row
        new = thin(tensor)
        if new is None or new.shape != old.shape:
            return row
        norm = float(torch.linalg.vector_norm(old.float()))
        update = float(torch.linalg.vector_norm((new - old).float()))
        if update == 0:
            record.unchanged += is_readable(tensor)
        else:
            record.changed += 1
            record.trained_by.add(number)
        record.last = weight_facts(tensor)
        return replace(
            row,
            update=update,
            ratio=update / norm if norm else None,
            stuck=float((new == old).float().mean()) if old.numel() else 1.0,
        )

    def drop_step(self, number: int) -> None:
        """The step was skipped: that no parameter changed is no evidence."""
        held = self._last_step(number)
        if held is not None:
            self.steps = [step for step in self.steps if step is not held]

    def forget(self) -> None:
        """Let go of the samples."""
        self._before = {}


class _GradientFacts(TypedDict, total=False):
    grad: float
    zeros: float
    nonfinite: int
    largest: float


class _MomentFacts(TypedDict, total=False):
    root_second_moment: float
    second_moment: float
    age: float
    moment_norm: float | None


def gradient_facts(grad: Tensor) -> _GradientFacts:
    """Norm, zeros and largest entry of a gradient; of a sparse one the norm; of a sharded one, of its part here."""
    local = readable(grad)
    if local is None or (local.numel() == 0 and grad.numel()):
        return {}
    if local.layout is not torch.strided:
        return {"grad": float(torch.linalg.vector_norm(local.coalesce().values().float()))}
    some = sampled(local)
    values = some.float()
    return {
        "grad": float(torch.linalg.vector_norm(values)) * math.sqrt(local.numel() / max(1, values.numel())),
        "zeros": float((some == 0).float().mean()) if some.numel() else 0.0,
        "nonfinite": int((~torch.isfinite(values)).sum()),
        "largest": float(values.abs().max()) if values.numel() else 0.0,
    }


def moment_facts(state: dict[str, Any], group: dict[str, Any]) -> _MomentFacts:
    """The second moment an adaptive optimizer keeps, and how many steps it has gathered."""
    second = next((state[key] for key in ("exp_avg_sq", "square_avg", "sum") if key in state), None)
    values = thin(second) if isinstance(second, Tensor) else None
    if values is None or not values.numel():
        return {}
    first = thin(state["exp_avg"]) if "exp_avg" in state else None
    steps = float(state.get("step", 1)) or 1.0
    scale = 1 - float(group["betas"][1]) ** steps if "betas" in group else 1.0
    return {
        "root_second_moment": float(values.float().sqrt().median()) / math.sqrt(scale or 1),
        "second_moment": float(values.float().mean().sqrt()),
        "age": steps,
        "moment_norm": float(torch.linalg.vector_norm(first.float())) if first is not None else None,
    }


def note_if_moved(record: Parameter) -> None:
    """Whether a parameter that no optimizer should have changed has changed since the last sampled step."""
    tensor = record.tensor()
    if tensor is None:
        return
    sample = thin(tensor)
    if sample is None:
        return
    if record.sample is not None and record.sample.shape == sample.shape:
        record.moved_alone += not torch.equal(record.sample, sample)
    record.sample = sample.clone()


def thin(tensor: Tensor) -> Tensor | None:
    """The flattened values in this process, thinned evenly to at most 65,536; `None` if they cannot be read."""
    local = readable(tensor)
    if local is None:
        return None
    flat = local.detach().reshape(-1) if local.layout is torch.strided else local.detach().to_dense().reshape(-1)
    return flat[:: math.ceil(flat.numel() / 65_536)] if flat.numel() > 65_536 else flat
