"""Which norm layers are a risk in this model at this batch size, and what to use instead.

BatchNorm estimates each channel's mean and variance from the batch. The error of that estimate goes with one over the
square root of the number of values, and at evaluation other numbers, the running averages, take its place: with few
samples the two disagree, and training looks fine while validation does not (Wu and He 2018, arXiv:1803.08494, measure
it from batch 32 down to 2). The other norms do not look at the batch at all.

Left out: what only a forward could show, such as a feature map that shrinks to 1×1 before an InstanceNorm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from surefoot.build.blocks import groups_for

BATCH_NORM_WANTS = 16
"""Samples per device below which BatchNorm is named: Wu and He 2018 see its error grow from there down."""

POST_NORM_LAYERS = 6
"""Post-norm transformer layers from which warm-up is needed, the depth of the original model."""


@dataclass(frozen=True)
class NormAdvice:
    """One norm layer, or group of them, that deserves a second look."""

    where: str
    """The name of the module in the model."""

    severity: Literal["error", "warning", "info"]
    """`error` will fail or corrupt, `warning` is likely to hurt, `info` is waste or a matter of care."""

    problem: str
    """What is wrong, with the number."""

    advice: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.problem} {self.advice}"


def advise_normalization(model: nn.Module, batch_size: int) -> list[NormAdvice]:
    """Name the norms that are risky at `batch_size` samples per device and micro-batch; an empty list is good news."""
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, the samples one forward sees; got {batch_size}.")
    found: list[NormAdvice] = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            found.extend(_batch_norm(name or "the model", module, batch_size))
        elif isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels > 1:
            found.append(_one_channel_each(name, module.num_channels))
        elif isinstance(module, nn.Sequential):
            found.extend(_neighbours(name, module))
    return found + list(_post_norm(model))


def _batch_norm(name: str, module: _BatchNorm, batch_size: int) -> Iterator[NormAdvice]:
    features = module.num_features  # 0 in a lazy one before its first forward
    instead = f"Use `nn.GroupNorm({groups_for(features)}, {features})`" if features else "Use `nn.GroupNorm`"
    synced = isinstance(module, nn.SyncBatchNorm)
    # Frozen and in eval mode, as advised below, it estimates nothing: it uses its running statistics.
    frozen = module.affine and not module.weight.requires_grad
    held = frozen and not module.training and module.track_running_stats
    if module.training and batch_size == 1 and isinstance(module, nn.BatchNorm1d):
        yield NormAdvice(
            name, "error", "BatchNorm1d cannot train on one sample: its variance is zero.", "Use `nn.LayerNorm`."
        )
    elif batch_size < BATCH_NORM_WANTS and not synced and not held:
        severity: Literal["error", "warning"] = "error" if batch_size <= 2 else "warning"
        problem = f"BatchNorm estimates its statistics from {batch_size} samples; it wants {BATCH_NORM_WANTS} or more."
        yield NormAdvice(name, severity, problem, f"{instead}, or `nn.SyncBatchNorm` across devices.")
    if not module.track_running_stats:
        problem = "without running statistics the output for one sample depends on the others in its batch."
        yield NormAdvice(name, "warning", problem, f"{instead}, or keep `track_running_stats=True`.")
    if module.training and frozen:
        problem = "its weights are frozen, but in train mode its running statistics still move."
        yield NormAdvice(name, "warning", problem, "Call `.eval()` on it after every `model.train()`.")


def _one_channel_each(name: str, channels: int) -> NormAdvice:
    problem = f"GroupNorm with one channel in each of {channels} groups is InstanceNorm: a 1×1 map becomes all zeros."
    return NormAdvice(name, "warning", problem, f"Use `nn.GroupNorm({groups_for(channels)}, {channels})`.")


def _neighbours(name: str, sequence: nn.Sequential) -> Iterator[NormAdvice]:
    for (_, before), (key, after) in pairwise(sequence.named_children()):
        where = f"{name}.{key}" if name else key
        if not isinstance(after, _BatchNorm | _InstanceNorm):
            continue
        if isinstance(before, nn.Dropout) and before.p > 0:
            problem = "dropout right before BatchNorm: the variance differs between training and evaluation."
            yield NormAdvice(where, "warning", problem, "Put the dropout after the last norm (arXiv:1801.05134).")
        elif getattr(before, "bias", None) is not None:
            problem = "the layer before it has a bias, which the norm subtracts again."
            yield NormAdvice(where, "info", problem, "Make that layer with `bias=False`.")


def _post_norm(model: nn.Module) -> Iterator[NormAdvice]:
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) and not module.norm_first
    ]
    if len(layers) >= POST_NORM_LAYERS:
        problem = f"{len(layers)} post-norm transformer layers: gradients near the output are large at the start."
        advice = "Make them with `norm_first=True`, or warm the learning rate up (arXiv:2002.04745)."
        yield NormAdvice(layers[0], "warning", problem, advice)
