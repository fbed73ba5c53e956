"""The changes by name. Their titles and the order in which they are tried are in `experiments.plan`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from surefoot.experiments.changes.data import (
    change_order,
    change_seed,
    repeat_tiny_batch,
    shuffle_labels,
    synthesize_inputs,
)
from surefoot.experiments.changes.depth import halve_blocks
from surefoot.experiments.changes.precision import use_bf16, use_deterministic_kernels, use_fp32
from surefoot.experiments.changes.steps import change_eps, clip, divide_rate, reset_moments, skip_batches, warm_up

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment

INSTALL: dict[str, Callable[[Experiment], None]] = {
    "lr-3": partial(divide_rate, by=3.0),
    "lr-10": partial(divide_rate, by=10.0),
    "warm-up": warm_up,
    "clip": clip,
    "fp32": use_fp32,
    "bf16": use_bf16,
    "other-batches": change_order,
    "skip-batch": skip_batches,
    "reset-moments": reset_moments,
    "eps": change_eps,
    "smaller-model": halve_blocks,
    "deterministic": use_deterministic_kernels,
    "other-seed": change_seed,
    "tiny-batch": repeat_tiny_batch,
    "synthetic-inputs": synthesize_inputs,
    "shuffled-labels": shuffle_labels,
}


def install(name: str, experiment: Experiment) -> None:
    """Apply one change."""
    experiment.safely(INSTALL[name], experiment)
