"""Which norm layers are a risk in this model at this batch size, which are missing, and what to use instead.

BatchNorm estimates each channel's mean and variance from the batch. The error of that estimate goes with one over the
square root of the number of values, and at evaluation other numbers, the running averages, take its place: with few
samples the two disagree, and training looks fine while validation does not (Wu and He 2018, arXiv:1803.08494, measure
it from batch 32 down to 2). The other norms do not use the batch at all.

A deep network without any norm is only an info: it can be on purpose (NFNets, Fixup), and then its initialisation has
to keep the scale.

Post-norm residuals of a hand-written block are found in the source of its `forward` (`residual_order.py`).

Not covered: what only a forward could show, such as a feature map that shrinks to 1×1 before an InstanceNorm, and norms
that are called as functions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from surefoot.build.blocks import groups_for
from surefoot.build.residual_order import post_norms
from surefoot.core.settings import is_whole, require_module, shown
from surefoot.errors import require

FEWEST_BATCH_NORM_SAMPLES = 16
"""Samples per device below which BatchNorm is reported: Wu and He 2018 find that its error grows from there down."""

POST_NORM_LAYERS = 6
"""Post-norm transformer layers from which warm-up is needed, the depth of the original model."""


DEEP_WITHOUT_NORM = {"convolutions": 6, "linear layers": 8}
"""The number of layers of a kind from which a model without any norm is reported."""

_NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class NormAdvice:
    """One norm layer, or group of them, that should be checked."""

    where: str
    """The name of the module in the model."""

    severity: Literal["error", "warning", "info"]
    """`error` will fail or corrupt, `warning` is likely to hurt, `info` is inefficient or needs care."""

    problem: str
    """What is wrong, with the number."""

    advice: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.problem} {self.advice}"


def advise_normalization(
    model: nn.Module, batch_size: int, *, task: Literal["style-transfer"] | None = None
) -> list[NormAdvice]:
    """Name the norms that are risky at `batch_size` samples per device and micro-batch, and those that are missing.

    An empty list means no problems. `task="style-transfer"`: each image keeps its own contrast, so norms that mix
    images or channels are reported too.
    """
    require_module(model)
    require(
        is_whole(batch_size) and batch_size >= 1,
        f"`batch_size` must be at least 1, the samples one forward sees; got {shown(batch_size)}.",
    )
    if task not in (None, "style-transfer"):
        raise ValueError(f"`task` must be 'style-transfer' or None; got {task!r}.")
    found: list[NormAdvice] = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            found.extend(_batch_norm(name or "the model", module, batch_size))
        elif isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels > 1:
            found.append(_one_channel_each(name, module.num_channels))
        elif isinstance(module, nn.Sequential):
            found.extend(_neighbours(name, module))
    found += [*_post_norm(model), *_missing(model, batch_size)]
    return found + (list(_of_style_transfer(model)) if task == "style-transfer" else [])


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
    elif batch_size < FEWEST_BATCH_NORM_SAMPLES and not synced and not held:
        severity: Literal["error", "warning"] = "error" if batch_size <= 2 else "warning"
        fewest = FEWEST_BATCH_NORM_SAMPLES
        problem = f"BatchNorm estimates its statistics from {batch_size} samples; it needs {fewest} or more."
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
    consequence = "gradients near the output are large at the start."
    if len(layers) >= POST_NORM_LAYERS:
        problem = f"{len(layers)} post-norm transformer layers: {consequence}"
        advice = "Make them with `norm_first=True`, or warm the learning rate up (arXiv:2002.04745)."
        yield NormAdvice(layers[0], "warning", problem, advice)
    norms = [norms for _, norms in post_norms(model)]
    if len(norms) >= POST_NORM_LAYERS:
        problem = f"{len(norms)} post-norm layers, `norm(x + branch(x))`: {consequence}"
        advice = "Make them pre-norm, `x + branch(norm(x))`, or warm the learning rate up (arXiv:2002.04745)."
        yield NormAdvice(norms[0][0], "warning", problem, advice)


def _missing(model: nn.Module, batch_size: int) -> Iterator[NormAdvice]:
    """A deep or recurrent model without any norm layer."""
    named = list(model.named_modules())
    if any(isinstance(module, _NORMS) or "norm" in type(module).__name__.lower() for _, module in named):
        return
    recurrent = [(name, module) for name, module in named if isinstance(module, nn.RNNBase)]
    if recurrent:
        name, module = recurrent[0]
        problem = f"{type(module).__name__} without a norm layer: its inputs and outputs drift in scale over time."
        width = (module.proj_size or module.hidden_size) * (2 if module.bidirectional else 1)
        advice = f"Put `nn.LayerNorm({width})` behind it; BatchNorm does not suit sequences."
        yield NormAdvice(name or "the model", "info", problem, advice)
        return
    convolutions = [(name, module) for name, module in named if isinstance(module, _ConvNd)]
    linear = [(name, module) for name, module in named if isinstance(module, nn.Linear)]
    if len(convolutions) >= DEEP_WITHOUT_NORM["convolutions"]:
        name, first = convolutions[0]
        problem = f"{len(convolutions)} convolutions and no norm layer: only the initialisation keeps the scale."
        widths = {module.out_channels for _, module in convolutions}
        yield NormAdvice(name, "info", problem, _for_convolutions(first, batch_size, len(widths) == 1))
    elif len(linear) >= DEEP_WITHOUT_NORM["linear layers"]:
        problem = f"{len(linear)} linear layers and no norm layer: only the initialisation keeps the scale."
        advice = "Use `surefoot.build.PreNormMLP` blocks, or put `nn.LayerNorm` before each layer."
        yield NormAdvice(linear[0][0], "info", problem, advice)


def _for_convolutions(first: _ConvNd, batch_size: int, is_even: bool) -> str:
    """`is_even`: all convolutions have the same number of channels."""
    channels = first.out_channels
    where = "behind each convolution" if is_even else "behind this convolution, and one of its width behind each other"
    group = f"`nn.GroupNorm({groups_for(channels)}, {channels})`"
    if batch_size < FEWEST_BATCH_NORM_SAMPLES:
        return f"Put {group} {where}: {batch_size} samples are too few for BatchNorm."
    batch = f"`nn.BatchNorm{len(first.kernel_size)}d({channels})`"
    return f"Put {batch} {where}, and make the convolutions with `bias=False`; {group} if batches get small."


def _of_style_transfer(model: nn.Module) -> Iterator[NormAdvice]:
    for name, module in model.named_modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            kind = type(module).__name__
            channels = module.num_features if isinstance(module, nn.BatchNorm2d) else module.num_channels
            problem = f"{kind} takes its statistics over several {'images' if 'Batch' in kind else 'channels'}."
            advice = f"Use `nn.InstanceNorm2d({channels}, affine=True)` (arXiv:1607.08022)."
            yield NormAdvice(name or "the model", "warning", problem, advice)
