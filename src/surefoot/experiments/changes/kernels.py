"""Deterministic kernels. On the CPU, all but a few of torch's kernels already are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment


def use_deterministic_kernels(experiment: Experiment) -> None:
    """Use deterministic kernels for the whole run. Operations that have none only warn, and memory is not filled."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    experiment.acted += 1
