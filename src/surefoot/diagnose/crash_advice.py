"""The way out of errors that end many scripts and whose messages do not say it: autograd, types, devices, ranks.

A sentence with the names of the run where they are known. It follows the message in the summary of a run without a
finding; errors that a rule explains have a finding instead.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import CrashFacts, ParameterFacts

_ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"NCCL|nccl",
        "The first rank that failed says why: look at its output, and run with `NCCL_DEBUG=INFO`. The other ranks only "
        "saw it leave.",
    ),
    (
        r"CUDA error|CUBLAS_STATUS|CUDNN_STATUS",
        "A device reports errors late: run once with the environment variable `CUDA_LAUNCH_BLOCKING=1`, and the "
        "traceback names the call that failed.",
    ),
    (
        r"leaf Variable that requires grad .*in-place operation",
        "Update weights without recording a graph: `with torch.no_grad(): w -= lr * w.grad`.",
    ),
    (
        r"only for scalar outputs",
        "`backward()` starts from one number: reduce the loss first, as in `loss.mean().backward()`.",
    ),
    (
        r"backward through the graph a second time",
        "Two backward calls used the same graph: add the losses and call `backward()` once on the sum, or run the "
        "forward pass again for the second one.",
    ),
    (
        r"[Oo]ptimizer got an empty parameter list",
        "The model registers no parameter: keep layers as attributes or in `nn.ModuleList`, not in a plain list, and "
        "tensors in `nn.Parameter`.",
    ),
)
"""A pattern of the message and the advice."""
_OVERWRITTEN = re.compile(
    r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]\](?:, which is output \d+ of (\w+))?"
)
_TYPES = re.compile(r"same dtype, but got:? (\w+) (?:and|!=) (\w+)")
_FEATURES = re.compile(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")


def crash_advice(run: RecordedRun) -> str:
    """What to change, in one or two sentences; empty if the message says it or the cause is not known."""
    crash = run.facts.crash
    if crash is None:
        return ""
    return _new_tensors(run, crash) or _overwritten(run, crash.message) or _by_message(crash.message)


def _by_message(message: str) -> str:
    if (sizes := _FEATURES.search(message)) is not None:
        given, expected = sizes.groups()
        return (
            f"The layer expects {expected} features in the last dimension and was given {given}: use {given} for its "
            "`in_features`, or change the shape of its input."
        )
    if (types := _TYPES.search(message)) is not None:
        given, expected = types[1].lower(), types[2].lower()
        return (
            f"The layer was given values of type {given}, and its weights are of type {expected}: convert the values "
            f"with `.{expected}()`. Arrays of NumPy are float64."
        )
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, message)), "")


def _new_tensors(run: RecordedRun, crash: CrashFacts) -> str:
    """A loop without an optimizer that replaces its weights by results of an operation, which get no `.grad`."""
    if run.facts.optimizers or "NoneType" not in crash.message:
        return ""
    mine = {run.parameters[n].name for n in run.facts.updated_by_hand if n is not None}
    held = crash.locals or {}
    replaced = [n for n in held if n in mine and (n in crash.computed or not held[n].requires_grad)]
    if not replaced:
        return ""
    name = replaced[0]
    return (
        f"`{name}` is no longer the tensor that requires a gradient but the result of an operation, whose `.grad` is "
        f"None: change it in place, `with torch.no_grad(): {name} -= lr * {name}.grad`, instead of binding a new one."
    )


def _overwritten(run: RecordedRun, message: str) -> str:
    """Which tensor changed between the forward pass and its backward: weights by a step, or a result in place."""
    found = _OVERWRITTEN.search(message)
    if found is None:
        return ""
    shape = [int(size) for size in found[1].split(",") if size.strip()]
    weights = [p for p in run.parameters.values() if p.changed and shape in (p.shape, p.shape[::-1])]
    if weights:
        return _stepped_too_early(run, weights)
    made = re.sub(r"Backward\d*$", "", found[2] or "")
    whose = f"the result of {made.lower()} with shape {shape}" if made else f"a tensor of shape {shape}"
    return (
        f"Backward needs {whose}, and it was changed after the forward pass had used it: replace `x += y` with "
        "`x = x + y`, `x[i] = y` with a new tensor, and remove `inplace=True`."
    )


def _stepped_too_early(run: RecordedRun, weights: list[ParameterFacts]) -> str:
    holders = {number for p in weights for number in p.optimizers}
    sites = [held.site for held in run.facts.optimizers if held.number in holders and held.site]
    made = f" made at {sites[0]}" if len(sites) == 1 else ""
    names = ", ".join(f"`{p.label}`" for p in weights[:2])
    if len(run.facts.optimizers) == 1:
        return (
            f"The optimizer{made} has changed {names} since: this backward also goes through the forward pass of an "
            "earlier step. Detach what is carried over from it, as in `state = state.detach()`."
        )
    return (
        f"The step of the optimizer{made} changed {names} after the forward pass that this backward belongs to: call "
        "this `backward()` before that `step()`, or run the forward pass again after it."
    )
