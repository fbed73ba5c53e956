"""What a sampled step records about losses: loss functions, and errors, products and ratios written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from surefoot.watch.call_history import CallHistory, place_of
from surefoot.watch.operation_names import BINARY_LOSSES, CLASS_LOSSES, DISTANCE_LOSSES, RECURRENT, VIEWS, WEIGHT_LAYERS
from surefoot.watch.tensor_summary import as_distribution, describe, label_counts, sampled

if TYPE_CHECKING:
    from surefoot.watch.function_recorder import RecordedCall

TARGETS_KEPT = 4
"""Losses at the end of a step whose targets later questions may need."""


class LossCalls:
    """The losses of one sampled step."""

    def __init__(self, history: CallHistory) -> None:
        self._history = history
        self.losses: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.products: list[dict[str, Any]] = []
        self.ratios: list[dict[str, Any]] = []
        self.targets: dict[int, Tensor] = {}
        """The targets of the last loss calls, by the index of the call, as long as the step lasts."""

    def loss(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A call of a loss function: its inputs, its target, and whether they fit together."""
        given = kwargs.get("input", args[0] if args else None)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if not isinstance(given, Tensor) or not isinstance(target, Tensor):
            return
        note = place_of(entry) | {
            "grad": entry.out_grad,
            "reduction": kwargs.get("reduction", "mean") if not isinstance(out, Tensor) or out.dim() == 0 else "none",
            "input": describe(given),
            "target": describe(target),
            "producer": self._history.producer(given),
            "target_producer": self._history.producer(target),
            "same_shape": list(given.shape) == list(target.shape),
            "value": float(out) if isinstance(out, Tensor) and out.dim() == 0 else None,
        }
        self.targets[entry.index] = target.detach()
        if len(self.targets) > TARGETS_KEPT:
            del self.targets[next(iter(self.targets))]
        note["target_from_model"] = bool(self._history.names(target) & (WEIGHT_LAYERS | RECURRENT))
        if entry.name in CLASS_LOSSES and given.dim() >= 1 and given.numel():
            self._class_loss(note, given, target, kwargs)
        elif entry.name in BINARY_LOSSES and given.numel():
            inside = (sampled(given) >= 0) & (sampled(given) <= 1)
            note["inside_unit"] = float(inside.float().mean())
            note["labels"] = label_counts(target) if target.numel() <= 1 << 20 else None
            note["row_sum_error"] = as_distribution(given, -1)["sum_error"] if given.dim() > 1 else None
            hard = (given > (0.5 if entry.name == "binary_cross_entropy" else 0)).float()
            note["predicted_share"] = float(hard.mean())
            note["weighted"] = any(kwargs.get(key) is not None for key in ("weight", "pos_weight"))
        elif entry.name in DISTANCE_LOSSES:
            note |= _bounds(given, target)
            note["pinned_low"], note["pinned_high"] = _pinned(given)
            if target.dim() and len(target) > 1:
                note["target_variance"] = float(target.detach().float().var(0, correction=0).mean())
        elif entry.name == "kl_div" and given.dim() > 1:
            note["distribution"] = as_distribution(given, -1)
            note["log_target"] = bool(kwargs.get("log_target", False))
        self.losses.append(note)

    def _class_loss(self, note: dict[str, Any], given: Tensor, target: Tensor, kwargs: dict[str, Any]) -> None:
        dim = 1 if given.dim() > 1 else 0
        ignore = int(kwargs.get("ignore_index", -100))
        note["distribution"] = as_distribution(given, dim)
        note["ignore_index"] = ignore
        note["weighted"] = kwargs.get("weight") is not None
        note["smoothing"] = float(kwargs.get("label_smoothing", 0.0))
        if target.is_floating_point():
            return
        valid = target != ignore
        labels = target[valid]
        note["valid"] = int(valid.sum())
        note["targets"] = target.numel()
        note["labels"] = label_counts(labels) if labels.numel() <= 1 << 20 else None
        if not labels.numel():
            return
        note["label_range"] = [int(labels.min()), int(labels.max())]
        rows = given.detach().movedim(dim, -1)[valid] if given.dim() > 1 else given.detach()[None]
        chosen = rows.argmax(-1)
        note["predicted"] = label_counts(chosen)
        if chosen.shape == labels.shape:
            note["accuracy"] = float((chosen == labels).float().mean())
            note["unit_spread"] = float(rows.float().std(0).mean()) if len(rows) > 1 else None

    def difference(self, entry: RecordedCall, args: tuple[Any, ...], out: Any) -> None:
        """A prediction minus a target, as in a loss written by hand."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return
        given, target = (args[0], args[1]) if args[0].requires_grad else (args[1], args[0])
        if not given.requires_grad or target.requires_grad or not isinstance(out, Tensor) or given.numel() == 0:
            return
        if len(self.errors) >= 50 or target.numel() == 0:
            return
        note = place_of(entry) | {
            "input": describe(given),
            "target": describe(target),
            "out_shape": list(out.shape),
            "grown": out.numel() > max(given.numel(), target.numel()),
            "producer": self._history.producer(given),
            "target_producer": self._history.producer(target),
            "target_history": sorted(self._history.names(target, 12))[:12],
        }
        note |= _bounds(given, target)
        note["pinned_low"], note["pinned_high"] = _pinned(given)
        if target.dim() and len(target) > 1:
            note["target_variance"] = float(target.detach().float().var(0, correction=0).mean())
        self.errors.append(note)

    def product(self, entry: RecordedCall, args: tuple[Any, ...], out: Any) -> None:
        """A log-probability times something without a gradient: an advantage, or a target."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return
        given, other = (args[0], args[1]) if args[0].requires_grad else (args[1], args[0])
        if not given.requires_grad or other.requires_grad or other.numel() < 2 or len(self.products) >= 50:
            return
        names = self._history.names(given, 40)
        if not names & {"log_softmax", "logsumexp", "log_prob", "log", "logsigmoid", "exp", "cross_entropy"}:
            return
        values = sampled(other).float()
        self.products.append(
            place_of(entry)
            | {
                "history": sorted(names & {"log_softmax", "log_prob", "exp", "log", "logsumexp", "cross_entropy"}),
                "other": describe(other),
                "other_binary": bool(((values == 0) | (values == 1)).all()),
                "grown": isinstance(out, Tensor) and out.numel() > max(given.numel(), other.numel()),
            }
        )

    def ratio(self, entry: RecordedCall, out: Any) -> None:
        """exp of a difference of log-probabilities: an importance ratio."""
        if self._history.recorder is None or not entry.inputs or not isinstance(out, Tensor) or len(self.ratios) >= 50:
            return
        before = self._history.recorder.entries[entry.inputs[0]]
        nearest = [past.name for past in self._history.recorder.history(before.index, 4)]
        passed = before.name in ("sub", "clamp", "cumsum", "sum", "mean") or before.name in VIEWS
        if not passed or "sub" not in nearest or not entry.out_grad:
            return
        names = {past.name for past in self._history.recorder.history(before.index, 60)}
        if not names & {"log_softmax", "log_prob", "logsumexp", "gather", "log"}:
            return
        values = sampled(out).float()
        self.ratios.append(
            place_of(entry)
            | {
                "largest": float(values.max()),
                "mean": float(values.mean()),
                "kl": float((values - 1 - values.log()).mean()),
                "count": values.numel(),
            }
        )


def _bounds(given: Tensor, target: Tensor) -> dict[str, Any]:
    """Which share of the targets lies outside the range the predictions have."""
    if not target.is_floating_point() or not given.is_floating_point():
        target = target.float()
    low, high = float(given.min()), float(given.max())
    goals = sampled(target).float()
    return {"above": float((goals > high).float().mean()), "below": float((goals < low).float().mean())}


def _pinned(given: Tensor) -> tuple[float, float]:
    """Which share of the predictions sits exactly at, or right by, the lowest and the highest one."""
    values = sampled(given).float()
    low, high = values.min(), values.max()
    slack = (high - low).clamp_min(1e-12) * 1e-3
    return float((values <= low + slack).float().mean()), float((values >= high - slack).float().mean())
