"""The methods of an `Accelerator` that the guard needs: those that are given the loss, and those that clip.

Shared by the adapters for Accelerate and Transformers, whose Trainer has an Accelerator inside.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from surefoot.act.clip import limit_factor
from surefoot.trainers.guarded_training import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from surefoot.trainers.guarded_training import GuardedTraining
    from surefoot.trainers.watched_engine import WatchedEngine

ENGINES = {DistributedType.DEEPSPEED: "DeepSpeed", DistributedType.MEGATRON_LM: "Megatron-LM"}
"""What owns the step, so that there is none of torch's optimizers to guard."""


def engine_of(accelerator: Any) -> str | None:
    """The name of the engine that owns the step; `None` if torch's optimizer does."""
    return ENGINES.get(accelerator.distributed_type)


def follow_losses(training: GuardedTraining | WatchedEngine, accelerator: Any, *, is_share: bool) -> None:
    """Learn the loss from `accelerator.backward`, until `training` ends.

    `is_share` says whether the losses are divided for accumulation already.
    """
    backward = accelerator.backward

    def followed(loss: Tensor, **kwargs: Any) -> Any:
        training.add_loss(loss, is_share=is_share)
        return backward(loss, **kwargs)

    training.replaced.put(accelerator, "backward", followed)


def follow_clipping(training: GuardedTraining, accelerator: Any) -> None:
    """Do the clipping of `accelerator.clip_grad_norm_` and `clip_grad_value_`, until `training` ends.

    A method that a subclass has written anew stays as it is.
    """
    clip_norm, by_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

    def safe_clip_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        given = list(parameters)  # of a single tensor the rows, which have no gradients: as Accelerate does
        if _is_sharded(accelerator, given):
            return _noted(training, given, clip_norm, max_norm, norm_type)
        accelerator.unscale_gradients()
        return training.clip_norm(given, max_norm, norm_type)

    def safe_clip_value(parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        given = listed(parameters)
        if _is_sharded(accelerator, given):
            by_value(given, clip_value)
            return
        accelerator.unscale_gradients()
        training.clip_value(given, clip_value)

    if type(accelerator).clip_grad_norm_ is Accelerator.clip_grad_norm_:
        training.replaced.put(accelerator, "clip_grad_norm_", safe_clip_norm)
    if type(accelerator).clip_grad_value_ is Accelerator.clip_grad_value_:
        training.replaced.put(accelerator, "clip_grad_value_", safe_clip_value)


def _is_sharded(accelerator: Any, parameters: list[Tensor]) -> bool:
    """Whether the norm takes communication that Accelerate knows how to do."""
    plain = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    return accelerator.distributed_type not in plain or any(hasattr(each, "to_local") for each in parameters)


def _noted(
    training: GuardedTraining, parameters: list[Tensor], clip: Callable[..., Any], max_norm: float, norm_type: float
) -> Any:
    """Accelerate's own clipping; the guard learns what it multiplied by."""
    norm = clip(parameters, max_norm, norm_type=norm_type)
    if norm is not None and not math.isinf(max_norm):
        training.clipped(parameters, limit_factor(norm, max_norm))
    return norm
