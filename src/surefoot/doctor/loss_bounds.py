"""Two values of a known loss function on given targets: its minimum, and the best loss of a constant prediction.

A model that learns anything from its inputs gets below the second. The bounds are not known for losses with weights,
for sums, and for losses whose best constant prediction has no formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.doctor.function_calls import CLASSES, LossInput


def lowest_loss(call: LossInput) -> float:
    """The smallest value of the loss: 0, or the entropy of soft targets and of label smoothing."""
    smoothing = float(call.settings.get("label_smoothing", 0.0) or 0.0)
    targets = call.target.double()
    if call.kind == "cross_entropy" and smoothing > 0.0:
        other, count = smoothing / call.class_count, call.class_count
        hit = 1.0 - smoothing + other
        return -hit * math.log(hit) - (count - 1) * other * math.log(other)
    if call.kind.startswith("binary_cross_entropy") and call.settings.get("weight") is None:
        return float(_binary_entropy(targets).mean()) if targets.numel() else 0.0
    if call.kind == "cross_entropy" and call.target.is_floating_point():
        return float(_entropy(targets, call.class_dim).mean())
    return 0.0


def constant_answer_loss(call: LossInput) -> float | None:
    """The lowest mean loss of a prediction that is the same for every row; `None` if it is not known.

    Classes are counted over all targets of the batch, also if a row has several, so the result is never below the
    optimum.
    """
    if call.settings.get("reduction", "mean") != "mean" or not call.target.numel():
        return None
    if call.settings.get("weight") is not None or call.settings.get("pos_weight") is not None:
        return None
    if call.kind in CLASSES:
        return _of_classes(call)
    if call.input.shape != call.target.shape or not call.target.dim():
        return None
    target = call.target.double()
    if call.kind.startswith("binary_cross_entropy"):
        return float(_binary_entropy(target.mean(0)).mean())
    if call.kind == "mse_loss":
        return float((target - target.mean(0)).square().mean())
    if call.kind == "l1_loss":
        return float((target - target.median(0).values).abs().mean())
    return None


def _of_classes(call: LossInput) -> float | None:
    if call.has_indices:
        labels = call.target[call.valid]
        if not labels.numel() or int(labels.min()) < 0 or int(labels.max()) >= call.class_count:
            return None
        shares = torch.bincount(labels, minlength=call.class_count).double() / labels.numel()
    else:
        rows = call.target.double().movedim(call.class_dim, -1)
        shares = rows.reshape(-1, call.class_count).mean(0)
    smoothing = float(call.settings.get("label_smoothing", 0.0) or 0.0)
    return float(_entropy((1 - smoothing) * shares + smoothing / call.class_count, 0))


def _entropy(shares: Tensor, dim: int) -> Tensor:
    shares = shares.clamp_min(0)  # targets that are not probabilities are left to another check
    entropy: Tensor = -torch.special.xlogy(shares, shares).sum(dim)
    return entropy


def _binary_entropy(shares: Tensor) -> Tensor:
    shares = shares.clamp(0, 1)
    entropy: Tensor = -torch.special.xlogy(shares, shares) - torch.special.xlogy(1 - shares, 1 - shares)
    return entropy
