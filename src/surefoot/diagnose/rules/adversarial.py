"""Generators and discriminators: one side that has won, and samples that are too similar."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.curves import present, present_finite
from surefoot.diagnose.data_summary import where_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.watch.operation_names import DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import BackwardCall, OptimizerFacts, SampledStep, TensorSummary


@dataclass(frozen=True)
class Pair:
    """The two optimizers of a GAN, and the models they train."""

    generator: OptimizerFacts
    discriminator: OptimizerFacts
    generator_models: set[str]
    discriminator_models: set[str]


def adversaries(run: RecordedRun) -> Pair | None:
    """Two optimizers: one trains through the other's model, which classifies real and generated samples."""
    active = [held for held in run.optimizers if held.steps >= max(10, 0.02 * run.steps)]
    for first in active:
        for second in active:
            if first.number < second.number:
                found = _roles(run, first, second)
                if found is not None and not _learns_values(run):
                    made_by, judged_by = found
                    return Pair(made_by, judged_by, _models(run, made_by), _models(run, judged_by))
    return None


def _owned(run: RecordedRun, optimizer: OptimizerFacts) -> set[int]:
    return {p.id for p in run.parameters.values() if p.optimizers == [optimizer.number]}


def _models(run: RecordedRun, optimizer: OptimizerFacts) -> set[str]:
    return {run.parameters[number].model for number in _owned(run, optimizer)} - {""}


def _roles(run: RecordedRun, a: OptimizerFacts, b: OptimizerFacts) -> tuple[OptimizerFacts, OptimizerFacts] | None:
    """Generator and discriminator: the generator's loss goes through the discriminator, which also learns alone.

    If one model's outputs are seen to be the other's inputs, that decides: the encoder of an adversarial autoencoder
    learns alone too, and its decoder's loss goes through it, but the decoder comes after it.
    """
    own_a, own_b = _owned(run, a), _owned(run, b)
    if not own_a or not own_b:
        return None
    both = only_a = only_b = 0
    for root in run.sampled.backward_calls:
        reached = set(root.parameters)
        in_a, in_b = bool(reached & own_a), bool(reached & own_b)
        both += in_a and in_b
        only_a += in_a and not in_b
        only_b += in_b and not in_a
    if not both:
        return None
    by_passes = _by_passes(run, a, b)
    if by_passes is not None:
        return by_passes if _steps_without(run, by_passes[1], by_passes[0]) else None
    if bool(only_a) == bool(only_b):
        return None
    return (a, b) if only_b else (b, a)


def _steps_without(run: RecordedRun, first: OptimizerFacts, second: OptimizerFacts) -> bool:
    """Whether one optimizer makes steps of its own; the decoder of an autoencoder steps with the encoder."""
    followed = [set(root.optimizers) for root in run.sampled.backward_calls if root.optimizers]
    return not followed or any(first.number in each and second.number not in each for each in followed)


def _by_passes(run: RecordedRun, a: OptimizerFacts, b: OptimizerFacts) -> tuple[OptimizerFacts, OptimizerFacts] | None:
    """If generated samples are never detached: the model whose outputs are the other's inputs."""
    for first, second in ((a, b), (b, a)):
        makers, judges = _models(run, first), _models(run, second)
        for look in run.sampled.steps:
            made = {_sign(p.outputs[0]) for p in look.model_calls if p.model in makers and p.outputs}
            if any(_sign(p.inputs[0]) in made for p in look.model_calls if p.model in judges and p.inputs):
                return first, second
    return None


def _sign(described: TensorSummary) -> tuple[float | None, ...]:
    return described.mean, described.min, described.max


def _learns_values(run: RecordedRun) -> bool:
    """Whether the other model is a critic of reinforcement learning: it is fitted to targets that vary."""
    if any((call.target.std or 0.0) > 1e-4 for call in run.sampled.training_losses(*DISTANCE_LOSSES)):
        return True
    for call in run.sampled.calls.differences:
        if (call.target.std or 0.0) > 1e-4 and (call.target.shape or [0])[-1:] in ([], [1]):
            return True
    return bool(run.facts.policy_entropies)


