"""A disposable copy of model, loss function and optimizer, and a recorded pass through it.

Model, loss function and optimizer are copied together, so that the copied optimizer updates the copied parameters. User
code that closes over the original model still reaches the original; the whole examination therefore also runs inside
`untouched`, which restores the originals.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from surefoot.core.nested import leaves
from surefoot.core.operations import RunningModules
from surefoot.doctor.function_calls import FunctionCalls, Recorded
from surefoot.doctor.probe_facts import ProbeRecorder
from surefoot.observe.tensors import TensorMeter, total_norm

if TYPE_CHECKING:
    from surefoot.doctor.loss_of_batch import Convention
    from surefoot.record.facts import SampledStep


@dataclass
class PassTrace:
    """One recorded pass."""

    recorded: Recorded
    outputs: Any = None
    loss: Tensor | None = None
    error: Exception | None = None
    """The exception that it raised, if any."""
    reached_loss: bool = False
    """Whether the model ran; an error then comes from the loss."""
    facts: SampledStep | None = None
    """The pass as a watched run would have recorded it."""
    first_nonfinite: str | None = None
    """The first module with a non-finite output."""

    @property
    def value(self) -> float:
        """The loss as a number; NaN if there is none."""
        return math.nan if self.loss is None else float(self.loss.detach())


class ModelCopy:
    """Copies of a model, its loss function and its optimizer."""

    def __init__(self, model: nn.Module, loss_fn: Any, optimizer: Any, convention: Convention | None) -> None:
        memo: dict[int, Any] = {}  # shared, so that the copied optimizer holds the copied parameters
        self.model, self.loss_fn, self.optimizer = copy.deepcopy((model, loss_fn, optimizer), memo)
        _copy_what_pickling_forgets(optimizer, self.optimizer, memo)
        self.convention = convention
        if not self.model.training:
            self.model.train()

    @property
    def parameters(self) -> list[Tensor]:
        """All trained tensors, of the model or only of the optimizer."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        known = dict.fromkeys([*self.model.parameters(), *(p for group in groups for p in group["params"])])
        return [parameter for parameter in known if parameter.requires_grad]

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        assert self.convention is not None
        outputs = self.convention.forward(self.model, batch)
        return scalar(self.convention.loss(self.loss_fn, outputs, batch))

    def step(self, batch: Any, before_backward: Callable[[Tensor], None] = lambda loss: None) -> float:
        """One training step; returns the loss before it."""
        if needs_closure(self.optimizer):
            return float(self.optimizer.step(lambda: self.backward(batch, before_backward)))
        loss = self.backward(batch, before_backward)
        self.optimizer.step()
        return float(loss.detach())

    def backward(self, batch: Any, before: Callable[[Tensor], None]) -> Tensor:
        """Clear the gradients and run the backward pass of a batch; returns its loss, which is passed to `before`
        first.
        """
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.loss(batch)
        before(loss)
        torch.autograd.backward(loss)
        return loss

    def gradient_norm(self) -> float:
        """Norm of all gradients together."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return float(total_norm(TensorMeter().measure(gradients).norm)) if gradients else 0.0

    def scale_rates(self, factor: float) -> None:
        """Multiply every learning rate. A rate that is being warmed up counts as its value after the warm-up."""
        self.set_rates([peak_rate(group) * factor for group in self.optimizer.param_groups])

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_rates(self, rates: list[float]) -> None:
        """Change the learning rate of each group."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def without_dropout(self) -> ModelCopy:
        """Turn dropout off, so that the loss can reach its minimum."""
        for module in self.model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
            elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                module.dropout = 0.0
        return self

    def look(self, batch: Any) -> PassTrace:
        """Run one recorded pass; an error is stored, not raised."""
        assert self.convention is not None
        recorded = Recorded()
        look = PassTrace(recorded)
        running = _watched(self.model, look)
        probe = ProbeRecorder(running)
        with running, probe, FunctionCalls(recorded, running):
            try:
                look.outputs = self.convention.forward(self.model, batch)
                look.reached_loss = True
                loss = self.convention.loss(self.loss_fn, look.outputs, batch)
                look.loss = scalar(loss)
            except Exception as error:
                look.error = error
        look.facts = probe.step(loss if look.loss is not None else None)
        return look


def _copy_what_pickling_forgets(original: Any, duplicate: Any, memo: dict[int, Any]) -> None:
    """Copy the remaining attributes: optimizers copy only groups and state, but L-BFGS and custom ones need the others.

    Callables are omitted: they are what a scheduler has wrapped around the original's `step`.
    """
    for name, value in vars(original).items() if original is not None else ():
        if not hasattr(duplicate, name) and not callable(value):
            setattr(duplicate, name, copy.deepcopy(value, memo))


def scalar(loss: Any) -> Tensor:
    """The loss as a scalar tensor with a graph; a tuple that starts with it is accepted."""
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if isinstance(loss, dict) and "loss" in loss:
        loss = loss["loss"]
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor; got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must be one number to call backward on; got shape {tuple(loss.shape)}. Take its mean, or drop "
            '`reduction="none"`'
        )
    return loss.reshape(())


def peak_rate(group: Mapping[str, Any]) -> float:
    """The learning rate of a group, or the one that a schedule is warming up to."""
    return max(float(group["lr"]), float(group.get("initial_lr", 0.0)))


def rms(tensor: Tensor) -> float:
    """Root mean square."""
    return float(tensor.detach().float().square().mean().sqrt()) if tensor.numel() else 0.0


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a module's input or output."""
    return next((tensor for tensor in leaves(value) if tensor.is_floating_point()), None)


def is_warming_up(optimizer: Any) -> bool:
    """Whether a schedule currently keeps a learning rate below its initial value."""
    return any(float(group["lr"]) < 0.99 * float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups)


def needs_closure(optimizer: Any) -> bool:
    """Whether an optimizer evaluates the loss itself."""
    return isinstance(optimizer, torch.optim.LBFGS)


def _watched(model: nn.Module, look: PassTrace) -> RunningModules:
    """Hooks that track the running module of a copy, and record the first one with a non-finite output."""

    def after(name: str, module: nn.Module, output: Any) -> None:
        found = first_tensor(output)
        if look.first_nonfinite is None and found is not None and not bool(found.isfinite().all()):
            look.first_nonfinite = name or type(model).__name__

    return RunningModules(model, lambda *_: None, after)
