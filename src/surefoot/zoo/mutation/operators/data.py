"""Operators on the data: scale, order, splits, broken rows, seeds."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from surefoot.zoo.mutation import Operator
from surefoot.zoo.mutation.reading import (
    CROSS_ENTROPY,
    backward_statements,
    imports_torch,
    loop_around,
    model_calls,
    training_losses,
)
from surefoot.zoo.mutation.source import keyword, last_name, number

if TYPE_CHECKING:
    from surefoot.zoo.mutation.source import Edit, Script


def _normalisations(script: Script) -> list[tuple[ast.BinOp, ast.expr]]:
    """Divisions of data by a constant of 4 or more, or of `a - b` by something; each with what is divided."""
    found: list[tuple[ast.BinOp, ast.expr]] = []
    for node in script.nodes():
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)) or loop_around(script, node):
            continue
        left, size = node.left, number(node.right)
        outside = not any(isinstance(held, ast.Lambda) for held in script.surrounding(node))
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub) and "std" in script.words(node.right):
            found.append((node, left.left))
        elif size is not None and size >= 4 and not isinstance(left, (ast.Constant, ast.BinOp)) and outside:
            found.append((node, left))
    return found


def _drop_normalisation(script: Script, _: float) -> list[Edit]:
    return [script.replace(node, script.words(inner)) for node, inner in _normalisations(script)]


def _scale_inputs(script: Script, strength: float) -> list[Edit]:
    return [script.replace(node, f"{script.words(node)} * {strength:g}") for node, _ in _normalisations(script)]


def _shift_evaluation(script: Script, strength: float) -> list[Edit]:
    """The inputs of evaluations, which must be numbers, not ids."""
    if script.calls("Embedding", "EmbeddingBag", "one_hot"):
        return []
    training = {loop_around(script, held) for held in backward_statements(script)}  # a call there serves a step
    calls = [call for call in model_calls(script, evaluating=True) if loop_around(script, call) not in training]
    inputs = [call.args[0] for call in calls if len(call.args) == 1]
    return [script.replace(held, f"{script.words(held)} * {strength:g} + {strength:g}") for held in inputs]


def _leak_rows(script: Script, _: float) -> list[Edit]:
    """Slices `[N:]` that complement `[:N]` take in the training rows."""
    slices = [node for node in script.nodes() if isinstance(node, ast.Slice) and node.step is None]
    heads = {script.words(held.upper) for held in slices if held.upper is not None and held.lower is None}
    tails = [held for held in slices if held.lower is not None and held.upper is None]
    rows = [held for held in tails if held.lower is not None and script.words(held.lower) in heads]
    counted = [held for held in rows if not script.words(held).startswith(("1:", "-"))]
    if not model_calls(script, evaluating=True):
        return []
    return [script.replace(held, "0:") for held in counted]


def _do_not_shuffle(script: Script, _: float) -> list[Edit]:
    edits = []
    for call in script.calls("DataLoader"):
        given = keyword(call, "shuffle")
        if given is not None and isinstance(given.value, ast.Constant) and given.value.value is True:
            edits.append(script.replace(given.value, "False"))
    for call in script.calls("randperm"):
        if _order_of_batches(script, call) and not call.keywords:
            edits.append(script.replace(call.func, script.words(call.func).replace("randperm", "arange")))
    return edits


def _order_of_batches(script: Script, call: ast.Call) -> bool:
    """Whether a new permutation is drawn in every epoch: in the line of a loop over batches."""
    above = list(script.surrounding(call))
    loops = [held for held in above if isinstance(held, ast.For)]
    return bool(loops) and loops[0].iter in above and imports_torch(script)


def _sort_by_label(script: Script, _: float) -> list[Edit]:
    """The permutation of the rows becomes the order of the labels, in a loop over its pieces."""
    for held in training_losses(script, *CROSS_ENTROPY):
        target = held.target
        if not (isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Name)):
            continue
        for call in script.calls("randperm"):
            loop = next((each for each in script.surrounding(call) if isinstance(each, ast.For)), None)
            mine = loop is not None and script.words(loop.target) == target.slice.id
            if mine and len(call.args) == 1 and _order_of_batches(script, call) and not call.keywords:
                labels = f"{script.words(target.value)}[:{script.words(call.args[0])}]"
                return [script.replace(call, f"{labels}.argsort()")]
    return []


def _reseed(script: Script, _: float) -> list[Edit]:
    """The seed is set again in every round of the loop that draws the rows."""
    if not imports_torch(script) or script.calls("Generator"):
        return []
    drawn = [call for call in script.calls("randint", "randperm") if not _in_function(script, call)]
    loaders = {
        script.words(target)
        for call in script.calls("DataLoader")
        if keyword(call, "shuffle") is not None and isinstance(statement := script.statement(call), ast.Assign)
        for target in statement.targets
    }
    for loop in (node for node in script.nodes() if isinstance(node, ast.For)):
        inner = [node for node in script.nodes(loop) if isinstance(node, ast.For) and node is not loop]
        draws = any(loop_around(script, call) is loop for call in drawn)
        draws |= any(call in script.nodes(each.iter) for call in drawn for each in inner)
        draws |= any(script.words(each.iter) in loaders for each in inner)
        if draws and script.calls("backward", within=loop):
            return [script.before(loop.body[0], "torch.manual_seed(0)")]
    return []


def _in_function(script: Script, node: ast.AST) -> bool:
    """Whether a node is in a function, which may be called from anywhere."""
    return any(isinstance(held, (ast.FunctionDef, ast.Lambda)) for held in script.surrounding(node))


def _training_inputs(script: Script) -> list[ast.expr]:
    """What the model gets in a training loop whose loss compares it with labels of the data."""
    losses = [held for held in training_losses(script) if isinstance(held.target, (ast.Name, ast.Subscript))]
    loops = {loop_around(script, held.call) for held in losses} - {None}
    calls = [call for call in model_calls(script, evaluating=False) if loop_around(script, call) in loops]
    names = (ast.Name, ast.Subscript)
    return [call.args[0] for call in calls if isinstance(call.args[0], names) and imports_torch(script)]


def _shuffle_inputs(script: Script, _: float) -> list[Edit]:
    words = [(held, script.words(held)) for held in _training_inputs(script)]
    return [script.replace(held, f"{text}[torch.randperm(len({text}))]") for held, text in words]


def _zero_inputs(script: Script, _: float) -> list[Edit]:
    return [script.replace(held, f"torch.zeros_like({script.words(held)})") for held in _training_inputs(script)]


def _training_rows(script: Script) -> list[ast.expr]:
    """Tensors of input rows: the first of a data set that is shuffled, or what is indexed for the model."""
    if script.calls("Embedding", "EmbeddingBag", "one_hot") or not imports_torch(script):
        return []
    for loader in script.calls("DataLoader"):
        sets = script.calls("TensorDataset", within=loader)
        if keyword(loader, "shuffle") is not None and sets and sets[0].args:
            return [sets[0].args[0]]
    for call in model_calls(script, evaluating=False):
        rows = call.args[0]
        if isinstance(rows, ast.Subscript) and isinstance(rows.slice, ast.Name) and isinstance(rows.value, ast.Name):
            return [rows.value]
    return []


def _nan_rows(script: Script, _: float) -> list[Edit]:
    filled = 'index_fill(0, torch.tensor([5, 6, 7]), float("nan"))'
    return [script.replace(rows, f"{script.words(rows)}.{filled}") for rows in _training_rows(script)]


def _scale_column(script: Script, strength: float) -> list[Edit]:
    """The first feature of the rows that the model gets, in training and in evaluation."""
    other = ("Embedding", "EmbeddingBag", "one_hot", "Conv1d", "Conv2d", "LSTM", "GRU", "RNN")
    if script.calls(*other) or not imports_torch(script):
        return []
    calls = [*model_calls(script, evaluating=False), *model_calls(script, evaluating=True)]
    inputs = [call.args[0] for call in calls if isinstance(call.args[0], (ast.Name, ast.Subscript))]
    scales = "torch.where(torch.arange({0}.shape[-1]) == 0, {1:g}, 1.0)"
    words = [(held, script.words(held)) for held in inputs]
    return [script.replace(held, f"{text} * {scales.format(text, strength)}") for held, text in words]


def _outlier_rows(script: Script, strength: float) -> list[Edit]:
    """Three rows in the units of another sensor: all their features are multiplied."""
    rows = [(held, script.words(held)) for held in _training_rows(script)]
    copied = "index_copy(0, torch.tensor([5, 6, 7]), {0}[5:8] * {1:g})"
    return [script.replace(held, f"{text}.{copied.format(text, strength)}") for held, text in rows]


def _huge_rows(script: Script, strength: float) -> list[Edit]:
    filled = f"index_fill(0, torch.tensor([5, 6, 7]), {strength:g})"
    return [script.replace(rows, f"{script.words(rows)}.{filled}") for rows in _training_rows(script)]


_SEEDING = ("torch.manual_seed", "random.seed", "np.random.seed", "numpy.random.seed")


def _drop_seed(script: Script, _: float) -> list[Edit]:
    """All seeds of global generators. A script that seeds a generator of its own is left alone."""
    if script.calls("Generator", "default_rng", "RandomState"):
        return []
    calls = [call for call in script.calls("manual_seed", "seed") if script.words(call.func) in _SEEDING]
    return [script.drop(script.statement(call)) for call in calls]


def _change_drop_last(script: Script, _: float) -> list[Edit]:
    edits = []
    for call in script.calls("DataLoader"):
        given = keyword(call, "shuffle")
        if given is not None and keyword(call, "drop_last") is None and keyword(call, "batch_size") is not None:
            edits.append(script.replace(given.value, f"{script.words(given.value)}, drop_last=True"))
    return edits


def _drop_worker_seeds(script: Script, _: float) -> list[Edit]:
    given = [keyword(call, "worker_init_fn") for call in script.calls("DataLoader")]
    return [script.replace(held.value, "None") for held in given if held is not None]


def _double_precision(script: Script, _: float) -> list[Edit]:
    """All tensors and models in float64, by the default type, where no other type is written."""
    if not imports_torch(script) or any(word in script.text for word in ("float32", "float16", ".float()", "numpy")):
        return []
    seeds = script.calls("manual_seed")
    statement = script.statement(seeds[0]) if seeds else None
    if statement is None or last_name(seeds[0].func) != "manual_seed" or _in_function(script, statement):
        return []
    return [script.before(statement, "torch.set_default_dtype(torch.float64)")]


OPERATORS = (
    Operator(
        *("drop-normalisation", "inputs keep their own scale", "division that normalises data"),
        ("data.unscaled-input",),
        _drop_normalisation,
    ),
    Operator(
        *("scale-inputs", "inputs are multiplied", "division that normalises data"),
        ("data.unscaled-input",),
        _scale_inputs,
        strengths=(30.0, 1000.0),
    ),
    Operator(
        *("scale-column", "the first feature is multiplied", "model call on rows of features"),
        ("data.unscaled-input",),
        _scale_column,
        strengths=(30.0, 1000.0),
    ),
    Operator(
        *("shift-evaluation", "inputs of the evaluation are scaled and shifted", "model call in an evaluation"),
        ("data.split-mismatch",),
        _shift_evaluation,
        "by construction",
        strengths=(4.0, 20.0),
    ),
    Operator(
        *("leak-rows", "training rows are evaluated too", "evaluation of the rows behind the training rows"),
        ("data.leakage",),
        _leak_rows,
        "by construction",
    ),
    Operator(
        *("do-not-shuffle", "rows come in the order of the data", "shuffling loader or permutation"),
        ("data.unshuffled", "data.repeated-batches"),
        _do_not_shuffle,
    ),
    Operator(
        *("sort-by-label", "rows come in the order of their labels", "permutation that picks labels"),
        ("data.unshuffled",),
        _sort_by_label,
        "by construction",
    ),
    Operator(
        *("reseed", "every round draws the same rows", "loop that draws rows"),
        ("data.repeated-batches",),
        _reseed,
        "by construction",
    ),
    Operator(
        *("shuffle-inputs", "the input rows of a batch are permuted", "model call beside a loss on labels"),
        ("data.labels-uninformative",),
        _shuffle_inputs,
        "by construction",
    ),
    Operator(
        *("zero-inputs", "all inputs are 0", "model call beside a loss on labels"),
        ("data.degenerate-batch", "data.labels-uninformative"),
        _zero_inputs,
        "by construction",
    ),
    Operator(
        *("nan-rows", "three input rows are NaN", "tensor of input rows"),
        ("data.nonfinite-input",),
        _nan_rows,
        "by construction",
    ),
    Operator(
        *("huge-rows", "three input rows have this value", "tensor of input rows"),
        ("data.bad-batch",),
        _huge_rows,
        strengths=(100.0, 10000.0),
    ),
    Operator(
        *("outlier-rows", "three input rows are multiplied", "tensor of input rows"),
        ("data.bad-batch",),
        _outlier_rows,
        strengths=(100.0, 10000.0),
    ),
    Operator(
        *("drop-seed", "no seed is set", "seed of a global generator"),
        ("repro.unseeded",),
        _drop_seed,
        "by construction",
    ),
    Operator(
        *("drop-last", "the last batch is left out", "shuffling loader with a batch size"),
        (),
        _change_drop_last,
        "harmless",
    ),
    Operator(
        *("drop-worker-seeds", "workers are not seeded", "`worker_init_fn`"),
        ("data.worker-seeds",),
        _drop_worker_seeds,
    ),
    Operator(
        *("double-precision", "all numbers are float64", "script that writes no other type"),
        (),
        _double_precision,
        "harmless",
    ),
)