# ── the discriminator has won ────────────────────────────────────────────────────────────────────────────────────────


def discriminator_wins(run: RecordedRun) -> Claim | None:
    """The discriminator's loss stays near 0, and the generator gets no useful gradient.

    Its gradient dies, or the discriminator makes no error at all and the generator's loss has no bound: a squared loss
    ends at most four times as high as with an undecided discriminator, and its gradient does not vanish there. While
    the gradient grows or the generator's own loss falls, the generator still learns.
    """
    pair = adversaries(run)
    if pair is None:
        return None
    judge, maker = run.curve_of(pair.discriminator), run.curve_of(pair.generator)
    if judge.count < 30 or maker.count < 10 or min(judge.finite) < -1e-3 or judge.start <= 0:
        return None
    late = sorted(judge.finite[int(0.7 * judge.count) :])
    middle, high = late[len(late) // 2], late[int(0.8 * len(late))]
    if middle > 0.08 * judge.start or high > 0.25 * judge.start:
        return None
    since = next((s for s, v in zip(judge.steps, judge.values, strict=True) if v < 0.1 * judge.start), judge.steps[0])
    norms = present_finite(pair.generator.series.grad_norm)
    first, last = median(norms[:5]) if norms else math.nan, median(norms[-20:]) if norms else math.nan
    if last > 0.3 * first and (middle > 0.02 * judge.start or maker.end < 5 * abs(maker.start)):
        return None
    if 0 < maker.end < 0.5 * maker.start:
        return None
    name = "/".join(sorted(pair.discriminator_models)) or "the discriminator"
    other = "/".join(sorted(pair.generator_models)) or "the generator"
    return Claim(
        0.92,
        f"`{name}` distinguishes real from generated samples without error: its loss is down from {judge.start:.3g} to "
        f"{middle:.2g} since step {since}, while the loss of `{other}` went from {maker.start:.3g} to {maker.end:.3g} "
        f"and its gradient norm from {first:.2g} to {last:.2g}.",
        step=since,
        where=where_of(name, other, pair.discriminator.site),
        evidence={
            "discriminator_loss": [judge.start, middle],
            "generator_loss": [maker.start, maker.end],
            "generator_gradient": [first, last],
            "learning_rates": [_rate(pair.discriminator), _rate(pair.generator)],
        },
    )


def _rate(optimizer: OptimizerFacts) -> float | None:
    rates = present(optimizer.series.lr)
    return rates[0] if rates else None


def discriminator_diverged(run: RecordedRun) -> Claim | None:
    """The discriminator's loss has risen far above that of an answer without knowledge, and stays there."""
    pair = adversaries(run)
    if pair is None:
        return None
    judge = run.curve_of(pair.discriminator)
    if judge.count < 30 or min(judge.finite) < 0 or judge.start <= 0:
        return None
    late = median(judge.finite[judge.count // 2 :])
    rate, other = _rate(pair.discriminator), _rate(pair.generator)
    if late < 5 * judge.start or rate is None or other is None:
        return None
    name = "/".join(sorted(pair.discriminator_models)) or "the discriminator"
    return Claim(
        0.8,
        f"The loss of `{name}` rose from {judge.start:.3g} to {late:.3g} and stays there, far worse than a guess. "
        f"Its {pair.discriminator.type} has a learning rate of {rate:g}, that of the generator {other:g}.",
        step=next(s for s, v in zip(judge.steps, judge.values, strict=True) if v > 5 * judge.start),
        where=where_of(name, pair.discriminator.site),
        evidence={"discriminator_loss": [judge.start, late], "learning_rates": [rate, other]},
        fixes=(f"Lower the learning rate of `{name}` from {rate:g} to {min(other, rate / 10):g}.",),
    )


# ── the generator helps the discriminator ────────────────────────────────────────────────────────────────────────────


def generator_sign(run: RecordedRun) -> Claim | None:
    """Both losses push the discriminator's output for generated samples in the same direction."""
    pair = adversaries(run)
    if pair is None or any(root.custom for root in run.sampled.backward_calls):
        return None  # a function of the script's own may reverse gradients
    own = _owned(run, pair.generator)
    directions = []
    for look in run.sampled.steps:
        made = {_sign(p.outputs[0]) for p in look.model_calls if p.model in pair.generator_models and p.outputs}
        judged = [p for p in look.model_calls if p.model in pair.discriminator_models and p.inputs]
        generated = {p.index for p in judged if _sign(p.inputs[0]) in made}
        mine = _pushed([r for r in look.backward_calls if _is_of_generator(r, pair, own)], generated)
        other = _pushed([r for r in look.backward_calls if not _is_of_generator(r, pair, own)], generated)
        if mine and other and len(generated) < len(judged):  # and real samples were judged as well
            directions.append((mine, other))
    same = [each for each in directions if each[0] * each[1] > 0]
    if len(directions) < 5 or len(same) < 0.9 * len(directions):
        return None
    root = next(r for r in run.sampled.backward_calls if _is_of_generator(r, pair, own))
    name, other_name = ("/".join(sorted(each)) for each in (pair.generator_models, pair.discriminator_models))
    return Claim(
        0.93,
        f"In {len(same)} of {len(directions)} sampled steps the loss of `{name}`{at_place(root.site)} and that of "
        f"`{other_name}` push the output for generated samples in the same direction: `{name}` learns to be "
        "recognised, not to pass as real.",
        step=root.step,
        where=where_of(root.site, name),
        evidence={"steps": len(directions), "same_direction": len(same), "gradients": directions[:5]},
        fixes=(
            f"In the loss{at_place(root.site)}, use the label of real samples for generated ones, or change the sign "
            f"of the discriminator's output.",
        ),
    )


def _is_of_generator(root: BackwardCall, pair: Pair, own: set[int]) -> bool:
    """Whether the generator makes a step with a gradient: its optimizer comes next, or its parameters are reached.

    Without `detach()`, the loss of the discriminator reaches them too.
    """
    steps = [side.number in root.optimizers for side in (pair.generator, pair.discriminator)]
    return steps[0] if steps[0] != steps[1] else bool(own & set(root.parameters))


def _pushed(roots: list[BackwardCall], generated: set[int | None]) -> float:
    """The gradient of one side's losses for the discriminator's outputs for generated samples, added up."""
    totals = [each.total for root in roots for each in root.output_gradients or [] if each.index in generated]
    return sum(total for total in totals if total is not None)


# ── samples all alike ────────────────────────────────────────────────────────────────────────────────────────────────


_GROWN = 300
"""A generator with fewer steps may still generate samples that are as similar as those of random weights."""


def mode_collapse(run: RecordedRun) -> Claim | None:
    """Generated samples vary far less than real ones, or cover only a part of them."""
    pair = adversaries(run)
    if pair is None or discriminator_wins(run) is not None:
        return None
    late = [look for look in run.sampled.steps if look.step >= 0.4 * run.steps] or run.sampled.steps[-2:]
    batches = _samples(late, pair)[1]
    real = _samples(run.sampled.steps, pair)[0]  # late sampled steps may be of the generator alone
    if len(real) < 24 or not batches or min(map(len, batches)) < 8:
        return None
    # Batch by batch: a generator that switches between modes generates similar samples at any one time.
    spread = median(_spread(batch) for batch in batches) / max(1e-9, _spread(real))
    if pair.generator.steps < _GROWN and spread > 0.5 * _first_spread(run, pair) / max(1e-9, _spread(real)):
        return None  # the samples were as similar to each other before training
    if _still_grows(run, pair, spread * _spread(real)):
        return None
    covered, near = (median(values) for values in zip(*(coverage(real, batch) for batch in batches), strict=True))
    if spread > 0.25 and not (covered < 0.35 and near > 0.5):
        return None
    if covered > 0.5 and spread * _spread(real) > 0.25 * max(_spreads(run, pair)):
        return None  # in the middle of the data and never more different: it still generates the mean
    judge = run.curve_of(pair.discriminator)
    name = "/".join(sorted(pair.generator_models)) or "the generator"
    return Claim(
        0.9 if spread < 0.25 else 0.75,
        f"Samples of `{name}` are nearly identical: from step {late[0].step} on their spread is {spread:.1%} of that "
        f"of the real data and they are near {covered:.0%} of the real rows, while the discriminator's loss is "
        f"{judge.end:.3g}, not 0.",
        step=late[0].step,
        where=where_of(name, pair.generator.site),
        evidence={"spread_ratio": spread, "real_rows_covered": covered, "samples_near_real": near}
        | {"discriminator_loss": judge.end, "rows": [len(real), sum(map(len, batches))]},
    )


def _still_grows(run: RecordedRun, pair: Pair, now: float) -> bool:
    """Whether samples have become more different since the beginning, and were never much more different than now."""
    spreads = _spreads(run, pair)
    return now > 2 * _first_spread(run, pair) and now > 0.25 * max(spreads, default=0.0) and len(spreads) > 2


def _spreads(run: RecordedRun, pair: Pair) -> list[float]:
    """The difference between the samples of each batch, in order."""
    return [_spread(batch) for look in run.sampled.steps for batch in _samples([look], pair)[1]]


def _first_spread(run: RecordedRun, pair: Pair) -> float:
    """The difference between the first samples of a generator; 0 if they are not known."""
    made = _samples(run.sampled.steps[:2], pair)[1]
    return _spread(made[0]) if made else 0.0


def _samples(looks: list[SampledStep], pair: Pair) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Real rows, and each batch of generated ones."""
    real: list[list[float]] = []
    made: list[list[list[float]]] = []
    for look in looks:
        outputs = set()
        for note in look.model_calls:
            if note.model in pair.generator_models and note.outputs and note.samples:
                outputs.add(_sign(note.outputs[0]))
                if note.samples[-1]:
                    made.append(note.samples[-1])
        for note in look.model_calls:
            if note.model not in pair.discriminator_models or not note.inputs or not note.samples:
                continue
            given = note.inputs[0]
            if given.requires_grad or _sign(given) in outputs or _mixed(note.samples[0], made):
                continue
            real.extend(note.samples[0] or [])
    widths = {len(row) for row in real} | {len(row) for batch in made for row in batch}
    return (real[-256:], made[-24:]) if len(widths) == 1 else ([], [])


def _mixed(rows: list[list[float]] | None, made: list[list[list[float]]]) -> bool:
    """Whether a batch holds made rows, as when real and made ones go through the discriminator together."""
    known = {tuple(row) for batch in made for row in batch}
    return any(tuple(row) in known for row in rows or [])


def _spread(rows: list[list[float]]) -> float:
    import numpy as np

    return float(np.array(rows).std(0).mean())


def coverage(real: list[list[float]], made: list[list[float]]) -> tuple[float, float]:
    """The share of real rows with a generated one as near as other real ones are, and vice versa."""
    import numpy as np

    r, m = np.array(real), np.array(made)
    within = np.sqrt(((r[:, None] - r[None]) ** 2).sum(-1))
    across = np.sqrt(((r[:, None] - m[None]) ** 2).sum(-1))
    np.fill_diagonal(within, np.inf)
    # As near as the nearest of equally many real rows would be, on average over thinnings.
    step = max(1, len(r) // len(m))
    reach = 3 * float(np.median([within[:, start::step].min(1).mean() for start in range(min(step, 4))]))
    return float((across.min(1) < reach).mean()), float((across.min(0) < reach).mean())


RULES: tuple[Rule, ...] = (
    Rule(
        "gan.discriminator-wins",
        "dynamics",
        discriminator_wins,
        explains=(
            "model.vanishing-gradient",
            "lr.too-low",
            "lr.too-high",
            "gan.mode-collapse",
            "model.saturated-units",
        ),
    ),
    Rule("lr.too-high", "dynamics", discriminator_diverged, explains=("gan.*", "model.*", "init.*")),
    Rule("loss.sign-flipped", "wiring", generator_sign, explains=("gan.*", "lr.*", "model.*", "optim.*")),
    Rule("gan.mode-collapse", "dynamics", mode_collapse, explains=("lr.too-high", "lr.too-low")),
)
