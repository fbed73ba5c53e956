"""Operators on the loss: another function, reduction, sign, order of arguments, or targets."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from surefoot.zoo.mutation import Operator
from surefoot.zoo.mutation.reading import (
    BINARY_LOGITS,
    CROSS_ENTROPY,
    REGRESSION,
    backward_statements,
    imports_torch,
    loop_around,
    training_losses,
)
from surefoot.zoo.mutation.source import Edit, keyword, last_name

if TYPE_CHECKING:
    from surefoot.zoo.mutation.reading import TrainingLoss
    from surefoot.zoo.mutation.source import Script

_MADE = ("ones", "zeros", "full", "ones_like", "zeros_like", "arange")
"""Targets that a script makes itself are not labels of rows."""


def _losses_in_loop(script: Script, *kinds: str) -> list[TrainingLoss]:
    """The training losses of the given kinds that a loop reaches directly, in a script that has the name `torch`."""
    if not imports_torch(script):
        return []
    return [held for held in training_losses(script, *kinds) if loop_around(script, held.call)]


def _wrap_prediction(script: Script, kinds: tuple[str, ...], before: str, after: str) -> list[Edit]:
    losses = _losses_in_loop(script, *kinds)
    return [script.replace(held.prediction, f"{before}{script.words(held.prediction)}{after}") for held in losses]


def _softmax_first(script: Script, _: float) -> list[Edit]:
    return _wrap_prediction(script, CROSS_ENTROPY, "torch.softmax(", ", dim=1)")


def _sigmoid_first(script: Script, _: float) -> list[Edit]:
    return _wrap_prediction(script, BINARY_LOGITS, "torch.sigmoid(", ")")


def _bound_output(script: Script, _: float) -> list[Edit]:
    return _wrap_prediction(script, REGRESSION, "torch.sigmoid(", ")")


def _detach_output(script: Script, _: float) -> list[Edit]:
    losses = _losses_in_loop(script)[:1]
    return [script.replace(held.prediction, f"{script.words(held.prediction)}.detach()") for held in losses]


def _logits_into_nll(script: Script, _: float) -> list[Edit]:
    edits = []
    for held in _losses_in_loop(script, *CROSS_ENTROPY):
        call = held.settings
        if keyword(call, "label_smoothing") is None:
            other = {"cross_entropy": "nll_loss", "CrossEntropyLoss": "NLLLoss"}[held.kind]
            edits.append(script.replace(call.func, script.words(call.func).replace(held.kind, other)))
    return edits


def _change_loss(script: Script, sign_or_factor: str) -> list[Edit]:
    """The first loss that is differentiated by name, with something before it."""
    for statement in backward_statements(script):
        call = statement.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
        ):
            return [script.replace(call.func.value, f"({sign_or_factor}{call.func.value.id})")]
    return []


def _flip_sign(script: Script, _: float) -> list[Edit]:
    return _change_loss(script, "-")


def _shrink_loss(script: Script, strength: float) -> list[Edit]:
    return _change_loss(script, f"{strength:g} * ")


def _sum_reduction(script: Script, _: float) -> list[Edit]:
    edits = []
    for held in _losses_in_loop(script, *CROSS_ENTROPY, *BINARY_LOGITS, *REGRESSION):
        call = held.settings
        if keyword(call, "reduction") is None:
            end = script.span(call)[1] - 1
            comma = ", " if call.args or call.keywords else ""
            edits.append(Edit(end, end, f'{comma}reduction="sum"'))
    return edits


def _swap_arguments(script: Script, kinds: tuple[str, ...]) -> list[Edit]:
    edits = []
    for held in _losses_in_loop(script, *kinds):
        edits += [
            script.replace(held.prediction, script.words(held.target)),
            script.replace(held.target, script.words(held.prediction)),
        ]
    return edits


def _swap_squared(script: Script, _: float) -> list[Edit]:
    return _swap_arguments(script, REGRESSION)


def _swap_binary(script: Script, _: float) -> list[Edit]:
    losses = _losses_in_loop(script, *BINARY_LOGITS)
    real = [held for held in losses if not _is_made(held.target)]
    return _swap_arguments(script, BINARY_LOGITS) if real and len(real) == len(losses) else []


def _is_made(target: ast.expr) -> bool:
    return isinstance(target, ast.Call) and last_name(target.func) in _MADE


def _labels(script: Script, *kinds: str) -> list[TrainingLoss]:
    """Losses whose target is one name or one indexed name: the labels of the batch's rows."""
    losses = _losses_in_loop(script, *kinds)
    return [held for held in losses if isinstance(held.target, (ast.Name, ast.Subscript))]


