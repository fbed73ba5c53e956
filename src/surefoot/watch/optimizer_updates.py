"""What an optimizer's step does: the gradients it is given, its own state, and how far each parameter moves.

Before a step a thin sample of each parameter is put aside; after it the two are compared. Large tensors are judged by a
sample, and only at the steps that are looked at. Whether an update is too large or too small is decided elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.observe.readable import is_readable, readable
from surefoot.watch.parameter_registry import weight_facts
from surefoot.watch.script_hooks import WithoutHooks, is_listening
from surefoot.watch.tensor_summary import sampled

if TYPE_CHECKING:
    from surefoot.watch.parameter_registry import Parameter, ParameterRegistry


class OptimizerUpdates:
    """The steps of one look."""

    def __init__(self, registry: ParameterRegistry) -> None:
        self.steps: list[dict[str, Any]] = []
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
                if not is_listening(tensor)
            ]
        self.steps.append(
            {"optimizer": number, "rows": rows, "lr": [float(g["lr"]) for g in optimizer.param_groups if "lr" in g]}
        )

    def _row(self, number: int, tensor: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        record = self._registry.add(tensor)
        record.optimizers.add(number)
        self.stepped.add(record.id)
        if not record.changed + record.unchanged:
            self._registry.see_again(record, tensor)
        row: dict[str, Any] = {"id": record.id, "grad": None}
        if tensor.grad is not None:
            row |= gradient_facts(tensor.grad)
            record.with_grad += 1
            # Of a sharded one only a part is seen here, which may be zero or empty.
            whole = tensor.grad.layout is torch.strided and is_readable(tensor.grad)
            record.zero_grad += whole and row["grad"] == 0.0
        values = thin(tensor)
        if values is not None and values.numel():
            self._before[record.id] = values.clone()
            row["weight"] = float(torch.linalg.vector_norm(values.float()))
        return row | moment_facts(state, group)

    def after_step(self, number: int) -> None:
        """What the step did to each parameter."""
        held = next((step for step in reversed(self.steps) if step["optimizer"] == number), None)
        if held is None:
            return
        with WithoutHooks():
            for row in held["rows"]:
                record = self._registry.parameters[row["id"]]
                tensor, old = record.tensor(), self._before.pop(record.id, None)
                if tensor is None or old is None:
                    continue
                new = thin(tensor)
                if new is None or new.shape != old.shape:
                    continue
                delta = (new - old).float()
                norm = float(torch.linalg.vector_norm(old.float()))
                row["update"] = float(torch.linalg.vector_norm(delta))
                row["ratio"] = row["update"] / norm if norm else None
                row["stuck"] = float((new == old).float().mean()) if old.numel() else 1.0
                if row["update"] == 0:
                    record.unchanged += is_readable(tensor)
                else:
                    record.changed += 1
                    record.trained_by.add(number)
                record.last = weight_facts(tensor)

    def drop_step(self, number: int) -> None:
        """The step was left out: that nothing moved says nothing about the parameters."""
        held = next((step for step in reversed(self.steps) if step["optimizer"] == number), None)
        if held is not None:
            self.steps.remove(held)

    def forget(self) -> None:
        """Let go of the samples."""
        self._before = {}


def gradient_facts(grad: Tensor) -> dict[str, Any]:
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


def moment_facts(state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
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
    """Whether a parameter that no optimizer should have changed did change since the last look."""
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
