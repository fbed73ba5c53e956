"""Run the lines of a reproduction here, and count the non-finite values in their result."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from surefoot.replay.locate.describe import Counts, values_of

if TYPE_CHECKING:
    from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class TrialResult(NamedTuple):
    """The result of some lines."""

    counts: Counts
    numel: int

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Which kinds of non-finite values there are."""
        return tuple(number > 0 for number in self.counts)


@dataclass
class Patience:
    """A limit for the number of attempts."""

    trials: int = 600
    seconds: float = 20.0
    _began: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether it is used up."""
        return self.trials <= 0 or time.monotonic() - self._began > self.seconds


def attempt(text: str, leaves: Mapping[str, Tensor]) -> TrialResult | None:
    """The result of the lines for these tensors; `None` if they raise."""
    risky = any(leaf.device.type != "cpu" for leaf in leaves.values()) and any(
        leaf.dtype in _INTEGERS for leaf in leaves.values()
    )
    if risky and _run(text, {name: leaf.cpu() for name, leaf in leaves.items()}) is None:
        return None  # an index out of range is an error on the CPU, and the end of the process on a GPU
    return _run(text, {name: leaf.clone() for name, leaf in leaves.items()})


def _run(text: str, leaves: dict[str, Tensor]) -> TrialResult | None:
    names: dict[str, Any] = {"torch": torch, "F": functional, **leaves}
    with ExitStack() as stack:
        stack.enter_context(_neutral(leaves))
        if "manual_seed" in text:
            stack.enter_context(torch.random.fork_rng())
        try:
            exec(compile(text, "<reproduction>", "exec"), names)
            return _count(names["made"])
        except Exception:  # whatever it is, it is not the failure that is searched for
            return None


def _neutral(leaves: Mapping[str, Tensor]) -> ExitStack:
    """The settings of a fresh process, whatever the caller has set."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    for kind in {leaf.device.type for leaf in leaves.values()}:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _count(made: list[Tensor]) -> TrialResult:
    total, numel = Counts(), 0
    for tensor in made:
        values = values_of(tensor)
        if values is not None:
            each = (values.isnan(), values.isposinf(), values.isneginf())
            total = Counts(*(had + int(here.sum()) for had, here in zip(total, each, strict=True)))
            numel += values.numel()
    return TrialResult(total, numel)
