"""Sequences of tokens: targets at the wrong offset from the inputs, and padding that counts in the loss.

Both are read from the values: the ids that an embedding looked up, and the labels that reached the loss in that step.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.data_summary import where_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.watch.operation_names import CLASS_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Evidence
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import Causality, EmbeddingCall, LossCall, TokenAlignment

_FEWEST = 3
"""The number of sampled steps that must agree."""
_ALL, _FEW = 0.99, 0.9
_POSITIONS = 10
"""The number of tokens per step from which on a sequence of single ones is compared."""


def _aligned(run: RecordedRun) -> dict[str, list[tuple[LossCall, TokenAlignment]]]:
    """The losses of the run with the ids they are compared with, by the line that looked the ids up.

    Among the ids of one line, the last ones before the loss belong to it; others belong to evaluations.
    """
    found: dict[str, list[tuple[LossCall, TokenAlignment]]] = {}
    for loss in run.sampled.training_losses(*CLASS_LOSSES):
        last = {tokens.site: tokens for tokens in reversed(loss.tokens or [])}
        for tokens in last.values() if loss.valid else ():
            found.setdefault(tokens.site + loss.site, []).append((loss, tokens))
    return {place: pairs for place, pairs in found.items() if len({loss.step for loss, _ in pairs}) >= _FEWEST}


def target_offset(run: RecordedRun) -> Claim | None:
    """Targets that are the inputs themselves, or the inputs two tokens later."""
    groups = _aligned(run)
    if any(tokens.following > _ALL for pairs in groups.values() for _, tokens in pairs):
        return None  # there is a head for the next token: another one may use another offset on purpose
    for pairs in groups.values():
        tokens = [held for _, held in pairs]
        if min(held.second for held in tokens) > _ALL and max(held.same for held in tokens) < _FEW:
            return _two_later(run, *pairs[0])
        if min(held.same for held in tokens) > _ALL and max(held.following for held in tokens) < _FEW:
            causal = _causal(run)
            if all(held.positions == 1 for held in tokens) and _varies(pairs[0][0]):
                return _repeats_input(run, *pairs[0], tokens[0].to_json())
            if causal is not None:
                return _not_shifted(run, *pairs[0], causal)
            if all(_leaves_some_out(loss, held) for loss, held in pairs):
                return _not_masked(run, *pairs[-1])
    return None if groups else _token_by_token(run)


def _token_by_token(run: RecordedRun) -> Claim | None:
    """The same for a single sequence that a loop goes through: one id is looked up, and one label follows."""
    found: list[tuple[LossCall, EmbeddingCall]] = []
    for look in run.sampled.steps:
        ids = [call for call in look.calls.embeddings if call.lowest == call.highest]
        for loss in look.calls.losses:
            before = [call for call in ids if call.index < loss.index]
            if before and loss.trained_on and loss.op in CLASS_LOSSES and len(loss.labels or {}) == 1:
                found.append((loss, before[-1]))
    same = [str(token.lowest) in (loss.labels or {}) for loss, token in found]
    kinds = len({token.lowest for _, token in found})
    steps = {loss.step for loss, _ in found}
    if len(steps) < _FEWEST or len(found) < _POSITIONS * len(steps) or kinds < 5 or not all(same):
        return None
    return _repeats_input(run, *found[0], {"same": 1.0, "compared": len(found), "ids": kinds})


def _causal(run: RecordedRun) -> Causality | None:
    """Evidence that a model whose targets are its inputs depends only on the inputs so far.

    A model that uses the whole row is an autoencoder, or fills masked tokens: its targets are its own inputs on
    purpose.
    """
    for root in run.sampled.backward_calls:
        facts = root.causality
        if facts is not None and facts.applies and facts.offset == 0 and facts.from_past:
            return facts if (facts.from_future or 0.0) <= 1e-6 * facts.from_past else None
    return None


def _two_later(run: RecordedRun, loss: LossCall, tokens: TokenAlignment) -> Claim:
    return Claim(
        0.93,
        f"The targets are shifted twice, in the data and in the model: at `{loss.op}` ({loss.site}), they are the "
        f"input ids two tokens later in {tokens.second:.1%} of the positions (one token later in "
        f"{tokens.following:.1%}). The loss is at {run.curve.end:.3g}.",
        step=loss.step,
        where=where_of(loss.site, tokens.site),
        evidence=tokens.to_json(),
        fixes=("Shift once: pass the unshifted ids as labels to a model that shifts them itself.",),
    )


def _not_shifted(run: RecordedRun, loss: LossCall, tokens: TokenAlignment, causal: Causality) -> Claim:
    return Claim(
        0.93,
        f"The targets of `{loss.op}`{at_place(loss.site)} are the input ids of {tokens.site} at the same positions "
        f"({tokens.same:.1%} of them; the next id in {tokens.following:.1%}), and `{causal.model}` sees only the "
        f"inputs so far: it learns to repeat its input token. The loss is at {run.curve.end:.3g}.",
        step=loss.step,
        where=where_of(loss.site, tokens.site),
        evidence=tokens.to_json() | {"causality": causal.to_json()},
        fixes=("Shift the targets by one: `logits[:, :-1]` against `ids[:, 1:]`.",),
    )


def _varies(loss: LossCall) -> bool:
    """Whether the labels of one call are of several kinds; not known if there are very many."""
    return loss.labels is None or len(loss.labels) > 2


def _repeats_input(
    run: RecordedRun, loss: LossCall, tokens: TokenAlignment | EmbeddingCall, evidence: Evidence
) -> Claim:
    return Claim(
        0.9,
        f"The targets of `{loss.op}`{at_place(loss.site)} are the ids that {tokens.site} looked up for the same time "
        f"step ({evidence['same']:.1%} of them): the model learns to repeat its input token. The loss is at "
        f"{run.curve.end:.3g}.",
        step=loss.step,
        where=where_of(loss.site, tokens.site),
        evidence=evidence,
        fixes=("Shift the targets by one time step: `ids[:, t]` as input and `ids[:, t + 1]` as target.",),
    )


def _leaves_some_out(loss: LossCall, tokens: TokenAlignment) -> bool:
    """Whether labels within the rows do not count, as where masked tokens are filled in; not only those of padding."""
    left = 1 - (loss.valid or 0) / max(1, loss.targets or 0)
    return left > 0.1 and tokens.tail_label == loss.ignore_index and tokens.tail_elsewhere > 0.3


def _not_masked(run: RecordedRun, loss: LossCall, tokens: TokenAlignment) -> Claim:
    valid, of = loss.valid or 0, loss.targets or 0
    return Claim(
        0.85,
        f"Only {valid} of {of} targets of `{loss.op}`{at_place(loss.site)} count, as where masked tokens are "
        f"predicted, and {tokens.same:.1%} of these are the input ids of {tokens.site} at the same positions: the "
        f"tokens to predict are not masked in the input. The loss is at {run.curve.end:.3g}.",
        step=loss.step,
        where=where_of(loss.site, tokens.site),
        evidence=tokens.to_json() | {"counted": valid, "targets": of},
        fixes=(
            "Replace the input ids with the mask token where the labels count, and set the other labels to the ignore "
            "index: `ids.masked_fill(mask, MASK)` and `labels.masked_fill(~mask, -100)`.",
        ),
    )


def padding_counted(run: RecordedRun) -> Claim | None:
    """Rows that end in runs of one label, where the inputs are constant too, and these labels count."""
    for pairs in _aligned(run).values():
        plain = [(loss, held) for loss, held in pairs if loss.reduction != "none" and not loss.weighted]
        padded = [(loss, held) for loss, held in plain if _ends_in_padding(held)]
        if len(padded) < max(_FEWEST, 0.8 * len(pairs)) or len({held.tail_label for _, held in padded}) != 1:
            continue
        share = median(held.tail_share for _, held in padded)
        if share < 0.2:
            continue
        loss, tokens = padded[0]
        label = tokens.tail_label
        unmatched = "" if loss.ignore_index == -100 else f", and the ignore index ({loss.ignore_index}) matches nothing"
        return Claim(
            0.88 if share > 0.3 else 0.75,
            f"{share:.0%} of the targets that count in `{loss.op}`{at_place(loss.site)} are the padding at the end of "
            f"the rows: the label {label}, in runs of {tokens.tail_lengths} different lengths where the input ids are "
            f"constant as well{unmatched}. The loss ({run.curve.end:.3g}) is mostly that of an easy token.",
            step=loss.step,
            where=where_of(loss.site, tokens.site),
            evidence=tokens.to_json() | {"ignore_index": loss.ignore_index, "share": share},
            severity="warning",
            fixes=(
                f"Exclude the padding from the loss: `ignore_index={label}`, or set the labels of the padding to -100.",
            ),
        )
    return None


def _ends_in_padding(tokens: TokenAlignment) -> bool:
    """Whether the last label of the rows is padding: in runs of different lengths, and almost nowhere else."""
    is_run = tokens.tail_share > 0.1 and tokens.tail_elsewhere < 0.05 and tokens.tail_lengths >= 3
    return is_run and tokens.tail_padded > 0.95


RULES: tuple[Rule, ...] = (
    Rule("loss.target-offset", "wiring", target_offset,
         explains=("mask.leaks-future", "lr.*", "data.labels-uninformative", "optim.not-learning")),
    Rule("loss.padding-counted", "value", padding_counted, explains=("data.class-collapse",)),
)  # fmt: skip
