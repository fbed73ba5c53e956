"""The step of an incident, rebuilt from what a function of the user returns.

The function is one that `surefoot doctor` accepts: it returns model, loader, loss function and optimizer. It may also
return the step itself, a function that takes a batch and returns its loss; or both, as a dict with `model` and `step`.
Autocast, loss scale, accumulation and weights are those of the record, so that the gradients are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.act.accumulate import AccumulationWindow
from surefoot.core.random_state import set_streams
from surefoot.core.save_restore import untouched
from surefoot.doctor.loss_of_batch import NoLoss, conventions, loss_taker, takes_model
from surefoot.doctor.model_copy import scalar
from surefoot.doctor.target import load_function, subject_of
from surefoot.errors import UsageError
from surefoot.keep.staging import map_tensors
from surefoot.observe.parameters import Layout, named_parameters
from surefoot.record.incidents.contents import Print, print_of
from surefoot.record.incidents.reading import StoredIncident, number
from surefoot.record.incidents.values import decode, tensors_in
from surefoot.replay.locate.names import Names
from surefoot.replay.state import put_in_place, set_modes
from surefoot.types import NamedParameter

if TYPE_CHECKING:
    from surefoot.record.incidents.contents import MicrobatchState
    from surefoot.record.incidents.summary import IncidentPrints

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
LossOfBatch = Callable[[Any], Tensor]


class TargetStep:
    """One step that can be run repeatedly."""

    def __init__(self, target: str, incident: StoredIncident) -> None:
        incident.check_replayable()
        self._incident, self._facts = incident, incident.facts
        self.models, self.optimizer, how, self.loader = _built(load_function(target), target)
        self.notes = self.put_back()
        set_modes(self.models, incident.state.get("modes", []))
        self.home = next(self.models[0].parameters()).device
        self.microbatches: list[MicrobatchState] = incident.state["window"]["microbatches"]
        self.accumulate = int(self._facts["configuration"].get("accumulate") or 1)
        if not self.microbatches:
            raise UsageError(
                f"the incident {incident.folder} contains no batch, so it cannot be replayed with --target"
            )
        self.loss_of: LossOfBatch = how if how is not None else _own_call()
        self._inputs: list[list[list[Print]]] = []
        self._losses: list[list[Tensor]] = []
        if isinstance(self.loss_of, _Guessed):
            self.loss_of = self.loss_of.settled(self.batch(self.microbatches[0]))

    def put_back(self) -> list[str]:
        """Load the captured state again; returns what could not be loaded."""
        return put_in_place(self._incident, self.models, self.optimizer)

    def run(self) -> Tensor:
        """Forward and backward of every microbatch, from the captured state; returns the last loss."""
        self._inputs, self._losses = [], []
        self.drop_gradients()
        window = AccumulationWindow(self.accumulate)
        loss = torch.zeros(())
        hooks = [model.register_forward_pre_hook(self._called, with_kwargs=True) for model in self.models]
        try:
            for microbatch in self.microbatches:
                loss = self._run_one(microbatch, window)
        finally:
            for hook in hooks:
                hook.remove()
        return loss

    def _run_one(self, microbatch: MicrobatchState, window: AccumulationWindow) -> Tensor:
        self._inputs.append([])
        batch = self.batch(microbatch)
        if microbatch["streams"] is not None:
            set_streams(microbatch["streams"])
        with self.autocast():
            loss = scalar(self.loss_of(batch))
        weight = next(iter(microbatch["weights"]), None)
        scaled = window.scaled(loss, weight)
        scale = self._facts["configuration"].get("loss_scale")
        if scale is not None:
            scaled = scaled * torch.full((), number(scale), device=scaled.device)
        scaled.backward()  # type: ignore[no-untyped-call]
        window.add(loss, weight)
        window.close()
        self._losses.append([loss.detach()])
        return loss

    def batch(self, microbatch: MicrobatchState) -> Any:
        """A captured batch, on the model's device."""
        if microbatch["drawn"]:
            return decode(microbatch["drawn"][-1], device=self.home)
        if microbatch["given"] is not None:
            return decode(microbatch["given"], device=self.home)
        if microbatch["calls"]:
            args, kwargs = decode(microbatch["calls"][0], device=self.home)
            return kwargs if kwargs and not args else args[0] if len(args) == 1 else args
        raise UsageError(
            f"the incident {self._incident.folder} contains no batch, so it cannot be replayed with --target"
        )

    def _called(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._inputs[-1].append([print_of(tensor) for tensor in tensors_in((args, kwargs))])

    def placed(self, batch: Any) -> Any:
        """A batch of the target's own loader on the model's device."""
        return map_tensors(batch, lambda tensor: tensor.to(self.home))

    def drop_gradients(self) -> None:
        """Set all gradients to `None`."""
        for parameter in self._parameters():
            parameter.grad = None

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the record."""
        dtype = _AUTOCAST.get(str(self._facts["configuration"].get("precision")))
        return nullcontext() if dtype is None else torch.autocast(self.home.type, dtype=dtype)

    def _parameters(self) -> list[Tensor]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        own = [p for model in self.models for p in model.parameters()]
        return list(dict.fromkeys([*own, *(p for group in groups for p in group["params"])]))

    # ---- what it left ---------------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by the names in the record."""
        if self.optimizer is not None:
            named = Layout(self.models, self.optimizer).parameters
        else:
            named = [NamedParameter(name, parameter) for name, parameter in named_parameters(self.models)]
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def prints(self) -> IncidentPrints:
        """Everything that is compared with the record."""
        return {
            "loss": None,
            "losses": [[{**print_of(loss), "value": float(loss)} for loss in losses] for losses in self._losses],
            "inputs": self._inputs,
            "gradients": {name: print_of(gradient) for name, gradient in self.gradients().items()},
        }


def _own_call() -> LossOfBatch:
    raise UsageError(
        "the target returns nothing to compute a loss from. Return model, loader, loss_fn, optimizer, or a step"
    )


def _built(function: Any, target: str) -> tuple[list[nn.Module], Any, Any, Any]:
    """Models, optimizer, the function from a batch to its loss, and batches."""
    returned = function()
    if isinstance(returned, Mapping) and callable(returned.get("step")):
        return _models_in(returned["model"]), returned.get("optimizer"), returned["step"], returned.get("loader", ())
    if callable(returned) and not isinstance(returned, nn.Module):
        names = Names(returned, None)
        if not names.modules:
            raise UsageError(
                f"{target!r} returned a step whose model cannot be found: return a dict with `model` and `step`"
            )
        return list(names.modules.values()), next(iter(names.optimizers), None), returned, ()
    if isinstance(returned, Mapping) and "loader" not in returned:
        returned = {**returned, "loader": ()}
    subject = subject_of(returned, target)
    model, loss_fn = subject["model"], subject.get("loss_fn")
    loss_of = subject.get("loss_of") or (loss_fn if loss_fn is not None and takes_model(loss_fn) else None)
    return _models_in(model), subject.get("optimizer"), _Guessed(model, loss_fn, loss_of), subject["loader"]


def _models_in(model: Any) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


class _Guessed:
    """How model and loss are called, determined with the captured batch."""

    def __init__(self, model: nn.Module, loss_fn: Any, loss_of: Any) -> None:
        self._model, self._loss_fn, self._loss_of = model, loss_fn, loss_of

    def settled(self, batch: Any) -> LossOfBatch:
        """The first convention that returns a loss with a graph."""
        if self._loss_of is not None:
            tried = [loss_taker(self._loss_of)]
        else:
            tried = list(conventions(batch, self._model, self._loss_fn))
        failure: Exception | None = None
        for way in tried:
            try:
                with untouched(self._model):
                    loss = scalar(way.loss(self._loss_fn, way.forward(self._model, batch), batch))
                if not loss.requires_grad:
                    raise NoLoss("the loss has no graph")
            except Exception as error:
                failure = failure or error
            else:
                return lambda given: way.loss(self._loss_fn, way.forward(self._model, given), given)
        words = " ".join(str(failure).split())[:200]
        raise UsageError(
            f"model and loss could not be called with the captured batch: {type(failure).__name__}: {words}. Return "
            "`loss_of=lambda model, batch: …` from the target, or a step"
        )
