"""Operators on the calls of the training loop: dropped, moved, or in another mode."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from surefoot.zoo.mutation import Operator
from surefoot.zoo.mutation.reading import (
    MODE_LAYERS,
    backward_statements,
    in_evaluation,
    loop_around,
    model_calls,
    optimizer_statements,
    scheduler_statements,
)

if TYPE_CHECKING:
    from surefoot.zoo.mutation.source import Edit, Script


def _drop_zero_grad(script: Script, _: float) -> list[Edit]:
    return [script.drop(held) for held in optimizer_statements(script, "zero_grad") if loop_around(script, held)]


def _plain_steps(script: Script) -> list[ast.Expr]:
    """Steps without a closure, in a script without a gradient scaler."""
    if script.calls("GradScaler"):
        return []
    steps = optimizer_statements(script, "step")
    return [held for held in steps if isinstance(held.value, ast.Call) and not held.value.args]


def _drop_step(script: Script, _: float) -> list[Edit]:
    return [script.drop(held) for held in _plain_steps(script) if loop_around(script, held)]


def _drop_backward(script: Script, _: float) -> list[Edit]:
    return [script.drop(held) for held in backward_statements(script) if _plain_steps(script)]


def _zero_grad_before_step(script: Script, _: float) -> list[Edit]:
    steps = [held for held in _plain_steps(script) if script.calls("zero_grad")]
    return [script.before(held, script.words(held).replace(".step()", ".zero_grad()")) for held in steps]


def _step_before_backward(script: Script, _: float) -> list[Edit]:
    """In a block with one backward and one step, the two change places. Gradients must be cleared in between."""
    steps, backwards = _plain_steps(script), backward_statements(script)
    for step in steps:
        loop = loop_around(script, step)
        mine = [held for held in backwards if loop is not None and loop_around(script, held) is loop]
        cleared = [held for held in optimizer_statements(script, "zero_grad") if loop_around(script, held) is loop]
        if len(mine) == 1 and cleared and [held for held in steps if loop_around(script, held) is loop] == [step]:
            return [script.replace(mine[0], script.words(step)), script.replace(step, script.words(mine[0]))]
    return []


def _log_gradients(script: Script, _: float) -> list[Edit]:
    """The gradients are measured before each step, as logging does."""
    text = "[p.grad.norm().item() for g in {}.param_groups for p in g['params'] if p.grad is not None]"
    return [script.before(held, text.format(script.words(held).split(".step(")[0])) for held in _plain_steps(script)]


def _keep_gradient_tensors(script: Script, _: float) -> list[Edit]:
    statements = optimizer_statements(script, "zero_grad")
    plain = [held for held in statements if script.words(held).endswith(".zero_grad()")]
    return [script.replace(held, f"{script.words(held)[:-1]}set_to_none=False)") for held in plain]


def _drop_scheduler_step(script: Script, _: float) -> list[Edit]:
    return [script.drop(held) for held in scheduler_statements(script)]


def _scheduler_step_per_batch(script: Script, _: float) -> list[Edit]:
    for schedule in scheduler_statements(script):
        for step in _plain_steps(script):
            inner, outer = loop_around(script, step), loop_around(script, schedule)
            plain = isinstance(schedule.value, ast.Call) and not schedule.value.args
            around = list(script.surrounding(inner)) if inner is not None else []
            if outer is not None and outer in around and plain:
                return [script.after(step, script.words(schedule))]
    return []


def _mode_statements(script: Script, mode: str) -> list[ast.Expr]:
    """Statements `model.train()` or `model.eval()`, in a script whose layers depend on the mode."""
    if not script.calls(*MODE_LAYERS):
        return []
    statements = [script.statement(call) for call in script.calls(mode) if not call.args and not call.keywords]
    return [held for held in statements if isinstance(held, ast.Expr) and held.value in script.calls(mode)]


def _drop_train_mode(script: Script, _: float) -> list[Edit]:
    trains = _mode_statements(script, "train")
    evals = [held for held in _mode_statements(script, "eval") if _repeated(script, held)]
    return [script.drop(held) for held in trains if evals]


def _repeated(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement is in a loop, or in a function that a loop calls."""
    if loop_around(script, statement):
        return True
    functions = [held.name for held in script.surrounding(statement) if isinstance(held, ast.FunctionDef)]
    return any(loop_around(script, call) for call in script.calls(*functions))


def _train_in_eval_mode(script: Script, _: float) -> list[Edit]:
    trains = [held for held in _mode_statements(script, "train") if not in_evaluation(script, held)]
    return [script.replace(held, script.words(held).replace(".train()", ".eval()")) for held in trains]


def _drop_eval_mode(script: Script, _: float) -> list[Edit]:
    evals = _mode_statements(script, "eval")
    return [script.drop(held) for held in evals if model_calls(script, evaluating=True)]


def _clips(script: Script) -> list[ast.Expr]:
    statements = [script.statement(call) for call in script.calls("clip_grad_norm_")]
    return [held for held in statements if isinstance(held, ast.Expr)]


def _drop_clip(script: Script, _: float) -> list[Edit]:
    return [script.drop(held) for held in _clips(script)]


def _lower_clip(script: Script, strength: float) -> list[Edit]:
    limits = [call.args[1] for call in script.calls("clip_grad_norm_") if len(call.args) > 1]
    return [script.replace(limit, f"{strength:g} * {script.words(limit)}") for limit in limits]


def _drop_unscale(script: Script, _: float) -> list[Edit]:
    statements = [script.statement(call) for call in script.calls("unscale_")]
    return [script.drop(held) for held in statements if _clips(script)]


