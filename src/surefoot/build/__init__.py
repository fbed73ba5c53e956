"""Model and data set-up: what a model, its data and its schedule need before the first step.

Everything here works alone: plain functions and small objects for torch, without other parts of surefoot.

* seeding: `seed_everything`
* initialisation: `init_for`, and the recipes it picks from
* blocks: `PreNormMLP`, `ConvGroupNorm`, `ScaledResidual`; `advise_normalization`
* learning rate: the `warmup_*` schedules, `suggest_lr`, `find_lr`
* weight decay: `decay_groups`
* data: `Standardizer`, `normalize_images`
* masks: `masked_softmax`, `mask_fill_value`, `find_fully_masked`
* clipping: `clip_advice`
"""

from surefoot.build.blocks import ConvGroupNorm, PreNormMLP, ScaledResidual, groups_for
from surefoot.build.clip_advice import ClipAdvice, clip_advice
from surefoot.build.decay import decay_groups
from surefoot.build.find_lr import LRRange, find_lr
from surefoot.build.images import IMAGENET_MEAN, IMAGENET_STD, normalize_images
from surefoot.build.init.apply import init_for
from surefoot.build.init.recipes import (
    critical_,
    he_normal_,
    lecun_normal_,
    orthogonal_gates_,
    remember_bias_,
    residual_normal_,
    small_normal_,
    xavier_normal_,
)
from surefoot.build.init.report import InitReport, InitRow
from surefoot.build.learning_rate import LRSuggestion, suggest_lr
from surefoot.build.masks import find_fully_masked, mask_fill_value, masked_softmax
from surefoot.build.normalization import NormAdvice, advise_normalization
from surefoot.build.schedules import (
    warmup_constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_stable_decay,
    warmup_step,
)
from surefoot.build.seeding import NondeterministicOperationError, Seeding, seed_everything, seed_worker
from surefoot.build.standardize import Standardizer

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ClipAdvice",
    "ConvGroupNorm",
    "InitReport",
    "InitRow",
    "LRRange",
    "LRSuggestion",
    "NondeterministicOperationError",
    "NormAdvice",
    "PreNormMLP",
    "ScaledResidual",
    "Seeding",
    "Standardizer",
    "advise_normalization",
    "clip_advice",
    "critical_",
    "decay_groups",
    "find_fully_masked",
    "find_lr",
    "groups_for",
    "he_normal_",
    "init_for",
    "lecun_normal_",
    "mask_fill_value",
    "masked_softmax",
    "normalize_images",
    "orthogonal_gates_",
    "remember_bias_",
    "residual_normal_",
    "seed_everything",
    "seed_worker",
    "small_normal_",
    "suggest_lr",
    "warmup_constant",
    "warmup_cosine",
    "warmup_inverse_sqrt",
    "warmup_linear",
    "warmup_stable_decay",
    "warmup_step",
    "xavier_normal_",
]
