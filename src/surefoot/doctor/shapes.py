"""Step 1: does one batch go through model and loss, and are the labels ones the loss can take?

The way to call the model is found here. An error is not only passed on: what reached the function that raised is known,
so a label beyond the last class or a token beyond the embedding is named as such.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from surefoot.doctor.checks import Check, failed, from_catalogue, passed, skipped
from surefoot.doctor.loss_of_batch import LossOf, conventions, describe, loss_taker, takes_model

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.doctor.context import CheckContext
    from surefoot.doctor.function_calls import LossCall
    from surefoot.doctor.model_copy import PassTrace

STEP = 1


def check_shapes(bench: CheckContext, loss_of: LossOf | None) -> list[Check]:
    """Find out how the model is called, and take the first look."""
    look, tried = _first_look(bench, loss_of)
    if look is None:
        return [skipped(STEP, "forward", bench.refusal)]
    bench.look = look
    if look.error is not None:
        bench.refusal = "the model does not run on a batch, see step 1"
    return [_forward(bench, look, tried), *_labels(look)]


def _first_look(bench: CheckContext, loss_of: LossOf | None) -> tuple[PassTrace | None, str]:
    if loss_of is None and bench.loss_fn is not None and takes_model(bench.loss_fn):
        loss_of = bench.loss_fn
    found = (
        iter([loss_taker(loss_of)])
        if loss_of is not None
        else conventions(bench.batches[0], bench.model, bench.loss_fn)
    )
    best: tuple[PassTrace | None, str] = (None, "")
    for convention in found:
        bench.convention = convention
        try:
            trial = bench.trial()
        except Exception as error:
            bench.refusal = f"the model cannot be copied, and the original is never run: {_first_line(error)}"
            return None, ""
        look = trial.look(bench.batch())
        if look.error is None:
            return look, convention.name
        if best[0] is None or _further(look, best[0]):
            best = look, convention.name
    return best


def _further(look: PassTrace, other: PassTrace) -> bool:
    """Whether one failed attempt got further than another: into a loss function, or at least through the model."""
    return (bool(look.recorded.losses), look.reached_loss) > (bool(other.recorded.losses), other.reached_loss)


def _forward(bench: CheckContext, look: PassTrace, call: str) -> Check:
    name = "forward"
    if look.error is None:
        summary = f"`{call}` runs: {describe(bench.batches[0])} gives a loss of {look.value:.4g}"
        return passed(STEP, name, summary, look.value, "one batch runs")
    error = f"`{call}` raised {type(look.error).__name__}: {_first_line(look.error)}"
    cause = _cause_of(look)
    if cause is not None:
        return from_catalogue(STEP, name, "fail", cause, error, expected="one batch runs")
    return failed(STEP, name, error, None, "one batch runs", _hint(look.error, look), None)


def _cause_of(look: PassTrace) -> str | None:
    text = str(look.error)
    if any(_beyond(lookup.ids, lookup.table_rows) for lookup in look.recorded.lookups):
        return "data.token-mismatch"
    if look.recorded.losses and bad_labels(look.recorded.losses[-1]):
        return "data.label-out-of-range"
    if "between 0 and 1" in text:
        return "loss.logits-into-probability-loss"
    if "more than 1 value per channel" in text:
        return "model.batchnorm-tiny-batch"
    if "second time" in text:
        return "memory.graph-retained"
    return None


def _hint(error: Exception | None, look: PassTrace) -> str:
    text = str(error)
    if re.search(r"dtype|scalar type|expected .*(Float|Long|Double|Half)", text):
        return "Cast inputs to the dtype of the weights, and labels to what the loss takes (class indices are int64)."
    if re.search(r"shapes? .*(multiplied|match)|size mismatch|size of tensor|expected input", text):
        return "Match the last axis of the input to `in_features` of the first layer; print shapes on the way."
    if "device" in text:
        return "Put all parts of the model on one device; batches are moved there for you."
    if not look.reached_loss:
        return "Give `loss_of=lambda model, batch: …` to say how your loop gets a loss from a batch."
    return "Run the model on one batch by hand until this line works."


def _beyond(ids: Tensor, rows: int) -> bool:
    return bool(ids.numel()) and (int(ids.max()) >= rows or int(ids.min()) < 0)


def bad_labels(call: LossCall) -> int:
    """How many class indices the loss cannot take."""
    if not call.has_indices:
        return 0
    outside = (call.target < 0) | (call.target >= call.class_count)
    return int((outside & call.valid).sum())


def _labels(look: PassTrace) -> list[Check]:
    calls = [call for call in look.recorded.losses if call.has_indices]
    if calls:
        return [_class_indices(calls[-1])]
    unit = [call for call in look.recorded.losses if call.kind.startswith("binary_cross_entropy")]
    if unit:
        return [_probabilities(unit[-1])]
    return [passed(STEP, "labels", "the loss takes no class labels")]


def _class_indices(call: LossCall) -> Check:
    wrong, count = bad_labels(call), call.class_count
    expected = f"class indices from 0 to {count - 1}"
    valid = call.target[call.valid]
    if not valid.numel():
        summary = f"all {call.target.numel()} targets of the first batch are the ignore index"
        return from_catalogue(STEP, "labels", "fail", "loss.no-valid-targets", summary, 0, "at least one target")
    summary = f"labels from {int(valid.min())} to {int(valid.max())}, and {count} outputs"
    if wrong:
        summary = f"{wrong} of {valid.numel()} labels lie outside: {summary}"
        return from_catalogue(STEP, "labels", "fail", "data.label-out-of-range", summary, wrong, expected)
    return passed(STEP, "labels", summary, float(valid.max()), expected)


def _probabilities(call: LossCall) -> Check:
    low, high = (float(value) for value in call.target.float().aminmax()) if call.target.numel() else (math.nan,) * 2
    expected = "targets from 0 to 1"
    summary = f"targets from {low:.4g} to {high:.4g} go into `{call.kind}`"
    if low < 0.0 or high > 1.0:
        worst = max(-low, high - 1.0)
        return from_catalogue(STEP, "labels", "fail", "data.label-out-of-range", summary, worst, expected)
    return passed(STEP, "labels", summary, high, expected)


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
