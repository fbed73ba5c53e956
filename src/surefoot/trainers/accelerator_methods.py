"""The methods of an `Accelerator` that the guard needs: those that get the loss, and those that clip.

Shared by the adapters for Accelerate and Transformers, whose Trainer has an Accelerator inside.
"""

from __future__ import annotations

import math
import weakref
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
"""Engines that run the step themselves, so that there is no torch optimizer to guard."""


def engine_of(accelerator: Any) -> str | None:
    """The name of the engine that runs the step; `None` if torch's optimizer does."""
    return ENGINES.get(accelerator.distributed_type)


def follow_losses(training: GuardedTraining | WatchedEngine, accelerator: Any, *, is_share: bool) -> None:
    """Read the loss from `accelerator.backward`, until `training` ends.

    `is_share` is whether the losses are already divided for accumulation.
    """

    def followed(own: Callable[..., Any], loss: Tensor, **kwargs: Any) -> Any:
        training.add_loss(loss, is_share=is_share, is_propagated=True)
        return own(loss, **kwargs)

    training.replaced.follow(accelerator, "backward", followed)


def follow_clipping(training: GuardedTraining, accelerator: Any) -> None:
    """Do the clipping of `accelerator.clip_grad_norm_` and `clip_grad_value_`, until `training` ends.

    A method that a subclass overrides is unchanged. In watch mode, and for clipping by value, Accelerate clips, and the
    guard records the result.
    """
    reference = weakref.ref(accelerator)

    def safe_clip_norm(
        own: Callable[..., Any], parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        given = list(parameters)  # for a single tensor its rows, which have no gradients, as in Accelerate
        accelerator: Any = reference()
        if training.watches or _is_sharded(accelerator, given):
            norm = own(given, max_norm, norm_type=norm_type)
            if norm is not None and not math.isinf(max_norm) and accelerator.sync_gradients:
                training.clipped(given, limit_factor(norm, max_norm))
            return norm
        accelerator.unscale_gradients()
        return training.clip_norm(given, max_norm, norm_type, is_last=accelerator.sync_gradients)

    def safe_clip_value(own: Callable[..., Any], parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        given = listed(parameters)
        accelerator: Any = reference()
        if not _is_sharded(accelerator, given):
            accelerator.unscale_gradients()  # a second call does nothing
            training.clips_value(given, clip_value)
        own(given, clip_value)

    if type(accelerator).clip_grad_norm_ is Accelerator.clip_grad_norm_:
        training.replaced.follow(accelerator, "clip_grad_norm_", safe_clip_norm)
    if type(accelerator).clip_grad_value_ is Accelerator.clip_grad_value_:
        training.replaced.follow(accelerator, "clip_grad_value_", safe_clip_value)


def _is_sharded(accelerator: Any, parameters: list[Tensor]) -> bool:
    """Whether the norm needs communication that Accelerate implements."""
    plain = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    kinds = set(map(type, parameters))  # checking every parameter of a large model takes longer than clipping it
    return accelerator.distributed_type not in plain or any(hasattr(kind, "to_local") for kind in kinds)
