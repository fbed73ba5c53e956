"""Models in which the rows of a batch affect each other although each row has its own target.

Three kinds of calls do this by mistake: a reshape that does not keep the batch as the first dimension, a softmax over
the rows, and attention over the rows instead of the positions. BatchNorm, graph networks and other models that combine
rows on purpose do it with other calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import RowMixing

_RESHAPES = {
    "view", "reshape", "flatten", "permute", "transpose", "t", "T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims",
    "contiguous", "unflatten", "ravel", "squeeze", "unsqueeze", "view_as", "clone", "getitem", "select", "narrow",
}  # fmt: skip
_SOFTMAXES = {"softmax", "log_softmax"}
_ATTENTION = {"multi_head_attention_forward", "scaled_dot_product_attention"}


def has_softmax_over_rows(run: RecordedRun) -> bool:
    """Whether a softmax of the model runs over the rows of the batch."""
    found = [root.row_mixing for root in run.sampled.backward_calls if root.row_mixing is not None]
    return any(_softmax_in(facts) is not None for facts in found)


def _softmax_in(facts: RowMixing) -> str | None:
    """The softmax that mixes the rows, if nothing but reshapes is beside it."""
    name = next((name for name in facts.calls if name in _SOFTMAXES), None)
    return name if set(facts.calls) <= _RESHAPES | _SOFTMAXES else None


def mixes_rows(run: RecordedRun) -> Claim | None:
    """Outputs depend on inputs of other rows, because of a reshape, a softmax or attention over the rows."""
    for root in run.sampled.backward_calls:
        facts = root.row_mixing
        what = None if facts is None else _what(facts)
        if facts is None or what is None:
            continue
        words, fix = what
        return Claim(
            0.95,
            f"{words}: the outputs of the first half of the {facts.rows} rows have a gradient of "
            f"{facts.from_others:.2g} for values of the other half, against {facts.from_own:.2g} for their own. Each "
            f"row has its own target. The loss is at {run.curve.end:.3g}.",
            step=root.step,
            where=(facts.site, facts.module),
            evidence=facts.to_json(),
            severity="error" if run.failing else "warning",
            fixes=(fix,),
        )
    return None


def _what(facts: RowMixing) -> tuple[str, str] | None:
    """What mixes the rows and how to correct it; `None` if it may be meant."""
    calls = set(facts.calls)
    place = f"`{facts.module}` at {facts.site}" if facts.module else facts.site
    if calls <= _RESHAPES:
        names = " and ".join(f"`{name}`" for name in dict.fromkeys(facts.calls) if name != "getitem")
        return (
            f"{names} at {facts.site} {'put' if ' and ' in names else 'puts'} values of different rows of the batch "
            f"into one row",
            f"Keep the batch as the first dimension at {facts.site}, for example with `.flatten(1)`.",
        )
    if (name := _softmax_in(facts)) is not None:
        return (
            f"`{name}` in {place} runs over the {facts.rows} rows of the batch, not over the values of a row",
            f"Use `dim=-1` in the `{name}` at {facts.site}.",
        )
    if calls & _ATTENTION and facts.has_positions:
        return (
            f"Attention in {place} runs over the {facts.rows} rows of the batch as if they were positions, and treats "
            "the positions as separate sequences",
            "Create the attention or transformer layer with `batch_first=True`.",
        )
    return None


RULES = (
    Rule("model.mixes-rows", "wiring", mixes_rows,
         explains=("loss.logits-into-probability-loss", "data.labels-uninformative", "data.class-collapse", "lr.*",
                   "optim.not-learning", "model.*", "fit.*", "loss.softmax-before-cross-entropy", "init.symmetric")),
)  # fmt: skip