def _shuffle_labels(script: Script, _: float) -> list[Edit]:
    edits = []
    for held in _labels(script, *CROSS_ENTROPY, *BINARY_LOGITS, *REGRESSION):
        words = script.words(held.target)
        edits.append(script.replace(held.target, f"{words}[torch.randperm(len({words}))]"))
    return edits


def _shift_labels(script: Script, _: float) -> list[Edit]:
    losses = _labels(script, *CROSS_ENTROPY, *BINARY_LOGITS)
    return [script.replace(held.target, f"{script.words(held.target)}.roll(1, 0)") for held in losses]


def _labels_from_one(script: Script, _: float) -> list[Edit]:
    losses = _labels(script, *CROSS_ENTROPY)
    return [script.replace(held.target, f"{script.words(held.target)} + 1") for held in losses]


def _one_label(script: Script, _: float) -> list[Edit]:
    losses = _labels(script, *CROSS_ENTROPY)
    return [script.replace(held.target, f"torch.zeros_like({script.words(held.target)})") for held in losses]


def _scale_targets(script: Script, strength: float) -> list[Edit]:
    losses = _labels(script, *REGRESSION)
    return [script.replace(held.target, f"{strength:g} * {script.words(held.target)}") for held in losses]


def _broadcast(script: Script, _: float) -> list[Edit]:
    """A squeeze of the prediction is dropped, so that (N, 1) meets (N)."""
    if not imports_torch(script):
        return []
    for held in training_losses(script, *REGRESSION):
        call = held.prediction
        squeezed = isinstance(call, ast.Call) and last_name(call.func) == "squeeze"
        if squeezed and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            return [script.replace(call, script.words(call.func.value))]
        target = held.target
        raised = isinstance(target, ast.Call) and last_name(target.func) == "unsqueeze"
        if raised and isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            return [script.replace(target, script.words(target.func.value))]
    if training_losses(script, *REGRESSION):
        for call in script.calls("squeeze"):
            if isinstance(script.statement(call), ast.Return) and isinstance(call.func, ast.Attribute):
                return [script.replace(call, script.words(call.func.value))]
    return []


def _weigh_term(script: Script, strength: float) -> list[Edit]:
    """The last term of a loss that is a sum of two or more."""
    for statement in backward_statements(script):
        loop = loop_around(script, statement)
        name = script.words(statement.value).split(".")[0]
        for node in script.nodes(loop) if loop is not None else []:
            held = node.value if isinstance(node, ast.Assign) and script.words(node.targets[0]) == name else None
            if isinstance(held, ast.BinOp) and isinstance(held.op, ast.Add):
                return [script.replace(held.right, f"{strength:g} * ({script.words(held.right)})")]
    return []


def _drop_ignore_index(script: Script, _: float) -> list[Edit]:
    edits = []
    for held in training_losses(script, *CROSS_ENTROPY):
        given = keyword(held.settings, "ignore_index")
        if given is not None:
            edits.append(script.replace(given.value, "-100"))
    return edits


def _unshifted_targets(script: Script, _: float) -> list[Edit]:
    """The slice `[:, 1:]` of the ids, whose counterpart is `[:, :-1]`, becomes the same as that one."""
    subscripts = [node for node in script.nodes() if isinstance(node, ast.Subscript)]
    inputs = {script.words(held.value) for held in subscripts if script.words(held.slice) == ":, :-1"}
    targets = [held for held in subscripts if script.words(held.slice) == ":, 1:"]
    paired = [held for held in targets if script.words(held.value) in inputs and training_losses(script)]
    return [script.replace(held.slice, ":, :-1") for held in paired]


