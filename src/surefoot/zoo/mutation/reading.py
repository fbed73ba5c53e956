"""What the operators know about a training script: its optimizers, its loop, its loss, its evaluation.

All of it is read off the syntax tree by the names that PyTorch gives. A script that hides them behind other names (a
trainer class, `getattr`) offers fewer places to change.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.zoo.mutation.source import last_name

if TYPE_CHECKING:
    from surefoot.zoo.mutation.source import Script

ADAPTIVE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
OPTIMIZERS = (*ADAPTIVE, "SGD", "RMSprop", "Adagrad", "Adadelta", "LBFGS")
CROSS_ENTROPY = ("cross_entropy", "CrossEntropyLoss")
BINARY_LOGITS = ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss")
BINARY = ("binary_cross_entropy", "BCELoss")
SQUARED = ("mse_loss", "MSELoss")
REGRESSION = (*SQUARED, "l1_loss", "L1Loss", "smooth_l1_loss", "SmoothL1Loss", "huber_loss", "HuberLoss")
LOSSES = (*CROSS_ENTROPY, *BINARY_LOGITS, *BINARY, *REGRESSION, "nll_loss", "NLLLoss", "kl_div", "KLDivLoss")
LAYERS = ("Linear", "Conv1d", "Conv2d", "Embedding", "LSTM", "GRU", "RNN", "Bilinear", "ConvTranspose2d")
MODE_LAYERS = ("Dropout", "Dropout1d", "Dropout2d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
SCHEDULER_MODULE = "lr_scheduler"


@dataclass(frozen=True)
class TrainingLoss:
    """A call of a loss function in training."""

    call: ast.Call
    prediction: ast.expr
    target: ast.expr
    kind: str
    """The name that PyTorch gives the function or its class."""
    settings: ast.Call
    """The call that takes `reduction` and the other settings: of the function, or of its class."""


def optimizer_calls(script: Script) -> list[ast.Call]:
    """Where optimizers are made."""
    return script.calls(*OPTIMIZERS)


def optimizer_statements(script: Script, method: str) -> list[ast.Expr]:
    """Statements that call a method of an optimizer, and nothing else."""
    schedulers = _scheduler_names(script)
    found = []
    for call in script.calls(method):
        owner = script.words(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        statement = script.statement(call)
        alone = isinstance(statement, ast.Expr) and statement.value is call
        other = owner in schedulers or "sched" in owner.lower() or "scaler" in owner.lower() or not owner
        if alone and not other and isinstance(statement, ast.Expr):
            found.append(statement)
    return found


def scheduler_statements(script: Script) -> list[ast.Expr]:
    """Statements that step a schedule."""
    schedulers = _scheduler_names(script)
    statements = [script.statement(call) for call in script.calls("step") if _owner(script, call) in schedulers]
    return [held for held in statements if isinstance(held, ast.Expr)]


def scheduler_calls(script: Script) -> list[ast.Call]:
    """Where schedules are made."""
    calls = [node for node in script.nodes() if isinstance(node, ast.Call)]
    named = {alias.asname or alias.name for alias in _imported(script, SCHEDULER_MODULE)}
    return [
        call
        for call in calls
        if (isinstance(call.func, ast.Attribute) and last_name(call.func.value) == SCHEDULER_MODULE)
        or (isinstance(call.func, ast.Name) and call.func.id in named)
    ]


def _scheduler_names(script: Script) -> set[str]:
    """The names that hold schedules."""
    found: set[str] = set()
    for call in scheduler_calls(script):
        statement = script.statement(call)
        if isinstance(statement, ast.Assign) and statement.value is call:
            found.update(script.words(target) for target in statement.targets)
    return found


def model_of(script: Script, optimizer: ast.Call) -> str:
    """The model whose `parameters()` an optimizer takes as they are; empty if it takes others."""
    first = optimizer.args[0] if optimizer.args else None
    plain = isinstance(first, ast.Call) and last_name(first.func) == "parameters" and not first.args
    return _owner(script, first) if plain and isinstance(first, ast.Call) else ""


def backward_statements(script: Script) -> list[ast.Expr]:
    """Statements that call `backward`, and nothing else."""
    statements = [script.statement(call) for call in script.calls("backward")]
    return [held for held in statements if isinstance(held, ast.Expr)]


def training_losses(script: Script, *kinds: str) -> list[TrainingLoss]:
    """Calls of a known loss function with a prediction and a target, outside of evaluations."""
    made = {}
    for call in script.calls(*(kind for kind in LOSSES if kind[0].isupper())):
        statement = script.statement(call)
        if isinstance(statement, ast.Assign) and statement.value is call:
            made.update({script.words(target): call for target in statement.targets})
    found = []
    for call in (node for node in script.nodes() if isinstance(node, ast.Call)):
        settings = made.get(script.words(call.func), call)
        kind = last_name(settings.func)
        is_function = settings is not call or kind[:1].islower()
        if kind in (kinds or LOSSES) and is_function and len(call.args) >= 2 and not in_evaluation(script, call):
            found.append(TrainingLoss(call, call.args[0], call.args[1], kind, settings))
    return found


def model_calls(script: Script, *, evaluating: bool) -> list[ast.Call]:
    """Calls of a model that an optimizer trains, with one argument or more, in evaluations or outside of them."""
    models = {name for name in (model_of(script, call) for call in optimizer_calls(script)) if name}
    calls = [node for node in script.nodes() if isinstance(node, ast.Call) and node.args]
    return [call for call in calls if script.words(call.func) in models and in_evaluation(script, call) is evaluating]


def in_evaluation(script: Script, node: ast.AST) -> bool:
    """Whether no gradient is taken here: under `torch.no_grad()`, or in a function that is decorated with it."""
    for held in script.surrounding(node):
        marks: list[ast.expr] = []
        if isinstance(held, ast.With):
            marks = [item.context_expr for item in held.items]
        elif isinstance(held, ast.FunctionDef):
            marks = held.decorator_list
        for mark in marks:
            if last_name(mark.func if isinstance(mark, ast.Call) else mark) in ("no_grad", "inference_mode"):
                return True
    return False


def loop_around(script: Script, node: ast.AST) -> ast.For | ast.While | None:
    """The innermost loop that a node is in."""
    return next((held for held in script.surrounding(node) if isinstance(held, (ast.For, ast.While))), None)


def layer_count(script: Script) -> int:
    """How many layers with weights are written out."""
    return len(script.calls(*LAYERS))


def imports_torch(script: Script) -> bool:
    """Whether the name `torch` is there."""
    imports = [node for node in ast.walk(script.tree) if isinstance(node, ast.Import)]
    return any((alias.asname or alias.name.split(".")[0]) == "torch" for node in imports for alias in node.names)


def _imported(script: Script, module: str) -> list[ast.alias]:
    imports = [node for node in ast.walk(script.tree) if isinstance(node, ast.ImportFrom)]
    return [alias for node in imports if (node.module or "").endswith(module) for alias in node.names]


def _owner(script: Script, call: ast.Call) -> str:
    return script.words(call.func.value) if isinstance(call.func, ast.Attribute) else ""
