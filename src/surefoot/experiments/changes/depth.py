"""A smaller model: every second one of its repeated blocks is bypassed.

A script builds its model in its own code, and changing the width of one layer makes it incompatible with the next. What
can be removed from any model is a block whose output has the shape of its input. If a `ModuleList` or `Sequential`
contains several blocks of one class with parameters of equal shapes, such as the layers of a transformer or the blocks
of a residual stage, every second one returns its input. Its parameters get no gradient, so they are not updated.

Not covered: models without such blocks, blocks that return anything but one tensor with the shape of their input, the
layers of `nn.LSTM` and similar modules (one call computes all of them), and compiled models.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def halve_blocks(experiment: Experiment) -> None:
    """Make every second one of a model's repeated blocks return its input."""
    known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    chosen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    skipped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    blocks = 0
    depth = 0

    def choose(model: nn.Module) -> None:
        nonlocal blocks
        known.add(model)
        for group in repeated_blocks(model):
            blocks += len(group)
            chosen.update(group[1::2])

    def is_skipped(module: nn.Module, given: Any, result: Any) -> bool:
        """Whether a chosen block can be bypassed, judged by its first call."""
        chosen.discard(module)
        if not isinstance(given, Tensor) or not isinstance(result, Tensor):
            return False
        if given.shape != result.shape or given.dtype != result.dtype:
            return False
        skipped.add(module)
        experiment.acted += 1
        experiment.notes[:] = [f"{len(skipped)} of {blocks} repeated blocks return their inputs"]
        return True

    def call(original: Any, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        module = args[0]
        given = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
        if module in skipped and isinstance(given, Tensor):
            return given
        if depth == 0 and module not in known:
            experiment.safely(choose, module)
        depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            depth -= 1
        return given if module in chosen and experiment.safely(is_skipped, module, given, result) else result

    experiment.patience = 3
    experiment.wrapping.around(nn.Module, "__call__", call)


def repeated_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Members of the model's outermost containers that are of one class and have parameters of the same shapes."""
    if not isinstance(model, _CONTAINERS):
        for child in model.children():
            yield from repeated_blocks(child)
        return
    groups: dict[Any, list[nn.Module]] = defaultdict(list)
    for member in model:
        if any(True for _ in member.parameters()):
            groups[type(member), tuple((name, each.shape) for name, each in member.named_parameters())].append(member)
    for group in groups.values():
        distinct = list({id(member): member for member in group}.values())
        if len(distinct) > 1:
            yield distinct
        else:
            yield from repeated_blocks(distinct[0])
