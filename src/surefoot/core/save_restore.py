"""Look, then put everything back: model, optimizer and random streams bitwise as they were.

A probe (a traced forward, a learning-rate range test) runs the user's real objects, because copies lie: a deep copy of
an optimizer that has a scheduler steps the *original*, and closures keep pointing at the original model. So the state
is cloned beside, the probe runs, and the clones are written back into the same tensors, even if the probe raised.

Covered: parameters (also those that only the optimizer knows), buffers, gradients, training flags, optimizer state and
hyper-parameters, the Python, NumPy and torch random streams of every device, and any extra `torch.Generator` handed in.
Left out: state a forward keeps
outside parameters and buffers (a Python list on a module, a file), which nobody can see from here.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.random_state import read_streams, set_streams

Undo = Callable[[], None]


@contextmanager
def untouched(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    generators: Iterable[torch.Generator] = (),
) -> Iterator[None]:
    """Run the body, then restore everything named in the module's docstring."""
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = dict.fromkeys([*model.parameters(), *(p for group in groups for p in group["params"])])
    undo = [_keep_streams(generators), _keep_model(model, list(parameters))]
    if optimizer is not None:
        undo.append(_keep_optimizer(optimizer))
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _keep_streams(generators: Iterable[torch.Generator]) -> Undo:
    streams = read_streams()
    own = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        set_streams(streams)
        for generator, state in own:
            generator.set_state(state)

    return put_back


def _keep_model(model: nn.Module, parameters: list[Tensor]) -> Undo:
    tensors = [*parameters, *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    versions = [_version(tensor) for tensor in tensors]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
    slots = [(module, dict(module._buffers)) for module in model.modules()]
    modes = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        with torch.no_grad():
            for module, buffers in slots:  # a forward may also put a new tensor in a buffer's place
                module._buffers.clear()
                module._buffers.update(buffers)
            for tensor, value, version in zip(tensors, values, versions, strict=True):
                _write(tensor, value, version)
            for parameter, gradient, saved in gradients:
                parameter.grad = gradient if saved is None or gradient is None else gradient.copy_(saved)
        for module, mode in modes:
            module.training = mode

    return put_back


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; unknown for those made in inference mode."""
    return None if tensor.is_inference() else tensor._version


def _write(tensor: Tensor, value: Tensor, version: int | None) -> None:
    """Copy, into an expanded tensor without its repeats, which torch refuses to write to.

    What nobody wrote to is left alone: a write would break a graph of the user's that still waits for its backward.
    """
    if version is not None and tensor._version == version and torch.equal(tensor, value):
        return
    if tensor.layout == torch.strided and 0 in tensor.stride():
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor, value = tensor[once], value[once]
    tensor.copy_(value)


def _keep_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    groups = [
        {key: _keep(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    states = {parameter: {k: _keep(v) for k, v in state.items()} for parameter, state in optimizer.state.items()}
    # A scheduler notes on the optimizer that it has stepped, and warns by it later.
    stepped = getattr(optimizer, "_opt_called", None)

    def put_back() -> None:
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key in set(group) - set(saved) - {"params"}:
                del group[key]
            group.update({key: restore() for key, restore in saved.items()})
        optimizer.state.clear()
        for parameter, state in states.items():
            optimizer.state[parameter] = {key: restore() for key, restore in state.items()}
        if stepped is not None:
            optimizer._opt_called = stepped  # type: ignore[attr-defined]
        elif hasattr(optimizer, "_opt_called"):
            del optimizer._opt_called

    return put_back


def _keep(value: Any) -> Callable[[], Any]:
    """Remember a value; a tensor comes back as the same object with its old contents."""
    if not isinstance(value, Tensor):
        saved = copy.deepcopy(value)
        return lambda: saved
    contents = value.detach().clone()

    def restore() -> Tensor:
        with torch.no_grad():
            return value.copy_(contents)

    return restore
