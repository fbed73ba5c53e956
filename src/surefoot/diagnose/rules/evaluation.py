"""Evaluation: random evaluation, and labels that do not belong to the rows they are compared with.

Rows, losses and predictions of blocks without gradients are compared with those of training. Overlap of the splits is
in `data_splits`; a model that is left in training mode is in `wiring`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.by_hand import trained_models
from surefoot.diagnose.data_summary import entropy, where_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.data_labels import Predictability, known_pairs, predictability
from surefoot.diagnose.rules.data_splits import split_mismatch
from surefoot.diagnose.rules.model_mode import evaluating_blocks, repeats_rows
from surefoot.watch.operation_names import CLASS_LOSSES, COMPARISONS

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import DropoutCall, EvaluationBlock, LossCall


def random_eval(run: RecordedRun) -> Claim | None:
    """An evaluation drops values at random, although every dropout module of the model is in evaluation mode."""
    if run.adversarial or run.facts.policy_entropies:
        return None  # samples and rollouts are drawn without gradients
    trained, evaluating = trained_models(run), evaluating_blocks(run)
    blocks: list[EvaluationBlock] = []
    hot: list[DropoutCall] = []
    in_training: list[bool] = []
    for block in run.facts.evaluation_calls:
        passes = [call for call in run.facts.evaluations if call.block == block.block and call.model in trained]
        if block.block not in evaluating or not passes or any(call.dropouts_on for call in passes):
            continue  # none of the trained models, or `model.train-mode-eval`
        blocks.append(block)
        if block.dropouts and not repeats_rows(passes):
            hot.append(block.dropouts[0])
            in_training.append(any(call.training for call in passes))
    if not hot or len(hot) < 0.5 * len(blocks):
        return None
    first, models = hot[0], sorted(trained)
    attention = first.op == "scaled_dot_product_attention"
    setting = "`dropout_p=p if self.training else 0.0`" if attention else "`training=self.training`"
    words = ", in training mode" if in_training[0] else ", and `model.eval()` does not switch it off"
    return Claim(
        0.92,
        f"`{first.op}`{at_place(first.site)} drops {first.p:.0%} at random in {len(hot)} of {len(blocks)} evaluations "
        f"that were recorded{words}: the same rows give a different result each time.",
        step=first.step,
        where=where_of(first.site, first.module, *models[:1]),
        evidence={"evaluations": len(blocks), "with_dropout": len(hot), "p": first.p, "call": first.op},
        severity="warning",
        fixes=(f"Pass {setting}{at_place(first.site)}, and call `model.eval()` before evaluating.",),
    )


# ── labels of another row ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Scores:
    """The accuracy in late losses, and that of the best guess without inputs."""

    accuracy: float
    guess: float
    rows: int

    @property
    def error(self) -> float:
        """The standard error of the accuracy of a guess."""
        return math.sqrt(max(self.guess * (1 - self.guess), 1e-4) / max(1, self.rows))


def _scores(losses: list[LossCall]) -> Scores | None:
    known = [loss for loss in losses if loss.accuracy is not None and loss.labels and loss.valid]
    rows = sum(loss.valid or 0 for loss in known)
    if not known or rows < 32:
        return None
    counts: dict[str, int] = {}
    for loss in known:
        for label, count in (loss.labels or {}).items():
            counts[label] = counts.get(label, 0) + count
    if entropy(counts) < 0.2:
        return None
    right = sum((loss.accuracy or 0.0) * (loss.valid or 0) for loss in known) / rows
    return Scores(right, max(counts.values()) / sum(counts.values()), rows)


def labels_mismatched(run: RecordedRun) -> Claim | None:
    """Evaluation is no better than a guess, although inputs are similar and training generalizes to other rows."""
    if run.adversarial or run.nonfinite.seen or run.blind or split_mismatch(run) is not None:
        return None
    blocks = [block for block in run.facts.evaluation_calls if block.losses and block.step >= 0.3 * run.steps]
    judged = [loss for block in blocks for loss in block.losses]
    evaluated = [loss for loss in judged if loss.op in CLASS_LOSSES] or [
        loss for loss in judged if loss.op in COMPARISONS
    ]
    late = [loss for loss in run.sampled.training_losses(*CLASS_LOSSES) if loss.step >= 0.3 * run.steps]
    there, here = _scores(evaluated), _scores(late)
    if there is None or here is None or not _same_labels(evaluated, late):
        return None
    learned = here.accuracy > here.guess + max(0.2, 6 * here.error)
    if not learned or there.accuracy > there.guess + 3 * there.error:
        return None
    general = _predicted_within(run)
    if general is None or general.score < 6.0:
        return None  # labels that cannot be predicted at all were memorized
    across = _predicted_across(run, blocks)
    if across is None or across.found > across.shuffled + 0.25 * (general.found - general.shuffled):
        return None
    site = evaluated[0].site
    return Claim(
        0.88,
        f"On evaluation rows{at_place(site)} {there.accuracy:.1%} of the predictions are right, and always guessing "
        f"the most frequent label gives {there.guess:.1%}; in training {here.accuracy:.1%} are. The inputs of both are "
        f"similar, but training rows predict the label of their nearest evaluation row in {across.found:.1%} of the "
        f"cases ({across.shuffled:.1%} by chance, {general.found:.1%} among training rows): the evaluation labels do "
        f"not belong to their rows.",
        step=blocks[0].step,
        where=where_of(site),
        evidence={
            "evaluation_accuracy": there.accuracy,
            "training_accuracy": here.accuracy,
            "guess": there.guess,
            "foretold": across.found,
            "foretold_by_chance": across.shuffled,
            "foretold_in_training": general.found,
        },
        fixes=("Join inputs and labels of the evaluation split again, by key: one of them was sorted or shuffled.",),
    )


def _same_labels(evaluated: list[LossCall], trained: list[LossCall]) -> bool:
    """Whether both have the same kinds of labels and as many outputs, which counted answers do not tell."""
    kinds = [{label for loss in losses for label in loss.labels or {}} for losses in (evaluated, trained)]
    widths = [
        {loss.distribution.classes for loss in losses if loss.distribution is not None}
        for losses in (evaluated, trained)
    ]
    return (not widths[0] or widths[0] == widths[1]) and len(kinds[0] & kinds[1]) >= 0.5 * len(kinds[1])


def _predicted_within(run: RecordedRun) -> Predictability | None:
    """How well training rows predict each other's labels."""
    pairs = known_pairs(run)
    return predictability(pairs, continuous=False) if len(pairs) >= 60 else None


