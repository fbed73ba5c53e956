"""Copies ids, labels and probabilities to the host before functions that fail on a device because of a value.

They are observed once there is an optimizer of parameters on a device. On the CPU, torch's error names the index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from surefoot.core.device import has_streams
from surefoot.core.without_hooks import without_torch_function
from surefoot.watch.indexed_calls import PROBABILITIES

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher

PROBE = "ids and labels"
_WHY = "the {}, before they cause a device error; observed as soon as parameters on a device are trained"
IDS = ("embedding", "embedding_bag")
LABELS = ("cross_entropy", "nll_loss")
_TAKEN = {**dict.fromkeys(IDS, "ids"), **dict.fromkeys(LABELS, "labels"), PROBABILITIES: "probabilities"}
_PLAIN = (Tensor, nn.Parameter)
_is_in_mode = torch._C._is_torch_function_mode_enabled


def wrap_indexing(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe embeddings, and the losses that take class numbers."""
    waiting = [wrapping]

    def made(_: Any, args: Any, kwargs: Any) -> None:
        if waiting and any(has_streams(each.device) for group in args[0].param_groups for each in group["params"]):
            begin(watcher, waiting.pop())

    for name, taken in _TAKEN.items():
        wrapping.announce(f"torch.nn.functional.{name}", _WHY.format(taken))
    wrapping.after(Optimizer, "__init__", PROBE, made, "")


def begin(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe the functions."""
    here, safely, take = watcher.probes.here, watcher.probes.safely, watcher.indexed_calls.take

    def observe(name: str) -> None:
        def before_ids(args: Any, kwargs: Any) -> None:
            if _is_on_device(args[0]) and (type(args[1]) in _PLAIN or isinstance(args[1], Tensor)) and here():
                safely(PROBE, take, name, args[0], args[1], 0, None)

        def before_labels(args: Any, kwargs: Any) -> None:
            if _is_on_device(args[1]) and (type(args[0]) in _PLAIN or isinstance(args[0], Tensor)) and here():
                safely(PROBE, take, name, args[1], args[0], 1, args[4])

        def before_probabilities(args: Any, kwargs: Any) -> None:
            if _is_on_device(args[0]) and here():
                safely(PROBE, watcher.indexed_calls.take_probabilities, args[0])

        before = {"ids": before_ids, "labels": before_labels, "probabilities": before_probabilities}
        wrapping.add(functional, name, PROBE, "", before[_TAKEN[name]])

    for name in _TAKEN:
        observe(name)


def follow_compiled(watcher: Watcher, wrapping: Hooks, kind: type) -> None:
    """Observe the inputs of compiled models of a class. Calls inside the model are not observed."""
    here, safely, take_inputs = watcher.probes.here, watcher.probes.safely, watcher.indexed_calls.take_inputs

    def before(args: Any, kwargs: Any) -> None:
        if here():
            safely(PROBE, take, args, kwargs)

    def take(args: Any, kwargs: Any) -> None:
        model = getattr(args[0], "_orig_mod", None)
        given = (*args[1:], *kwargs.values()) if kwargs else args[1:]
        on_device = [each for each in given if type(each) is Tensor and has_streams(each.device)]
        if on_device and isinstance(model, nn.Module):
            take_inputs(on_device, model)

    wrapping.add(kind, "__call__", PROBE, "", before)


def _is_on_device(indices: Any) -> bool:
    """Whether it is a plain tensor on a device that runs asynchronously."""
    if type(indices) is not Tensor:
        return False
    if not _is_in_mode():
        return has_streams(indices.device)
    with without_torch_function():  # a function mode would see the check
        return has_streams(indices.device)
