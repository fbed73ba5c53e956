"""What a look writes down about single calls on the tape: losses, activations, embeddings, softmaxes, errors by hand.

Each note is a plain dictionary of numbers and names; conclusions are drawn elsewhere. A note is taken right after the
call, while its tensors are alive.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.watch.function_recorder import tensors_in
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.tensor_summary import as_distribution, describe, label_counts, rows_of, sampled

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.function_recorder import FunctionRecorder, RecordedCall

CLASS_LOSSES = {"cross_entropy", "nll_loss", "nll_loss2d"}
BINARY_LOSSES = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
DISTANCE_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
OTHER_LOSSES = {
    "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "ctc_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss", "cosine_embedding_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss",
}  # fmt: skip
LOSSES = CLASS_LOSSES | BINARY_LOSSES | DISTANCE_LOSSES | OTHER_LOSSES

WEIGHT_LAYERS = {
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "matmul", "bilinear", "mm", "addmm",
    "bmm", "einsum", "__rmatmul__",
}  # fmt: skip
_ARITHMETIC = WEIGHT_LAYERS | {"mul", "add", "sub", "div", "pow", "exp", "sum", "square", "prod", "cumsum", "norm"}
ACTIVATIONS = {
    "relu", "relu_", "leaky_relu", "elu", "gelu", "silu", "sigmoid", "sigmoid_", "tanh", "tanh_", "hardtanh",
    "softplus", "relu6", "hardswish", "mish", "selu", "threshold", "clamp_min", "clamp",
}  # fmt: skip
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}

VIEWS = {
    "view", "reshape", "squeeze", "unsqueeze", "flatten", "permute", "transpose", "contiguous", "getitem", "float",
    "to", "type", "double", "half", "bfloat16", "expand", "expand_as", "view_as", "t", "T", "mT", "movedim", "clone",
    "swapaxes", "ravel", "unflatten", "narrow", "select", "requires_grad_", "detach", "type_as", "squeeze_", "chunk",
    "split", "unbind", "stack", "cat", "long",
}  # fmt: skip
"""Calls that pass values on as they are."""

RISKY = {
    "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "div", "norm", "pow", "acos", "asin", "acosh", "atanh", "exp",
    "expm1", "reciprocal", "std", "var", "normalize", "cosine_similarity", "cdist", "where", "logit", "logsumexp",
    "cumprod", "prod", "tan", "erfinv", "atan2", "lgamma", "digamma", "linalg_inv", "inverse", "cholesky",
    "linalg_cholesky", "slogdet", "logdet", "pairwise_distance", "dist", "std_mean", "softmax",
}  # fmt: skip
"""Operations that are not defined everywhere, or whose derivative is not."""
_PARTIAL = (RISKY - {"where", "softmax", "cdist", "dist"}) | {
    "rdiv",
    "rpow",
    "mean",
    "var_mean",
    "median",
    "log_softmax",
}
"""Operations that can make something non-finite out of finite values; the mean of nothing is one."""


TARGETS_KEPT = 4
"""Losses at the end of a step whose targets later questions may need."""
_MOST_ORDERED = 1 << 20
_orders: list[tuple[int, weakref.ref[Tensor]]] = []
"""The permutations that rows were picked by, numbered."""


class CallFacts:
    """The notes of one look."""

    def __init__(self, parameter_id: Callable[[Tensor], int | None]) -> None:
        self.losses: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.layers: list[dict[str, Any]] = []
        self.activations: list[dict[str, Any]] = []
        self.embeddings: list[dict[str, Any]] = []
        self.softmaxes: list[dict[str, Any]] = []
        self.products: list[dict[str, Any]] = []
        self.ratios: list[dict[str, Any]] = []
        self.risky: list[dict[str, Any]] = []
        self.norms: list[dict[str, Any]] = []
        self.folded_ids: list[dict[str, Any]] = []
        self.overflows: list[dict[str, Any]] = []
        self.orders: list[dict[str, Any]] = []
        self.targets: dict[int, Tensor] = {}
        """The values of the targets of the last loss calls, by their places on the tape, while the look lasts."""
        self._parameter_id = parameter_id
        self.tape: FunctionRecorder | None = None

    def as_facts(self) -> dict[str, Any]:
        """Everything, for the run folder; long lists are cut."""
        lists = {key: value[:200] for key, value in vars(self).items() if isinstance(value, list) and value}
        return dict(lists)

    def take(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Look at one call."""
        name = entry.name
        if name in ("mul", "div") and len(args) > 1:
            number = next((value for value in args if isinstance(value, (int, float))), None)
            if number:
                entry.note["constant"] = float(number) if name == "mul" else 1.0 / number
        with WithoutHooks():
            if name in LOSSES:
                self._loss(entry, args, kwargs, out)
            elif name in ACTIVATIONS and isinstance(out, Tensor) and out.is_floating_point():
                self._activation(entry, out)
            elif name in WEIGHT_LAYERS or name in RECURRENT:
                self._layer(entry, args, kwargs, out)
            elif name == "embedding":
                self._embedding(entry, args, kwargs)
            elif name in ("softmax", "log_softmax"):
                self._softmax(entry, args, kwargs, out)
            elif name == "scaled_dot_product_attention":
                self._attention(entry, args, kwargs, out)
            elif name in ("sub", "rsub"):
                self._difference(entry, args, out)
            elif name == "mul":
                self._product(entry, args, out)
            elif name == "exp":
                self._ratio(entry, out)
            elif name in NORMS:
                self._norm(entry, args, kwargs)
            elif name in ("clamp", "remainder", "fmod", "__mod__", "clip"):
                self._folded(entry, args, out)
            elif name in ("getitem", "index_select"):
                self._order(args, kwargs)
            if entry.out_dtype == "float16" and isinstance(out, Tensor):
                self._overflow(entry, args, out)
            if not entry.out_grad and entry.name.rstrip("_") in _PARTIAL:
                self._domain(entry, args, kwargs, out)
            if name in RISKY and entry.out_grad and isinstance(out, Tensor) and out.is_floating_point():
                self._risk(entry, args, out)

    def _order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rows that are picked by a permutation or by a part of one: which permutation, and whether it is a new one."""
        index = next((v for v in (*args[1:], *kwargs.values()) if isinstance(v, Tensor)), None)
        if index is None or index.dtype is not torch.int64 or index.dim() != 1 or self.orders:
            return
        order = index._base if index._base is not None else index
        if order.dim() != 1 or not 8 <= order.numel() <= _MOST_ORDERED:
            return
        number = next((number for number, ref in _orders if ref() is order), None)
        if number is None:
            if not torch.equal(order.sort().values, torch.arange(order.numel(), device=order.device)):
                return
            number = _orders[-1][0] + 1 if _orders else 0
            _orders[:] = [*[held for held in _orders if held[1]() is not None][-16:], (number, weakref.ref(order))]
        print_ = hash(tuple(order[:32].tolist()))
        self.orders.append({"length": order.numel(), "print": print_, "number": number})

    def _weight(self, tensor: Tensor) -> int | None:
        """The number of the parameter a tensor is, or is a view of."""
        number = self._parameter_id(tensor)
        if number is None and self.tape is not None and (maker := self.tape.maker(tensor)) is not None:
            entry = self.tape.entries[maker]
            if entry.name in VIEWS and len(entry.parameters) == 1:
                return entry.parameters[0]
        return number

    def producer(self, tensor: Any) -> dict[str, Any] | None:
        """The call that gave a tensor its values, views and copies passed over."""
        if self.tape is None or not isinstance(tensor, Tensor):
            return None
        index = self.tape.maker(tensor)
        for _ in range(50):
            if index is None:
                return None
            entry = self.tape.entries[index]
            if entry.name not in VIEWS or not entry.inputs:
                return {"op": entry.name, "site": entry.site, "module": entry.module, "index": entry.index}
            index = entry.inputs[0]
        return None

    def history_names(self, tensor: Any, limit: int = 60) -> set[str]:
        """The names of the calls a tensor was made from."""
        if self.tape is None or not isinstance(tensor, Tensor):
            return set()
        return {entry.name for entry in self.tape.history(self.tape.maker(tensor), limit)}

    def _place(self, entry: RecordedCall) -> dict[str, Any]:
        return {"op": entry.name, "site": entry.site, "module": entry.module, "index": entry.index}

    def _loss(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = kwargs.get("input", args[0] if args else None)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if not isinstance(given, Tensor) or not isinstance(target, Tensor):
            return
        note = self._place(entry) | {
            "grad": entry.out_grad,
            "reduction": kwargs.get("reduction", "mean") if not isinstance(out, Tensor) or out.dim() == 0 else "none",
            "input": describe(given),
            "target": describe(target),
            "producer": self.producer(given),
            "target_producer": self.producer(target),
            "same_shape": list(given.shape) == list(target.shape),
            "value": float(out) if isinstance(out, Tensor) and out.dim() == 0 else None,
        }
        self.targets[entry.index] = target.detach()
        if len(self.targets) > TARGETS_KEPT:
            del self.targets[next(iter(self.targets))]
        note["target_from_model"] = bool(self.history_names(target) & (WEIGHT_LAYERS | RECURRENT))
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

    def _layer(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        first = next((value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)), None)
        made = out[0] if isinstance(out, tuple) and out else out
        if first is None or not isinstance(made, Tensor) or not made.is_floating_point():
            return
        given = [value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)]
        parameter = next(
            (n for value in reversed(given) if value.dim() > 1 and (n := self._weight(value)) is not None), None
        )
        if parameter is None and entry.name not in RECURRENT:
            return  # a product of activations, as in attention
        note = self._place(entry) | {
            "parameter": parameter,
            "in_std": _std(first),
            "fan_in": _fan_in(entry.name, first, given),
            "in_mean": float(sampled(first).float().mean()) if first.is_floating_point() else None,
            "out_std": _std(made),
            "out_largest": float(sampled(made).float().abs().max()) if made.numel() else 0.0,
            "in_grad": first.requires_grad,
            "shape": list(made.shape),
            "dtype": entry.out_dtype,
            "grad": entry.out_grad,
        }
        self.layers.append(note)

    def _activation(self, entry: RecordedCall, out: Tensor) -> None:
        note = self._place(entry) | {"shape": list(out.shape), "std": _std(out), "grad": entry.out_grad}
        values = sampled(out).float()
        if not values.numel():
            return
        if entry.name in ("sigmoid", "sigmoid_"):
            note["saturated"] = float(((values < 0.01) | (values > 0.99)).float().mean())
        elif entry.name in ("tanh", "tanh_", "hardtanh"):
            note["saturated"] = float((values.abs() > 0.99).float().mean())
        elif entry.name in ("relu", "relu_", "relu6", "threshold", "clamp_min") and out.dim() > 1:
            rows = rows_of(out, 1 if out.dim() >= 4 else -1)
            note["zeros"] = float((values == 0).float().mean())
            note["units"] = rows.shape[1]
            note["dead"] = int((rows <= 0).all(0).sum())
            note["rows"] = len(rows)
            note["dead_units"] = (rows <= 0).all(0).nonzero().reshape(-1)[:4096].tolist()
        self.activations.append(note)

    def _embedding(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input", args[0] if args else None)
        table = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if not isinstance(ids, Tensor) or not isinstance(table, Tensor) or not ids.numel():
            return
        entry.note["ids"] = ids.detach()
        self.embeddings.append(
            self._place(entry)
            | {"rows": table.shape[0], "lowest": int(ids.min()), "highest": int(ids.max()), "shape": list(ids.shape)}
        )

    def _softmax(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = kwargs.get("input", args[0] if args else None)
        if not isinstance(given, Tensor) or not isinstance(out, Tensor) or given.dim() == 0 or not given.numel():
            return
        dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
        rows = rows_of(given, dim if isinstance(dim, int) else -1).float()
        note = self._place(entry) | {"shape": list(given.shape), "dim": dim, "grad": entry.out_grad}
        note["fully_masked_rows"] = int((rows == -math.inf).all(1).sum())
        finite = rows[torch.isfinite(rows)]
        note["largest"] = float(finite.abs().max()) if finite.numel() else None
        note["is_distribution"] = bool(
            rows.shape[1] > 1 and (rows >= 0).all() and ((rows.sum(1) - 1).abs() < 1e-3).all()
        )
        if out.numel():
            chances = rows_of(out, dim if isinstance(dim, int) else -1).float()
            chances = chances if entry.name == "softmax" else chances.exp()
            note["entropy"] = float(torch.special.entr(chances.clamp_min(0)).sum(1).nanmean())
        note["producer"] = self.producer(given)
        self.softmaxes.append(note)

    def _attention(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        query, key = args[0], args[1]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        note = self._place(entry) | {"shape": list(query.shape), "causal": bool(kwargs.get("is_causal", False))}
        logits = query.detach()[:2].float() @ key.detach()[:2].float().transpose(-1, -2) / math.sqrt(query.shape[-1])
        note["largest"] = float(logits.abs().max()) if logits.numel() else None
        note["fully_masked_rows"] = 0
        if isinstance(mask, Tensor):
            blocked = ~mask if mask.dtype is torch.bool else mask == -math.inf
            note["fully_masked_rows"] = int(blocked.all(-1).sum())
        chances = torch.softmax(logits, -1)
        note["entropy"] = float(torch.special.entr(chances).sum(-1).mean())
        self.softmaxes.append(note)

    def _difference(self, entry: RecordedCall, args: tuple[Any, ...], out: Any) -> None:
        """A prediction minus a target, as in a loss written by hand."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return
        given, target = (args[0], args[1]) if args[0].requires_grad else (args[1], args[0])
        if not given.requires_grad or target.requires_grad or not isinstance(out, Tensor) or given.numel() == 0:
            return
        if len(self.errors) >= 50 or target.numel() == 0:
            return
        note = self._place(entry) | {
            "input": describe(given),
            "target": describe(target),
            "out_shape": list(out.shape),
            "grown": out.numel() > max(given.numel(), target.numel()),
            "producer": self.producer(given),
            "target_producer": self.producer(target),
            "target_history": sorted(self.history_names(target, 12))[:12],
        }
        note |= _bounds(given, target)
        note["pinned_low"], note["pinned_high"] = _pinned(given)
        if target.dim() and len(target) > 1:
            note["target_variance"] = float(target.detach().float().var(0, correction=0).mean())
        self.errors.append(note)

    def _product(self, entry: RecordedCall, args: tuple[Any, ...], out: Any) -> None:
        """A log-probability times something without a gradient: an advantage, or a target."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return
        given, other = (args[0], args[1]) if args[0].requires_grad else (args[1], args[0])
        if not given.requires_grad or other.requires_grad or other.numel() < 2 or len(self.products) >= 50:
            return
        names = self.history_names(given, 40)
        if not names & {"log_softmax", "logsumexp", "log_prob", "log", "logsigmoid", "exp", "cross_entropy"}:
            return
        values = sampled(other).float()
        self.products.append(
            self._place(entry)
            | {
                "history": sorted(names & {"log_softmax", "log_prob", "exp", "log", "logsumexp", "cross_entropy"}),
                "other": describe(other),
                "other_binary": bool(((values == 0) | (values == 1)).all()),
                "grown": isinstance(out, Tensor) and out.numel() > max(given.numel(), other.numel()),
            }
        )

    def _ratio(self, entry: RecordedCall, out: Any) -> None:
        """exp of a difference of log-probabilities: an importance ratio."""
        if self.tape is None or not entry.inputs or not isinstance(out, Tensor) or len(self.ratios) >= 50:
            return
        before = self.tape.entries[entry.inputs[0]]
        nearest = [past.name for past in self.tape.history(before.index, 4)]
        passed = before.name in ("sub", "clamp", "cumsum", "sum", "mean") or before.name in VIEWS
        if not passed or "sub" not in nearest or not entry.out_grad:
            return
        names = {past.name for past in self.tape.history(before.index, 60)}
        if not names & {"log_softmax", "log_prob", "logsumexp", "gather", "log"}:
            return
        values = sampled(out).float()
        self.ratios.append(
            self._place(entry)
            | {
                "largest": float(values.max()),
                "mean": float(values.mean()),
                "kl": float((values - 1 - values.log()).mean()),
                "count": values.numel(),
            }
        )

    def _norm(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
        if not isinstance(given, Tensor) or given.dim() < 2:
            return
        note = self._place(entry) | {"shape": list(given.shape), "in_std": _std(given), "grad": entry.out_grad}
        if entry.name == "batch_norm":
            training = kwargs.get("training", args[5] if len(args) > 5 else False)
            note["training"] = bool(training)
            note["per_statistic"] = given.numel() // max(1, given.shape[1])
        self.norms.append(note)

    def _folded(self, entry: RecordedCall, args: tuple[Any, ...], out: Any) -> None:
        """Integer ids that were forced into a range."""
        if not args or not isinstance(args[0], Tensor) or args[0].is_floating_point() or args[0].dtype is torch.bool:
            return
        if isinstance(out, Tensor) and out.shape == args[0].shape and out.numel() > 1 and not out.is_floating_point():
            changed = float((out != args[0]).float().mean())
            if changed:
                self.folded_ids.append(
                    self._place(entry)
                    | {"changed": changed, "highest": int(args[0].max()), "kept": int(out.max())}
                    | {"source": self.producer(args[0])}
                )

    def _overflow(self, entry: RecordedCall, args: tuple[Any, ...], out: Tensor) -> None:
        """A half-precision result beyond its range, from finite inputs."""
        if entry.name not in _ARITHMETIC or len(self.overflows) >= 20 or not bool(torch.isinf(out).any()):
            return
        given = [value for value in args if isinstance(value, Tensor) and value.is_floating_point()]
        if given and all(bool(torch.isfinite(value).all()) for value in given):
            largest = max(float(sampled(value).float().abs().max()) for value in given if value.numel())
            self.overflows.append(
                self._place(entry) | {"infinite": int(torch.isinf(out).sum()), "of": out.numel(), "largest_in": largest}
            )

    def _domain(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Whether an operation without a graph made something non-finite, and whether what it was given was finite."""
        made = next((value for value in tensors_in(out) if value.is_floating_point()), None)
        if made is None or made.layout is not torch.strided or made.is_meta:
            return
        given = [value for value in (*tensors_in(args), *tensors_in(kwargs)) if value.is_floating_point()]
        bad = not bool(torch.isfinite(made).all())
        note: dict[str, Any] = {"bad": bad, "given_finite": None}
        if bad:
            note |= {"nan": int(torch.isnan(made).sum()), "inf": int(torch.isinf(made).sum()), "of": made.numel()}
            kept = [value for value in given if value is not made]
            if kept and len(kept) == len(given):  # else it was written over
                note["given_finite"] = all(bool(torch.isfinite(value).all()) for value in given)
                edge = sampled(kept[-1 if entry.name == "div" else 0]).float()
                note["lowest"] = _finite(edge.min()) if edge.numel() else None
        entry.note["domain"] = note

    def _risk(self, entry: RecordedCall, args: tuple[Any, ...], out: Tensor) -> None:
        """How near an operation came to where it, or its derivative, is not defined."""
        if len(self.risky) >= 150 or not args:
            return
        if entry.name == "pow" and len(args) > 1 and _is_whole(args[1]):
            return  # a square has a derivative everywhere
        if entry.name == "div":
            edge = args[1] if len(args) > 1 else None
        elif entry.name in ("norm", "normalize", "std", "var", "where", "cdist", "softmax"):
            edge = out
        else:
            edge = args[0]
        if not isinstance(edge, Tensor) or not edge.is_floating_point() or edge.numel() == 0:
            return
        values = sampled(edge).float()
        self.risky.append(
            self._place(entry)
            | {
                "lowest": _finite(values.min()),
                "highest": _finite(values.max()),
                "nearest_zero": _finite(values.abs().min()),
                "out_nonfinite": int((~torch.isfinite(sampled(out))).sum()),
                "in_nonfinite": int((~torch.isfinite(sampled(args[0]))).sum()) if isinstance(args[0], Tensor) else 0,
                "dtype": entry.out_dtype,
            }
        )


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()


def _fan_in(name: str, first: Tensor, given: list[Tensor]) -> int | None:
    """How many inputs each output of a layer adds up."""
    if name.startswith("conv") and len(given) > 1:
        return math.prod(given[1].shape[1:])
    return first.shape[-1] if first.dim() else None


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _std(tensor: Tensor) -> float | None:
    values = sampled(tensor)
    if not values.is_floating_point() or values.numel() < 2:
        return None
    return _finite(values.float().std(correction=0))


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