def _sum_of_microbatches(script: Script, _: float) -> list[Edit]:
    """The division of the loss by the number of microbatches, where a step follows after several backwards."""
    for backward in backward_statements(script):
        inner = loop_around(script, backward)
        outer = [loop_around(script, held) for held in _plain_steps(script)]
        if inner is None or inner in outer or not set(outer) & set(script.surrounding(inner)):
            continue
        for node in script.nodes(inner):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
                continue
            if isinstance(node.left, ast.Call) and isinstance(script.statement(node), ast.Assign):
                return [script.replace(node, script.words(node.left))]
    return []


def _retained_losses(script: Script) -> list[ast.Call]:
    """`loss.item()` that is added up or kept in a list while training."""
    found = []
    for call in script.calls("item"):
        statement = script.statement(call)
        direct = isinstance(call.func, ast.Attribute) and "loss" in script.words(call.func.value)
        summed = isinstance(statement, ast.AugAssign) and statement.value is call
        kept = (
            isinstance(statement, ast.Expr)
            and call in getattr(statement.value, "args", ())
            and (script.words(statement).split("(")[0].endswith(".append"))
        )
        if direct and (summed or kept) and not in_evaluation(script, call) and loop_around(script, call):
            found.append(call)
    return found


def _keep_graphs(script: Script, _: float) -> list[Edit]:
    return [script.replace(call, script.words(call).removesuffix(".item()")) for call in _retained_losses(script)[:1]]


def _drop_no_grad(script: Script, _: float) -> list[Edit]:
    """Evaluation records a graph, which is then freed: it costs memory and changes no number."""
    for call in script.calls("no_grad"):
        with_statement = script.statement(call)
        if isinstance(with_statement, ast.With) and not any(
            isinstance(node, (ast.Assign, ast.AugAssign)) and "_(" in script.words(node)
            for node in script.nodes(with_statement)
        ):
            return [script.replace(call.func, script.words(call.func).replace("no_grad", "enable_grad"))]
    return []


OPERATORS = (
    Operator(
        *("drop-zero-grad", "gradients are never cleared", "`zero_grad()` in a loop"),
        ("optim.missing-zero-grad",),
        _drop_zero_grad,
        "by construction",
    ),
    Operator(
        *("drop-step", "the optimizer never steps", "`optimizer.step()` in a loop"),
        ("optim.no-update",),
        _drop_step,
        "by construction",
    ),
    Operator(
        *("drop-backward", "the loss is never differentiated", "`backward()` and `optimizer.step()`"),
        ("optim.no-update", "optim.no-gradient"),
        _drop_backward,
        "by construction",
    ),
    Operator(
        *("zero-grad-before-step", "gradients are cleared between backward and step", "`step()` and `zero_grad()`"),
        ("optim.no-update", "optim.no-gradient"),
        _zero_grad_before_step,
        "by construction",
    ),
    Operator(
        *("step-before-backward", "`step()` and `backward()` change places", "backward and step in one loop"),
        ("optim.no-update", "optim.no-gradient"),
        _step_before_backward,
        "by construction",
    ),
    Operator(
        *("log-gradients", "the norms of gradients are read before each step", "`optimizer.step()`"),
        (),
        _log_gradients,
        "harmless",
    ),
    Operator(
        *("keep-gradient-tensors", "gradients become 0 instead of None", "`optimizer.zero_grad()`"),
        (),
        _keep_gradient_tensors,
        "harmless",
    ),
    Operator(
        *("drop-scheduler-step", "the schedule never moves", "`scheduler.step()`"),
        ("lr.schedule-broken", "lr.too-low", "lr.too-high"),
        _drop_scheduler_step,
    ),
    Operator(
        *("scheduler-step-per-batch", "the schedule also moves after every batch", "schedule that moves per epoch"),
        ("lr.schedule-broken", "lr.too-low"),
        _scheduler_step_per_batch,
    ),
    Operator(
        *("drop-train-mode", "training goes on in the mode of the evaluation", "`train()` and a repeated `eval()`"),
        ("model.eval-mode-training",),
        _drop_train_mode,
        "by construction",
    ),
    Operator(
        *("train-in-eval-mode", "`train()` becomes `eval()`", "`train()` with layers that depend on the mode"),
        ("model.eval-mode-training",),
        _train_in_eval_mode,
        "by construction",
    ),
    Operator(
        *("drop-eval-mode", "evaluation in training mode", "`eval()` with layers that depend on the mode"),
        ("model.train-mode-eval",),
        _drop_eval_mode,
        "by construction",
    ),
    Operator(
        *("drop-clip", "gradients are not clipped", "`clip_grad_norm_` statement"),
        ("model.exploding-gradient", "lr.too-high"),
        _drop_clip,
    ),
    Operator(
        *("lower-clip", "the limit of the norm is multiplied", "limit of `clip_grad_norm_`"),
        ("clip.saturated",),
        _lower_clip,
        strengths=(1e-2, 1e-4),
    ),
    Operator(
        *("drop-unscale", "gradients are clipped while they are scaled", "`unscale_` before a clip"),
        ("clip.before-unscale",),
        _drop_unscale,
        "by construction",
    ),
    Operator(
        *("sum-microbatches", "the accumulated loss is not divided", "loss divided by a number of microbatches"),
        ("accum.not-divided",),
        _sum_of_microbatches,
        "by construction",
        rescales_loss=True,
    ),
    Operator(
        *("keep-graphs", "losses are kept with their graphs", "`loss.item()` that is added up or appended"),
        ("memory.graph-retained",),
        _keep_graphs,
        "by construction",
    ),
    Operator(
        *("drop-no-grad", "evaluation records graphs, which are freed", "`with torch.no_grad()`"),
        (),
        _drop_no_grad,
        "harmless",
    ),
)
