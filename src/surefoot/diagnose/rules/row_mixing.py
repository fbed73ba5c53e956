"""Models in which the rows of a batch affect each other although each row has its own target.

Three kinds of calls do this by mistake: a reshape that does not keep the batch as the first dimension, a softmax over
the rows, and attention over the rows instead of the positions. BatchNorm, graph networks and other models that combine
rows on purpose do it with other calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.rule import Claim, Rule
from surefoot.watch.operation_names import CLASS_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LossCall, RowMixing

_RESHAPES = {
    "view", "reshape", "flatten", "permute", "transpose", "t", "T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims",
    "contiguous", "unflatten", "ravel", "squeeze", "unsqueeze", "view_as", "clone", "getitem", "select", "narrow",
}  # fmt: skip
_SOFTMAXES = {"softmax", "log_softmax"}
_ATTENTION = {"multi_head_attention_forward", "scaled_dot_product_attention"}


def has_softmax_over_rows(run: RecordedRun) -> bool:
    """Whether a softmax of the model runs over the rows of the batch."""
    found = [root.row_mixing for root in run.sampled.backward_calls if root.row_mixing is not None]
    return _normalised_columns(run) is not None or any(_softmax_in(facts) is not None for facts in found)


def _normalised_columns(run: RecordedRun) -> LossCall | None:
    """The first call of a loss whose scores are (log-)probabilities over the rows of the batch, at every step.

    The two sides of a similarity matrix, which has as many rows as columns, are both compared on purpose.
    """
    losses = [loss for loss in run.sampled.training_losses(*CLASS_LOSSES) if loss.distribution is not None]
    known = [d for loss in losses if (d := loss.distribution) is not None and d.column_error is not None]
    known = [d for d in known if d.rows != d.classes]
    over_rows = [d for d in known if (d.column_error or 0.0) < 1e-3 and min(d.sum_error, d.log_sum_error) > 0.01]
    return losses[0] if len(over_rows) >= 3 and len(over_rows) == len(known) else None


def softmax_over_rows(run: RecordedRun) -> Claim | None:
    """The scores that a loss is given add up to 1 over the rows of the batch, not over the classes of a row."""
    loss = _normalised_columns(run)
    if loss is None or loss.distribution is None or mixes_rows(run) is not None:
        return None
    made = loss.producer
    at = made.site if made is not None and made.site else loss.site
    named = f"`{made.op}`" if made is not None and made.op in _SOFTMAXES else "a softmax"
    return Claim(
        0.95,
        f"{loss.op}{at_place(loss.site)} is given scores that are normalised over the {loss.distribution.rows} rows of "
        f"the batch, not over the {loss.distribution.classes} classes of each row: {named}{at_place(at)} runs over the "
        f"wrong dimension. The loss is at {run.curve.end:.3g}.",
        step=loss.step,
        where=(at, loss.site),
        evidence=loss.distribution.to_json(),
        severity="error" if run.failing else "warning",
        fixes=(f"Use `dim=-1` in the softmax{at_place(at)}.",),
    )


def _softmax_in(facts: RowMixing) -> str | None:
    """The softmax that mixes the rows, if nothing but reshapes is beside it."""
    name = next((name for name in facts.calls if name in _SOFTMAXES), None)
    return name if set(facts.calls) <= _RESHAPES | _SOFTMAXES else None


def mixes_rows(run: RecordedRun) -> Claim | None:
    """Outputs depend on inputs of other rows, because of a reshape, a softmax or attention over the rows."""
    for root in run.sampled.backward_calls:
        facts = root.row_mixing
        what = None if facts is None else _what(facts)
        if facts is None or what is None or (facts.shapes is not None and not run.failing):
            continue  # shapes alone show the same for data that is cut into windows, which a model learns from
        words, fix = what
        return Claim(
            0.95,
            f"{words}{_measured(facts)}. Each row has its own target. The loss is at {run.curve.end:.3g}.",
            step=root.step,
            where=(facts.site, facts.module),
            evidence=facts.to_json(),
            severity="error" if run.failing else "warning",
            fixes=(fix,),
        )
    return None


def _measured(facts: RowMixing) -> str:
    """The gradients that show the mixing, if they were measured."""
    if facts.from_own is None or facts.from_others is None:
        return ""
    return (
        f": the outputs of the first half of the {facts.rows} rows have a gradient of {facts.from_others:.2g} for "
        f"values of the other half, against {facts.from_own:.2g} for their own"
    )


def _what(facts: RowMixing) -> tuple[str, str] | None:
    """What mixes the rows and how to correct it; `None` if it may be meant."""
    calls = set(facts.calls)
    place = f"`{facts.module}`{at_place(facts.site)}" if facts.module else facts.site
    if facts.shapes is not None:
        before, after = (f"({', '.join(map(str, shape))})" for shape in facts.shapes)
        return (
            f"`{facts.calls[0]}`{at_place(facts.site)} turns the shape {before} into {after}, where {facts.rows} is "
            f"the number of rows of the batch: it does not move dimensions, so values of different rows come into one "
            f"row",
            f"Swap the two dimensions with `.transpose(0, 1)`{at_place(facts.site)}, before any reshape.",
        )
    if calls <= _RESHAPES:
        names = " and ".join(f"`{name}`" for name in dict.fromkeys(facts.calls) if name != "getitem")
        return (
            f"{names}{at_place(facts.site)} {'put' if ' and ' in names else 'puts'} values of different rows of the "
            f"batch into one row",
            f"Keep the batch as the first dimension{at_place(facts.site)}, for example with `.flatten(1)`.",
        )
    if (name := _softmax_in(facts)) is not None:
        return (
            f"`{name}` in {place} runs over the {facts.rows} rows of the batch, not over the values of a row",
            f"Use `dim=-1` in the `{name}`{at_place(facts.site)}.",
        )
    if calls & _ATTENTION and facts.has_positions:
        return (
            f"Attention in {place} runs over the {facts.rows} rows of the batch as if they were positions, and treats "
            "the positions as separate sequences",
            "Create the attention or transformer layer with `batch_first=True`.",
        )
    return None


_EXPLAINED = (
    "loss.logits-into-probability-loss", "data.labels-uninformative", "data.class-collapse", "lr.*",
    "optim.not-learning", "model.*", "fit.*", "loss.softmax-before-cross-entropy", "init.symmetric",
)  # fmt: skip

RULES = (
    Rule("model.mixes-rows", "wiring", mixes_rows, explains=_EXPLAINED),
    Rule("model.mixes-rows", "wiring", softmax_over_rows, explains=_EXPLAINED),
)
