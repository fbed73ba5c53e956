"""How to compute a loss from a batch: which part is the model's input, which is the target, which function is the loss.

Training loops differ, so the common conventions are tried, the most common first, and the first that runs is used. If
none runs, the error of the convention that got furthest is reported. For other loops, pass `loss_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

LossOf: TypeAlias = Callable[[nn.Module, Any], Tensor]

_TARGETS = ("labels", "label", "targets", "target", "y", "ys", "classes", "class", "y_true")
_MODEL_NAMES = ("model", "net", "network", "module")


@dataclass(frozen=True)
class Convention:
    """One way to call model and loss."""

    name: str
    """The call as code, such as `loss_fn(model(batch[0]), batch[1])`."""

    forward: Callable[[nn.Module, Any], Any]
    """Model and batch to outputs."""

    loss: Callable[[Any, Any, Any], Any]
    """Loss function, outputs and batch to the loss."""


class NoLoss(TypeError):
    """A convention ran the model and found no loss in its result."""


def loss_taker(loss_of: LossOf) -> Convention:
    """The convention of a given `loss_of`: the model is not called separately from the loss."""

    def loss(_: Any, outputs: Any, batch: Any) -> Any:
        return loss_of(outputs, batch)

    return Convention("loss_of(model, batch)", lambda model, _: model, loss)


def takes_model(loss_fn: Any) -> bool:
    """Whether a loss function takes the model itself, as `loss_of(model, batch)` does."""
    names = _parameter_names(loss_fn)
    return len(names) == 2 and names[0] in _MODEL_NAMES


def conventions(batch: Any, model: nn.Module, loss_fn: Any) -> Iterator[Convention]:
    """The conventions that match a batch, the most common first."""
    for call, forward, targets in _forwards(batch, model):
        if loss_fn is None:
            yield Convention(call, forward, lambda _, outputs, __: own_loss(outputs))
            continue
        for target_name, target in targets:
            for part_name, part in _PARTS:
                name = f"loss_fn({call}{part_name}{', ' if target_name else ''}{target_name})"
                yield Convention(name, forward, _with_target(part, target))


def _with_target(part: Callable[[Any], Any], target: Callable[[Any], Any] | None) -> Callable[[Any, Any, Any], Any]:
    def loss(loss_fn: Any, outputs: Any, batch: Any) -> Any:
        prediction = part(outputs)
        return loss_fn(prediction) if target is None else loss_fn(prediction, target(batch))

    return loss


Target: TypeAlias = tuple[str, "Callable[[Any], Any] | None"]
Forward: TypeAlias = tuple[str, Callable[[nn.Module, Any], Any], list[Target]]


def _forwards(batch: Any, model: nn.Module) -> Iterator[Forward]:
    if isinstance(batch, Mapping):
        yield from _from_mapping(batch, model)
    elif isinstance(batch, tuple | list) and not isinstance(batch, str):
        yield from _from_sequence(batch)
    else:
        targets: list[Target] = [(f"batch.{name}", _attribute(name)) for name in _TARGETS if hasattr(batch, name)]
        yield "model(batch)", lambda m, b: m(b), [*targets, ("batch", lambda b: b), ("", None)]


def _from_sequence(batch: Any) -> Iterator[Forward]:
    count = len(batch)
    last: Target = (f"batch[{count - 1}]", lambda b: b[-1])
    second: Target = ("batch[1]", lambda b: b[1])
    if count == 1:
        yield "model(batch[0])", lambda m, b: m(b[0]), [("batch[0]", lambda b: b[0]), ("", None)]
    elif count == 2:
        yield "model(batch[0])", lambda m, b: m(b[0]), [second]
    else:
        yield "model(*batch[:-1])", lambda m, b: m(*b[:-1]), [last]
        yield "model(batch[0])", lambda m, b: m(b[0]), [second, last]
        yield "model(batch[0], *batch[2:])", lambda m, b: m(b[0], *b[2:]), [second]
    if count > 1:
        yield "model(*batch)", lambda m, b: m(*b), [last, ("", None)]
    yield "model(batch)", lambda m, b: m(b), [last, ("batch", lambda b: b)]


def _from_mapping(batch: Mapping[Any, Any], model: nn.Module) -> Iterator[Forward]:
    key = next((name for name in _TARGETS if name in batch), None)
    targets: list[Target] = [("batch", lambda b: b)]
    if key is not None:
        targets.insert(0, (f"batch[{key!r}]", lambda b: b[key]))
    accepted = set(_parameter_names(model.forward)) & set(batch)
    inputs = [name for name in batch if name != key]
    yield "model(**batch)", lambda m, b: m(**b), [*targets, ("", None)]
    if accepted:
        known = sorted(accepted, key=list(batch).index)
        yield f"model({', '.join(map(str, known))})", lambda m, b: m(**{name: b[name] for name in known}), targets
    if inputs:
        yield f"model(batch[{inputs[0]!r}])", lambda m, b: m(b[inputs[0]]), targets
    yield "model(batch)", lambda m, b: m(b), [*targets, ("", None)]


def _attribute(name: str) -> Callable[[Any], Any]:
    return lambda batch: getattr(batch, name)


def prediction_of(outputs: Any) -> Any:
    """The prediction in the model's result: its `logits`, or the first tensor."""
    for name in ("logits", "prediction", "predictions", "output", "outputs"):
        found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(found, Tensor):
            return found
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    if isinstance(values, Tensor) or not hasattr(values, "__iter__"):
        raise NoLoss(f"the model returned a {type(outputs).__name__} without a tensor to compare with the target")
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise NoLoss(f"the model returned a {type(outputs).__name__} without a tensor to compare with the target")


def own_loss(outputs: Any) -> Tensor:
    """The loss that a model computes itself: its output, the part named `loss`, or a scalar that comes first."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(outputs, tuple | list) and outputs:
        outputs = outputs[0]
    if isinstance(outputs, Tensor) and outputs.numel() == 1:
        return outputs
    raise NoLoss(
        f"no `loss_fn` was given and the model returned no loss, but {describe(outputs)}. Pass `loss_fn`, or "
        "`loss_of=lambda model, batch: …`"
    )


_PARTS: tuple[tuple[str, Callable[[Any], Any]], ...] = (("", lambda outputs: outputs), (" [prediction]", prediction_of))


def describe(value: Any) -> str:
    """A short description of a value: type and shape of a tensor, contents of a container."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in list(value.items())[:6]) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(describe(item) for item in value[:6]) + ")"
    return type(value).__name__


def _parameter_names(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
