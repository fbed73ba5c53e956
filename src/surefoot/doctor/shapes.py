"""Step 1: does one batch run through model and loss, and are the labels valid for the loss?

This step finds out how to call the model. Errors are explained: the arguments of the function that raised are known, so
a label above the last class or a token id above the size of the embedding is named as such.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surefoot.doctor.checks import Check, failed, from_finding, passed, skipped
from surefoot.doctor.loss_of_batch import LossOf, conventions, describe, loss_taker, takes_model
from surefoot.doctor.probe_facts import judge

if TYPE_CHECKING:
    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.model_copy import PassTrace

STEP = 1
_RAISES = (
    "data.token-mismatch",
    "data.label-out-of-range",
    "loss.logits-into-probability-loss",
    "model.batchnorm-tiny-batch",
    "memory.graph-retained",
)
"""Causes that end a run at its first batch."""


def check_shapes(context: CheckContext, loss_of: LossOf | None) -> list[Check]:
    """Find out how the model is called, and record the first pass."""
    look, tried = _first_look(context, loss_of)
    if look is None:
        return [skipped(STEP, "forward", context.refusal)]
    context.look, context.claims = look, judge([look])
    if look.error is not None:
        context.refusal = "the model does not run on a batch, see step 1"
    return [_forward(context, look, tried), _labels(context, look)]


def _first_look(context: CheckContext, loss_of: LossOf | None) -> tuple[PassTrace | None, str]:
    if loss_of is None and context.loss_fn is not None and takes_model(context.loss_fn):
        loss_of = context.loss_fn
    found = (
        iter([loss_taker(loss_of)])
        if loss_of is not None
        else conventions(context.batches[0], context.model, context.loss_fn)
    )
    best: tuple[PassTrace | None, str] = (None, "")
    for convention in found:
        context.convention = convention
        try:
            trial = context.trial()
        except Exception as error:
            context.refusal = f"the model cannot be copied, and the original is never run: {_first_line(error)}"
            return None, ""
        look = trial.look(context.batch())
        if look.error is None:
            return look, convention.name
        if best[0] is None or _further(look, best[0]):
            best = look, convention.name
    return best


def _further(look: PassTrace, other: PassTrace) -> bool:
    """Whether one failed attempt got further than another: into a loss function, or at least through the model."""
    return (bool(look.recorded.losses), look.reached_loss) > (bool(other.recorded.losses), other.reached_loss)


def _forward(context: CheckContext, look: PassTrace, call: str) -> Check:
    name = "forward"
    if look.error is None:
        summary = f"`{call}` runs: {describe(context.batches[0])} returns a loss of {look.value:.4g}"
        return passed(STEP, name, summary, look.value, "one batch runs")
    error = f"`{call}` raised {type(look.error).__name__}: {_first_line(look.error)}"
    found = next((context.claims[cause] for cause in _RAISES if cause in context.claims), None)
    if found is not None:
        return replace(from_finding(STEP, name, found, "one batch runs"), summary=f"{error}. {found.summary}")
    return failed(STEP, name, error, None, "one batch runs", _hint(look.error, look), None)


def _hint(error: Exception | None, look: PassTrace) -> str:
    text = str(error)
    if re.search(r"dtype|scalar type|expected .*(Float|Long|Double|Half)", text):
        return "Cast inputs to the dtype of the weights, and labels to what the loss takes (class indices are int64)."
    if re.search(r"shapes? .*(multiplied|match)|size mismatch|size of tensor|expected input", text):
        return (
            "Match the last axis of the input to `in_features` of the first layer; print the shapes between the layers."
        )
    if "device" in text:
        return "Put all parts of the model on one device; batches are moved there automatically."
    if not look.reached_loss:
        return "Pass `loss_of=lambda model, batch: …` with the way in which your loop computes the loss of a batch."
    return "Run the model on one batch by hand until this line works."


def _labels(context: CheckContext, look: PassTrace) -> Check:
    name = "labels"
    calls = [call for call in look.recorded.losses if call.has_indices or call.kind.startswith("binary_cross_entropy")]
    if not calls:
        return skipped(STEP, name, "the loss uses no class labels")
    call = calls[-1]
    expected = f"class indices from 0 to {call.class_count - 1}" if call.has_indices else "targets from 0 to 1"
    for cause in ("data.label-out-of-range", "loss.no-valid-targets"):
        if cause in context.claims:
            return from_finding(STEP, name, context.claims[cause], expected)
    valid = call.target[call.valid] if call.has_indices else call.target
    if not valid.numel():
        return skipped(STEP, name, "the first batch has no targets")
    low, high = (float(bound) for bound in valid.float().aminmax())
    outputs = f", and {call.class_count} outputs" if call.has_indices else ""
    return passed(STEP, name, f"labels from {low:.4g} to {high:.4g}{outputs}", high, expected)


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