def _predicted_across(run: RecordedRun, blocks: list[EvaluationBlock]) -> Predictability | None:
    """How well training rows predict the labels of evaluation rows, compared with shuffled labels."""
    import numpy as np

    trained = known_pairs(run)
    held = {
        tuple(row): label
        for block in blocks
        if block.pairs is not None
        for row, label in zip(block.pairs.inputs, block.pairs.targets, strict=True)
    }
    width = len(trained[0][0]) if trained else 0
    others = [(list(row), label) for row, label in held.items() if len(row) == width]
    if len(trained) < 60 or len(others) < 24:
        return None
    x, z = np.array([row for row, _ in trained]), np.array([row for row, _ in others])
    y, w = np.array([label for _, label in trained]), np.array([label for _, label in others])
    spread = x.std(0)
    x, z = x[:, spread > 0] / spread[spread > 0], z[:, spread > 0] / spread[spread > 0]
    distances = (x * x).sum(1)[None] - 2 * z @ x.T
    near = np.argsort(distances, 1)[:, :5]
    found = float((y[near] == w[:, None]).mean())
    shuffled = mean(float((y[near] == np.roll(w, turn)[:, None]).mean()) for turn in range(1, len(w)))
    return Predictability(found, shuffled, (found - shuffled) * math.sqrt(median([len(w), len(y)])))


RULES: tuple[Rule, ...] = (
    Rule("eval.random-eval", "wiring", random_eval),
    Rule("eval.labels-mismatched", "value", labels_mismatched, explains=("data.labels-uninformative",)),
)