OPERATORS = (
    Operator(
        *("softmax-first", "softmax before cross-entropy", "cross-entropy in a loop"),
        ("loss.softmax-before-cross-entropy",),
        _softmax_first,
        "by construction",
    ),
    Operator(
        *("sigmoid-first", "sigmoid before BCE with logits", "BCE with logits in a loop"),
        ("loss.sigmoid-before-bce-logits",),
        _sigmoid_first,
        "by construction",
    ),
    Operator(
        *("bound-output", "a sigmoid before a regression loss", "regression loss in a loop"),
        ("loss.bounded-output",),
        _bound_output,
    ),
    Operator(
        *("detach-output", "the prediction is detached", "loss function in a loop"),
        ("optim.detached-graph", "optim.no-gradient", "optim.no-update"),
        _detach_output,
        "by construction",
        crashes=True,
    ),
    Operator(
        *("logits-into-nll", "NLL in place of cross-entropy", "cross-entropy in a loop"),
        ("loss.logits-into-probability-loss",),
        _logits_into_nll,
        "by construction",
    ),
    Operator(
        *("flip-sign", "the negative loss is minimised", "`loss.backward()`"),
        ("loss.sign-flipped",),
        _flip_sign,
        "by construction",
    ),
    Operator(
        *("shrink-loss", "the loss is multiplied", "`loss.backward()`"),
        ("optim.epsilon", "lr.too-low"),
        _shrink_loss,
        strengths=(1e-3, 1e-6),
        rescales_loss=True,
    ),
    Operator(
        *("sum-reduction", "the loss is a sum over the batch", "loss function with the default reduction"),
        ("loss.sum-reduction", "lr.too-high"),
        _sum_reduction,
        rescales_loss=True,
    ),
    Operator(
        *("swap-symmetric-arguments", "prediction and target change places", "regression loss in a loop"),
        (),
        _swap_squared,
        "harmless",
    ),
    Operator(
        *("swap-binary-arguments", "logits and labels change places", "BCE with logits on labels"),
        ("loss.logits-into-probability-loss", "loss.sign-flipped"),
        _swap_binary,
        "by construction",
    ),
    Operator(
        *("shuffle-labels", "the labels of a batch are permuted", "loss function on labels"),
        ("data.labels-uninformative",),
        _shuffle_labels,
        "by construction",
    ),
    Operator(
        *("shift-labels", "each row has the label of the row before", "classification loss on labels"),
        ("data.labels-uninformative",),
        _shift_labels,
        "by construction",
    ),
    Operator(
        *("labels-from-one", "labels count from 1", "cross-entropy on labels"),
        ("data.label-out-of-range",),
        _labels_from_one,
        "by construction",
        crashes=True,
    ),
    Operator(
        *("one-label", "all labels are 0", "cross-entropy on labels"),
        ("data.degenerate-batch", "data.labels-uninformative", "data.class-collapse"),
        _one_label,
        "by construction",
    ),
    Operator(
        *("scale-targets", "the targets are multiplied", "regression loss on targets of the data"),
        ("data.unscaled-target",),
        _scale_targets,
        strengths=(100.0, 10000.0),
        rescales_loss=True,
    ),
    Operator(
        *("broadcast", "predictions (N, 1) meet targets (N)", "regression loss with a squeeze"),
        ("loss.broadcast",),
        _broadcast,
        "by construction",
    ),
    Operator(
        *("weigh-term", "one term of the loss is multiplied", "loss that is a sum"),
        ("loss.term-dominates",),
        _weigh_term,
        strengths=(100.0, 10000.0),
        rescales_loss=True,
    ),
    Operator(
        *("drop-ignore-index", "padding counts in the loss", "`ignore_index`"),
        ("loss.padding-counted",),
        _drop_ignore_index,
        "by construction",
    ),
    Operator(
        *("unshifted-targets", "the targets are the inputs", "ids that are shifted by `[:, 1:]` and `[:, :-1]`"),
        ("loss.target-offset",),
        _unshifted_targets,
        "by construction",
    ),
)
