"""The content of an incident: the parts of its state as plain trees, and the fingerprints to compare a replay with."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from surefoot.core.without_hooks import WithoutHooks
from surefoot.keep.checkpoint.tree import local_part
from surefoot.observe.readable import has_other_ranks, is_readable, readable
from surefoot.record.incidents.values import Encoded, encode

if TYPE_CHECKING:
    from torch import nn

    from surefoot.core.random_state import RandomStreams
    from surefoot.core.redaction import Redactor
    from surefoot.record.incidents.step_capture import Microbatch, Window
    from surefoot.record.incidents.summary import IncidentPrints


class Print(TypedDict, total=False):
    """The fingerprint of one tensor, to compare two runs of one step bit for bit.

    All NaNs count as equal: their sign and payload have no meaning, and processors do not define them.
    """

    sha256: str
    """The hash of its bytes, dtype and shape."""
    dtype: str
    shape: list[int]
    norm: float
    nonfinite: int
    """The number of non-finite values."""
    value: float | str | None
    """The value of a loss."""


@torch.no_grad()
def print_of(tensor: Tensor) -> Print:
    """The fingerprint of one tensor, with its norm and its number of non-finite values. Waits for the device."""
    values = plain_values(tensor)
    found: Print = {
        "sha256": _digest(values),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if values.is_floating_point() or values.is_complex():
        finite = values.isfinite()
        bad = values.numel() - int(finite.sum())
        kept = values if not bad else values[finite]
        wide = kept.to(torch.complex128 if values.is_complex() else torch.float64)
        found |= {"norm": float(torch.linalg.vector_norm(wide)) if wide.numel() else 0.0, "nonfinite": bad}
    return found


def plain_values(tensor: Tensor) -> Tensor:
    """The values on the host, as one dense block; for a DTensor, this process's shard."""
    tensor = local_part(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _digest(values: Tensor) -> str:
    digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}\n".encode())
    if values.is_floating_point() and values.element_size() > 1 and bool(values.isnan().any()):
        values = torch.where(values.isnan(), torch.full_like(values, math.nan), values)
    if values.numel():
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ModelModes(TypedDict):
    """Names of modules that are not in training mode."""

    eval: list[str]
    frozen: list[str]


class ModelParts(TypedDict):
    """The parts of an incident's state that describe the models, one entry for each."""

    models: list[Mapping[str, Any]]
    buffers: list[dict[str, Tensor]]
    modes: list[ModelModes]


class MicrobatchState(TypedDict):
    """Batches and random streams of one microbatch."""

    streams: RandomStreams | None
    drawn: list[Encoded]
    given: Encoded | None
    calls: list[Encoded]
    weights: list[float | None]


class WindowState(TypedDict):
    """Batches and random streams of one step."""

    start: RandomStreams | None
    microbatches: list[MicrobatchState]


def model_parts(models: Sequence[nn.Module]) -> ModelParts:
    """The current weights and buffers, and the modules and parameters that are not in training mode."""
    return {
        "models": [_state(model) for model in models],
        "buffers": [_other_buffers(model) for model in models],
        "modes": [
            {
                "eval": [name for name, module in model.named_modules() if not module.training],
                "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
            }
            for model in models
        ],
    }


def _state(model: nn.Module) -> Mapping[str, Any]:
    """The result of `state_dict`, without its hooks if there are several ranks: those of FSDP are collectives."""
    if not has_other_ranks():
        return model.state_dict()
    found: dict[str, Tensor] = {}
    with WithoutHooks():
        for path, part in model.named_modules(remove_duplicate=False):
            kept = {name: each for name, each in part._buffers.items() if name not in part._non_persistent_buffers_set}
            for name, tensor in {**part._parameters, **kept}.items():
                if tensor is not None and (local := readable(tensor)) is not None:
                    found[f"{path}.{name}" if path else name] = local.detach()
    return found


def _other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that `state_dict` omits, but that a forward reads."""
    known = _state(model)
    return {name: buffer for name, buffer in model.named_buffers() if name not in known}


def window_part(window: Window, redact: Redactor, left_out: list[str]) -> WindowState:
    """Batches and random streams of one step, microbatch by microbatch."""
    return {
        "start": None if window.start is None else window.start.full(),
        "microbatches": [_microbatch(each, redact, left_out) for each in window.microbatches],
    }


def _microbatch(each: Microbatch, redact: Redactor, left_out: list[str]) -> MicrobatchState:
    known = bool(each.drawn) or each.given is not None
    return {
        "streams": None if each.streams is None else each.streams.full(),
        "drawn": [encode(seen.value, redact, left_out) for seen in each.drawn],
        "given": None if each.given is None else encode(each.given.value, redact, left_out),
        "calls": [] if known else [encode(call, redact, left_out, "inputs") for call in each.calls],
        "weights": [None if w is None else float(w() if callable(w) else w) for w in each.weights],
    }


def prints_of(
    window: Window | None, loss: float | None, gradients: Mapping[str, Tensor] | None, norms: Mapping[str, Any]
) -> IncidentPrints:
    """The values that a replay is compared with. If the gradients no longer exist, these are their norms."""
    microbatches = [] if window is None else window.microbatches
    return {
        "loss": loss,
        "losses": [[{**print_of(each), "value": float(each)} for each in one.losses] for one in microbatches],
        "inputs": [
            [[print_of(tensor) for tensor in call.tensors if is_readable(tensor)] for call in one.calls]
            for one in microbatches
        ],
        "gradients": dict(norms)
        if gradients is None
        else {name: print_of(gradient) for name, gradient in gradients.items()},
    }


def faults_of(window: Window | None) -> list[str]:
    """The reasons why a replay cannot be exact, as far as the recording shows."""
    if window is None or not window.microbatches:
        return ["nothing was recorded for the step: its batch and its random numbers are not known"]
    found = []
    if not window.drew:
        inputs = any(each.calls for each in window.microbatches)
        found.append(
            "no batch was seen, because the data did not come from a DataLoader or from stabilizer.resume. The inputs "
            "of the model " + ("are included, its targets may not be" if inputs else "are not known either")
        )
    if any(seen.changed for each in window.microbatches for seen in _seen(each)):
        found.append("the batch was changed in place after it was drawn; it was captured as it was at the end")
    often = max(each.evaluations for each in window.microbatches)
    if often > 1:
        found.append(
            f"the optimizer evaluated its closure {often} times: batch and random numbers are those of the first time"
        )
    dropped = sum(each.dropped for each in window.microbatches)
    if dropped:
        found.append(f"the batches of the first {dropped} microbatches are missing: they are too large to be kept")
    if window.began_before:
        found.append("the step began before a restart: its first microbatches are missing")
    if window.interrupted:
        found.append("another optimizer stepped between the first forward pass of the step and its end")
    if window.microbatches[0].streams is None and window.start is None:
        found.append("the positions of the random streams are not known")
    return found


def _seen(each: Microbatch) -> list[Any]:
    return each.drawn + ([] if each.given is None else [each.given])
