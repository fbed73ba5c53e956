"""Starting points by kind of model: plain functions that return a configured `TrainingStabilizer`.

Each sets what this kind of training usually needs and leaves the rest at its default. Arguments in `settings`
override the preset:

    stabilizer = surefoot.presets.for_transformer(model, optimizer, total_steps=50_000, accumulate=4)
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from surefoot.act.clip import ClipByNorm
from surefoot.act.shape import AdaptiveUnitClip
from surefoot.build.schedules import warmup_cosine, warmup_linear
from surefoot.core.settings import is_whole, shown
from surefoot.detect.checker import StabilityChecker
from surefoot.errors import require
from surefoot.guard.stabilizer import TrainingStabilizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.types import Clipper, Shaper

_HEADS = ("fc.*", "head.*", "classifier.*")
"""The names of the last layer in the models of torchvision and timm."""
_CURVE_DETECTORS = ("spike", "loss", "oscillation", "plateau", "no_learning", "setback", "lost_progress")
WITHOUT_CURVE_DETECTORS = dict.fromkeys(_CURVE_DETECTORS)
"""Detectors that read the loss curve, disabled: an adversarial or a policy loss does not measure progress."""


def for_transformer(
    model: nn.Module,
    optimizer: Any,
    *,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
    **settings: Any,
) -> TrainingStabilizer:
    """Clip at 1.0, as nearly every published run does; with `total_steps`, warm up over 2% and decay as a cosine."""
    if total_steps is not None and "scheduler" not in settings:  # creating one sets the optimizer's learning rates
        settings["scheduler"] = warmup_cosine(optimizer, *_steps(total_steps, warmup_steps, share=0.02))
    return for_rnn(model, optimizer, **settings)


def for_fine_tuning(
    model: nn.Module,
    optimizer: Any,
    *,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
    **settings: Any,
) -> TrainingStabilizer:
    """Clip at 1.0; with `total_steps`, warm up over 6% to protect the body from the new head, then decay to zero."""
    if total_steps is not None and "scheduler" not in settings:  # creating one sets the optimizer's learning rates
        settings["scheduler"] = warmup_linear(optimizer, *_steps(total_steps, warmup_steps, share=0.06))
    return for_rnn(model, optimizer, **settings)


def for_rnn(model: nn.Module, optimizer: Any, **settings: Any) -> TrainingStabilizer:
    """Clip at 1.0: gradients through time grow with the sequence (Pascanu et al., 2013)."""
    settings.setdefault("clip", ClipByNorm(1.0))
    return TrainingStabilizer(model, optimizer, **settings)


def for_deep_cnn(
    model: nn.Module, optimizer: Any, *, head: tuple[str, ...] = _HEADS, **settings: Any
) -> TrainingStabilizer:
    """Clip each unit relative to its weights (AGC, Brock et al., 2021), except for the head."""
    if head == _HEADS and isinstance(model, nn.Module):  # names that this model has; if it has none, each is logged
        head = tuple(each for each in _HEADS if any(fnmatchcase(name, each) for name, _ in model.named_parameters()))
        head = head or _HEADS
    settings.setdefault("clip", AdaptiveUnitClip(0.01, exclude=head))
    return TrainingStabilizer(model, optimizer, **settings)


def for_gan(
    generator: nn.Module,
    generator_optimizer: Any,
    discriminator: nn.Module,
    discriminator_optimizer: Any,
    *,
    clip: Clipper | Shaper | Sequence[Clipper | Shaper] | None = None,
    discriminator_clip: Clipper | Shaper | Sequence[Clipper | Shaper] | Literal["same"] | None = "same",
    **settings: Any,
) -> tuple[TrainingStabilizer, TrainingStabilizer]:
    """Two stabilizers, generator first. Broken and exploding steps are refused; no detector judges the loss curves.

    With `clip`, both models are clipped, each with its own history. `discriminator_clip` gives the discriminator
    another clipper. The two models have different gradient scales, which change during training:
    `AdaptiveGradientClipper` adapts to each, while a fixed limit would have to be found for each.

    With `checkpoints`, the generator's stabilizer saves and loads both, so that they always belong to the same moment:
    draw the batches from its `resume`, and call its `save` and `restore`. `also_save` is saved with it, once.
    """
    settings.setdefault("checker", StabilityChecker(**WITHOUT_CURVE_DETECTORS))
    second_clip = clip if isinstance(discriminator_clip, str) else discriminator_clip
    if settings.get("checkpoints") is None:
        return (
            TrainingStabilizer(generator, generator_optimizer, clip=clip, **settings),
            TrainingStabilizer(discriminator, discriminator_optimizer, clip=second_clip, **settings),
        )
    checkpoints, also = settings.pop("checkpoints"), settings.pop("also_save", None) or {}
    second = TrainingStabilizer(discriminator, discriminator_optimizer, clip=second_clip, **settings)
    settings |= {"checkpoints": checkpoints, "also_save": {**also, "discriminator": second}}
    return TrainingStabilizer(generator, generator_optimizer, clip=clip, **settings), second


def for_rl(model: nn.Module, optimizer: Any, **settings: Any) -> TrainingStabilizer:
    """Clip at 0.5, as PPO's reference settings do. The loss is not monitored: it crosses zero and follows the returns.

    Monitor meaningful signals instead: `stabilizer.observe(kl=…, entropy=…)`.
    """
    settings.setdefault("clip", ClipByNorm(0.5))
    settings.setdefault("checker", StabilityChecker(**WITHOUT_CURVE_DETECTORS))
    return TrainingStabilizer(model, optimizer, **settings)


def _steps(total_steps: int, warmup_steps: int | None, share: float) -> tuple[int, int]:
    """Warm-up steps and total steps; the warm-up is a share of the total unless it is given."""
    require(
        is_whole(total_steps) and total_steps >= 1,
        f"`total_steps` must be a whole number of at least 1; got {shown(total_steps)}.",
    )
    warmup = min(total_steps - 1, max(1, round(share * total_steps))) if warmup_steps is None else warmup_steps
    return warmup, total_steps
