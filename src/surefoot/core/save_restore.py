"""Saves and restores the state of training: weights, buffers, gradients, modes, optimizer state, random streams.

Every `save_…` function copies one part of the state and returns the function that restores it, bit for bit, into the
same
objects: compiled code, CUDA graphs and the user's references stay valid. `untouched` combines them for a probe (a
traced forward, a learning-rate range test). A probe runs the user's real objects, because copies are not equivalent: a
deep copy of an optimizer that has a scheduler steps the *original*, and closures still refer to the original model.

`untouched` covers parameters (including those that only the optimizer has), buffers, gradients, training flags,
optimizer state and hyper-parameters, the Python, NumPy and torch random streams of every device, and any extra
`torch.Generator` passed in. Not covered: state that a forward keeps outside parameters and buffers (a Python list on a
module, a file).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from surefoot.core.random_state import read_streams, set_streams

Undo = Callable[[], None]

LARGEST_STATISTIC = 1_000_000
"""A larger buffer is assumed to be a table or a mask, and not a statistic that a forward changes."""


@contextmanager
def untouched(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    generators: Iterable[torch.Generator] = (),
) -> Iterator[None]:
    """Run the body, then restore everything named in the module's docstring."""
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = list(dict.fromkeys([*model.parameters(), *(p for group in groups for p in group["params"])]))
    modules = list(model.modules())
    undo = [
        save_streams(generators),
        save_slots(modules),
        save_tensors([*parameters, *model.buffers()]),
        save_gradients(parameters),
        save_modes(modules),
    ]
    if optimizer is not None:
        undo += [save_optimizer(optimizer), save_step_mark(optimizer)]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


# ---- random streams, modes ----------------------------------------------------------------------------------------


def save_streams(generators: Iterable[torch.Generator] = ()) -> Undo:
    """Save the random streams of the process and those of some generators."""
    streams = read_streams()
    own = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        set_streams(streams)
        for generator, state in own:
            generator.set_state(state)

    return put_back


def save_modes(modules: Iterable[nn.Module]) -> Undo:
    """Save which modules are in training mode."""
    modes = [(module, module.training) for module in modules]

    def put_back() -> None:
        for module, mode in modes:
            module.training = mode

    return put_back


# ---- tensors ------------------------------------------------------------------------------------------------------


def save_tensors(tensors: Sequence[Tensor]) -> Undo:
    """Save the contents of some tensors."""
    undo = [_saved_tensor(tensor) for tensor in tensors]

    def put_back() -> None:
        for restore in undo:
            restore()

    return put_back


def _saved_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    """Copy the contents of a tensor; they are restored into the same object.

    A tensor that was not written to is left unchanged: a write would break a graph of the user that still waits for its
    backward.
    """
    value, version = tensor.detach().clone(), None if tensor.is_inference() else tensor._version

    def restore() -> Tensor:
        # The version counter misses writes through `.data` and those of batch norm's kernels.
        if version is None or tensor._version != version or not _is_same(tensor, value):
            write(tensor, value)
        return tensor

    return restore


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.layout not in (torch.strided, torch.sparse_coo):  # `torch.equal` supports no other layout
        one, other = one.values(), other.values()
    return torch.equal(one, other)


def save_gradients(parameters: Sequence[Tensor]) -> Undo:
    """Save the gradients, as objects and in value."""
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters]

    @torch.no_grad()
    def put_back() -> None:
        for parameter, gradient, saved in gradients:
            parameter.grad = gradient if saved is None or gradient is None else gradient.copy_(saved)

    return put_back


@torch.no_grad()
def write(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor; into an expanded one without its repeats, which torch refuses to write to."""
    once = without_repeats(tensor)
    if once is not tensor:
        value = value[tuple(slice(0, size) for size in once.shape)]
    once.copy_(value)


def without_repeats(tensor: Tensor) -> Tensor:
    """The memory of an expanded tensor without repeats, to be written to; any other tensor unchanged."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


@torch.no_grad()
def write_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy values into writable tensors, with one launch per kind of tensor."""
    groups: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        ours, theirs = groups.setdefault((target.device, source.device, target.dtype), ([], []))
        ours.append(target)
        theirs.append(source)
    for ours, theirs in groups.values():
        torch._foreach_copy_(ours, theirs, non_blocking=True)


def is_writable(tensor: Tensor) -> bool:
    """Whether a copy can be written back: not into entries that share their memory, nor into an inference tensor."""
    return not tensor.is_inference() and tensor.layout is torch.strided and 0 not in tensor.stride()


# ---- buffers ------------------------------------------------------------------------------------------------------


def save_slots(modules: Sequence[nn.Module]) -> Undo:
    """Save which tensors are the buffers: a forward may replace a buffer, or add one."""
    slots = [(module, dict(module._buffers)) for module in modules]

    def put_back() -> None:
        for module, buffers in slots:
            module._buffers.clear()
            module._buffers.update(buffers)

    return put_back


def may_have_changed(module: nn.Module, was_written: bool) -> bool:
    """Whether a buffer may have changed; `was_written` is what the version counter shows.

    Batch norm's kernels write running statistics without updating the version counter.
    """
    return was_written or (module.training and is_batch_norm(module))


def is_batch_norm(module: nn.Module | None) -> bool:
    """Whether a module keeps running statistics like torch's batch norm."""
    return isinstance(module, _NormBase)


# ---- optimizers ---------------------------------------------------------------------------------------------------


def save_optimizer(optimizer: Any) -> Undo:
    """Save the state of an optimizer and the settings of its groups."""
    groups = [
        {key: _saved_value(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    # Usually a dictionary per parameter, but torch allows any key and any value.
    states = [(key, _saved_value(value)) for key, value in optimizer.state.items()]

    def put_back() -> None:
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key in group.keys() - saved.keys() - {"params"}:  # a counter that the step created
                del group[key]
            group.update({key: restore() for key, restore in saved.items()})
        optimizer.state.clear()
        for key, restore in states:
            optimizer.state[key] = restore()

    return put_back


def save_step_mark(optimizer: Any) -> Undo:
    """Save the mark by which a scheduler detects that its optimizer has stepped; without it, the scheduler warns."""
    stepped = getattr(optimizer, "_opt_called", None)

    def put_back() -> None:
        if stepped is not None:
            optimizer._opt_called = stepped
        elif hasattr(optimizer, "_opt_called"):
            del optimizer._opt_called

    return put_back


def _saved_value(value: Any) -> Callable[[], Any]:
    """Copy a value; a tensor, a list, a dictionary and a generator are restored as the same objects."""
    if isinstance(value, Tensor):
        return _saved_tensor(value)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if type(value) is tuple:
        parts = [_saved_value(each) for each in value]
        return lambda: tuple(restore() for restore in parts)
    if isinstance(value, (dict, list)):
        return _saved_container(value)
    try:
        saved = copy.deepcopy(value)
    except Exception:  # an object that cannot be copied is not restored
        return lambda: value
    return lambda: saved


def _saved_container(value: dict[Any, Any] | list[Any]) -> Callable[[], Any]:
    pairs = [
        (key, _saved_value(each)) for key, each in (value.items() if isinstance(value, dict) else enumerate(value))
    ]

    def restore() -> Any:
        value.clear()
        if isinstance(value, dict):
            value.update((key, part()) for key, part in pairs)
        else:
            value.extend(part() for _, part in pairs)
        return value

    return restore
