"""Kernels that give the same result every time. On the CPU torch's own are all but a few deterministic already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment


def use_deterministic_kernels(experiment: Experiment) -> None:
    """Turn them on for the whole run; operations that have none only warn, and memory is not filled."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    experiment.acted += 1
