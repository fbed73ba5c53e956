"""Attention masks: rows that are fully masked, masks that are inverted, and positions that depend on later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.core.wording import at_place, count_of
from surefoot.diagnose.nonfinite import details
from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun

_PRODUCTS = {"Addmm", "Mm", "Convolution"}
"""What a layer computes. If that is -inf, it has overflowed, and nothing was masked."""


def fully_masked_row(run: RecordedRun) -> Claim | None:
    """A row of attention in which every key is masked."""
    bad = run.nonfinite.loss
    if bad is not None and bad.masked_rows and not _PRODUCTS & set((bad.below or [])[:1]):
        return Claim(
            0.95,
            f"At step {run.nonfinite.loss_step}, every key is masked in {count_of(bad.masked_rows, 'row')} of the "
            f"softmax at {bad.site or bad.op}: the softmax of such a row is 0/0.",
            step=run.nonfinite.loss_step,
            where=(str(bad.site or ""), str(bad.module or "")),
            evidence=details(bad),
        )
    if run.nonfinite.seen:
        notes = [n for n in run.sampled.calls.softmaxes if n.fully_masked_rows]
        if notes:
            note = notes[0]
            return Claim(
                0.93,
                f"At step {note.step}, every key is masked in {count_of(note.fully_masked_rows, 'row')} that {note.op}"
                f"{at_place(note.site)} gets, and a non-finite loss follows.",
                step=note.step,
                where=(note.site, note.module),
                evidence={"rows": note.fully_masked_rows, "shape": note.shape},
            )
    return None


_POLARITIES = {
    "multi_head_attention_forward": (
        "In `key_padding_mask` (`src_key_padding_mask`), True means that a key is ignored: pass `ids == {id}`."
    ),
    "scaled_dot_product_attention": (
        "In a boolean `attn_mask`, True means that a key is used: pass `ids != {id}`. In a mask of numbers, put minus "
        "infinity where `ids == {id}`."
    ),
}
"""By function: what its mask means."""


def inverted(run: RecordedRun) -> Claim | None:
    """A padding mask that keeps the padding, and ignores the tokens."""
    note = next(iter(run.sampled.calls.key_masks), None)
    if note is None:
        return None
    fix = _POLARITIES.get(note.op, "Fill the logits with minus infinity where `ids == {id}`, and not elsewhere.")
    return Claim(
        0.95,
        f"The attention of `{note.module}` sees only the keys with id {note.kept_id} ({note.kept} of "
        f"{note.kept + note.ignored}, at one end of each row), and ignores all others: it sees the padding instead of "
        "the tokens.",
        step=note.step,
        where=(note.site, note.module),
        evidence={"kept_id": note.kept_id, "kept": note.kept, "ignored": note.ignored},
        fixes=(fix.format(id=note.kept_id),),
    )


def leaks_future(run: RecordedRun) -> Claim | None:
    """In a next-token model, an earlier output depends on a later input."""
    for root in run.sampled.backward_calls:
        facts = root.causality
        if facts is None or facts.from_future is None or facts.from_past is None or facts.offset != 1:
            continue
        if facts.applies and facts.from_future > 1e-6 * max(facts.from_past, 1e-30):
            return Claim(
                0.97,
                f"Targets are the inputs one token later, and outputs of the first half of `{facts.model}`'s "
                f"{facts.positions} positions depend on inputs of the second half (gradient "
                f"{facts.from_future:.2g}, against {facts.from_past:.2g} from the first half): it sees the tokens that "
                f"it should predict. The loss is at {run.curve.end:.3g}.",
                step=root.step,
                where=(facts.model, facts.site),
                evidence=facts.to_json(),
            )
    return None


RULES: tuple[Rule, ...] = (
    Rule("mask.fully-masked-row", "value", fully_masked_row,
         explains=("loss.undefined-op", "lr.*", "data.nonfinite-input")),
    Rule("mask.inverted", "wiring", inverted, explains=("mask.fully-masked-row", "optim.not-learning", "lr.*",
                                                        "model.saturated-units")),
    Rule("mask.leaks-future", "wiring", leaks_future, explains=("data.leakage",)),
)  # fmt: skip
