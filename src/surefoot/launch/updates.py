"""What an optimizer's step does: the gradients it is given, its own state, and how far each parameter moves.

Before a step a thin sample of each parameter is put aside; after it the two are compared. Large tensors are judged by a
sample, and only at the steps that are looked at. Whether an update is too large or too small is decided elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.launch.book import weight_facts
from surefoot.launch.calm import Unnoticed, is_listening
from surefoot.launch.describe import sampled

if TYPE_CHECKING:
    from surefoot.launch.book import Book, Parameter


class Updates:
    """The steps of one look."""

    def __init__(self, book: Book) -> None:
        self.steps: list[dict[str, Any]] = []
        self.stepped: set[int] = set()
        """The numbers of the parameters that an optimizer held."""
        self._book = book
        self._before: dict[int, Tensor] = {}

    def before_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Gradients as the optimizer will see them, and a sample of each parameter to compare with."""
        with Unnoticed():
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
        record = self._book.add(tensor)
        record.optimizers.add(number)
        self.stepped.add(record.id)
        if not record.changed + record.unchanged:
            self._book.see_again(record, tensor)
        row: dict[str, Any] = {"id": record.id, "grad": None}
        if tensor.grad is not None:
            row |= gradient_facts(tensor.grad)
            record.with_grad += 1
            record.zero_grad += tensor.grad.layout is torch.strided and row["grad"] == 0.0
        self._before[record.id] = thin(tensor).clone()
        row["weight"] = float(torch.linalg.vector_norm(thin(tensor).float()))
        return row | moment_facts(state, group)

    def after_step(self, number: int) -> None:
        """What the step did to each parameter."""
        held = next((step for step in reversed(self.steps) if step["optimizer"] == number), None)
        if held is None:
            return
        with Unnoticed():
            for row in held["rows"]:
                record = self._book.parameters[row["id"]]
                tensor, old = record.tensor(), self._before.pop(record.id, None)
                if tensor is None or old is None:
                    continue
                new = thin(tensor)
                delta = (new - old).float()
                norm = float(torch.linalg.vector_norm(old.float()))
                row["update"] = float(torch.linalg.vector_norm(delta))
                row["ratio"] = row["update"] / norm if norm else None
                row["stuck"] = float((new == old).float().mean()) if old.numel() else 1.0
                if row["update"] == 0:
                    record.unchanged += 1
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
    """Norm, zeros and largest entry of a gradient; of a sparse one the norm."""
    if grad.layout is not torch.strided:
        return {"grad": float(torch.linalg.vector_norm(grad.coalesce().values().float()))}
    some = sampled(grad)
    values = some.float()
    return {
        "grad": float(torch.linalg.vector_norm(values)) * math.sqrt(grad.numel() / max(1, values.numel())),
        "zeros": float((some == 0).float().mean()) if some.numel() else 0.0,
        "nonfinite": int((~torch.isfinite(values)).sum()),
        "largest": float(values.abs().max()) if values.numel() else 0.0,
    }


def moment_facts(state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The second moment an adaptive optimizer keeps, and how many steps it has gathered."""
    second = next((state[key] for key in ("exp_avg_sq", "square_avg", "sum") if key in state), None)
    if not isinstance(second, Tensor) or not second.numel():
        return {}
    steps = float(state.get("step", 1)) or 1.0
    scale = 1 - float(group["betas"][1]) ** steps if "betas" in group else 1.0
    return {
        "root_second_moment": float(thin(second).float().sqrt().median()) / math.sqrt(scale or 1),
        "second_moment": float(thin(second).float().mean().sqrt()),
        "age": steps,
        "moment_norm": float(torch.linalg.vector_norm(thin(state["exp_avg"]).float())) if "exp_avg" in state else None,
    }


def note_if_moved(record: Parameter) -> None:
    """Whether a parameter that no optimizer should have changed did change since the last look."""
    tensor = record.tensor()
    if tensor is None:
        return
    sample = thin(tensor)
    if record.sample is not None and record.sample.shape == sample.shape:
        record.moved_alone += not torch.equal(record.sample, sample)
    record.sample = sample.clone()


def thin(tensor: Tensor) -> Tensor:
    """The flattened values, thinned evenly to at most 65,536."""
    flat = tensor.detach().reshape(-1) if tensor.layout is torch.strided else tensor.detach().to_dense().reshape(-1)
    return flat[:: math.ceil(flat.numel() / 65_536)] if flat.numel() > 65_536 else flat
