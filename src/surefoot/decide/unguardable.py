"""Refuses set-ups in which not all ranks could refuse a step, or a refused step would have an effect.

- `ZeroRedundancyOptimizer` is guarded like any optimizer. But each rank has a share of its state, which is available
  only after a collective (`consolidate_state_dict`), so it cannot be saved or kept with the others. With
  `overlap_with_ddp` it steps during backward, before anything is known.
- PowerSGD keeps what it has left out of each gradient and adds it to the next one. A refused NaN stays there, and every
  later gradient is NaN.
- `join` lets a rank that has run out of data answer the collectives of DDP for the others, but no other collectives:
  the rest would wait for it. torch leaves the setting of `join` on when the block has ended, although every rank then
  takes part in every step again.

Everything is read from attributes; nothing here starts a collective.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.weak_reference import IdentityMap
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.nn.parallel import DistributedDataParallel


def replicas_in(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Every DDP in the models."""
    kind = getattr(torch.nn.parallel, "DistributedDataParallel", ())
    return [module for model in models for module in model.modules() if isinstance(module, kind)]


def check_optimizer(optimizer: Any, keeps_states: bool) -> None:
    """Raise `UsageError` for an optimizer whose steps cannot be refused, or whose state cannot be kept."""
    if not any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UsageError(
            "ZeroRedundancyOptimizer with `overlap_with_ddp=True` steps during backward, before surefoot can refuse "
            "the step. Create it without `overlap_with_ddp`."
        )
    if keeps_states:
        raise UsageError(
            "ZeroRedundancyOptimizer divides its state over the ranks and returns it only after a collective, so "
            "`checkpoints` and `recovery` cannot store it. Shard with `torch.distributed.fsdp.fully_shard` instead, or "
            "remove both and save with `consolidate_state_dict` yourself."
        )


def check_hooks(models: Sequence[nn.Module]) -> None:
    """Raise `UsageError` for a communication hook that would keep a refused gradient."""
    for replica in replicas_in(models):
        for _, state in getattr(replica, "_comm_hooks", None) or ():
            feedback = [name for name in ("use_error_feedback", "warm_start") if getattr(state, name, False)]
            if feedback and hasattr(state, "error_dict"):
                raise UsageError(
                    "the PowerSGD hook of DDP carries over parts of each gradient into the next one "
                    f"({', '.join(f'{name}=True' for name in feedback)}): after one NaN, which surefoot refuses, every "
                    "later gradient would be NaN. Use `PowerSGDState(..., use_error_feedback=False, "
                    "warm_start=False)`, or `bf16_compress_hook`."
                )


class SetupOfRanks:
    """The checks before each step of a model that several ranks train. Does not keep the model alive."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._replicas = [weakref.ref(replica) for replica in replicas_in(models)]
        self._ended: IdentityMap[object] = IdentityMap()
        """The setting of each model that a `join()` of the past has left on."""

    def check(self, step: int) -> None:
        """Raise `UsageError` if ranks cannot refuse a step together. Hooks may be added after construction."""
        replicas = [replica for reference in self._replicas if (replica := reference()) is not None]
        if step == 0:
            check_hooks(replicas)
        for replica in replicas:
            if self._is_joined(replica):
                raise UsageError(
                    "surefoot cannot guard a model inside `join()`: a rank that has run out of data answers the "
                    "collectives of DDP for the others, but not the one in which all ranks agree on a step. Give every "
                    "rank the same number of batches: `DistributedSampler(..., drop_last=True)`, or without "
                    "`drop_last`, which repeats a few rows."
                )

    def _is_joined(self, replica: DistributedDataParallel) -> bool:
        """Whether the model is inside `join()`, whose context manager exists as long as the block runs."""
        from torch.distributed.algorithms.join import Join

        config = replica._join_config
        if not config.enable or self._ended.get(replica) is config:
            return False
        for each in gc.get_objects():  # only after `join()`, and once
            if issubclass(type(each), Join) and any(joined is replica for joined in each._joinables):
                return True
        self._ended.set(replica, config)
        return False
