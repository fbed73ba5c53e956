"""Losses with several terms: one that contributes nearly all of the gradient, and one that is not learned.

The terms of a loss are the scalars that it is the sum of. Their gradients are measured at a few steps.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place, count_of
from surefoot.diagnose.curves import present
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.wiring import fix_of_cut, words_of_cut
from surefoot.diagnose.sampled import level_of
from surefoot.watch.operation_names import BINARY_LOSSES, DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import BackwardCall, LossCall, LossTerm


def term_dominates(run: RecordedRun) -> Claim | None:
    """One term of the loss contributes nearly all of the gradient, and another one does not improve."""
    looked = [root for root in run.sampled.backward_calls if root.terms]
    if not looked:
        return None
    last, terms = looked[-1], looked[-1].terms or []
    total = sum(term.norm for term in terms)
    if not total or not math.isfinite(total):
        return None
    strongest = max(terms, key=lambda term: term.norm)
    if not all(_share(root) > 0.985 for root in looked):
        return None
    for term in terms:
        if term is strongest or term.loss is None:
            continue
        notes = [n for n in run.sampled.training_losses() if n.site == term.loss_site and n.value]
        values = present(n.value for n in notes)
        if any(n.target_from_model for n in notes):
            continue  # its targets move with the model: its level does not indicate progress
        if term.loss == strongest.loss and _same_prediction(run, last, term, strongest):
            continue  # one prediction with two targets, as mixup has with random weights
        if term.loss == strongest.loss and run.adversarial:
            continue  # a discriminator judges real and made rows by one function: it fails at one of them
        if len(values) >= 4 and _is_stuck(notes):
            return Claim(
                0.85,
                f"{strongest.norm / total:.1%} of the gradient comes from the term{at_place(strongest.site)}; the term "
                f"{term.loss}{at_place(term.loss_site)} contributes {term.norm / total:.2%} and stays at "
                f"{median(values[-3:]):.3g} (it began at {median(values[:3]):.3g}).",
                step=last.step,
                where=(strongest.site, term.loss_site or ""),
                evidence={
                    "terms": [each.to_json() for each in terms],
                    "first": median(values[:3]),
                    "last": median(values[-3:]),
                },
            )
    return None


def _same_prediction(run: RecordedRun, root: BackwardCall, one: LossTerm, other: LossTerm) -> bool:
    """Whether two terms judge the same tensor."""
    look = next((look for look in run.sampled.steps if root in look.backward_calls), None)
    losses = look.calls.losses if look is not None else []
    made = {call.index: call.producer.index for call in losses if call.producer is not None}
    if one.loss_index not in made or other.loss_index not in made:
        return False
    return made[one.loss_index] == made[other.loss_index]


def _is_stuck(notes: list[LossCall]) -> bool:
    """Whether a loss ends where it began, or no better than the best constant answer."""
    values = present(n.value for n in notes)
    last = median(values[-3:])
    spread = present(n.target_variance for n in notes)
    if notes[0].op == "mse_loss" and spread:
        return bool(last > 0.85 * median(spread))
    return bool(last > 0.85 * median(values[:3]) and last > 1e-3)


def _share(root: BackwardCall) -> float:
    norms = [term.norm for term in root.terms or []]
    return max(norms) / sum(norms) if sum(norms) else 0.0


_AS_CONSTANT = 0.85
"""From this share of the best constant answer's loss on, a reconstruction hardly depends on the row."""


def unused_code(run: RecordedRun) -> Claim | None:
    """A model that reconstructs its input answers with a constant, and another term of its loss has gone to 0.

    In a variational autoencoder the second term pulls the code of every row to the same distribution. If it wins, the
    code carries nothing about the row (posterior collapse).
    """
    if run.adversarial or run.nonfinite.seen or run.steps < 50:
        return None
    calls = run.sampled.training_losses(*DISTANCE_LOSSES, *BINARY_LOSSES)
    looked = [root for root in run.sampled.backward_calls if len(root.terms or []) == 2]
    if len({call.site for call in calls}) != 1 or len(calls) < 6 or not looked or not _reconstructs(run, calls[-1]):
        return None
    late = calls[-3:]
    level = level_of([_as_mean(call) for call in calls])
    reached = median(_as_mean(call).value or 0.0 for call in late)
    other = next((term for term in looked[0].terms or [] if term.loss_site != calls[0].site), None)
    rest = _rest(run, late, looked[0])
    if level is None or other is None or reached < _AS_CONSTANT * level or not rest < 0.1 * abs(other.value):
        return None
    scale = f"{other.norm:.2g} against {sum(term.norm for term in looked[0].terms or []) - other.norm:.2g}"
    return Claim(
        0.85,
        f"{calls[0].op}{at_place(calls[0].site)} ends at {reached:.4g} per element, where the best constant answer has "
        f"{level:.4g}: the model does not use its input. The other term of the loss{at_place(other.site)} went from "
        f"{other.value:.3g} to {rest:.2g}; at step {looked[0].step} the gradients of the two were {scale}.",
        step=looked[0].step,
        where=(other.site, calls[0].site),
        evidence={"reconstruction": reached, "best_constant_answer": level, "other_first": other.value}
        | {"other_last": rest, "terms": [term.to_json() for term in looked[0].terms or []]},
        fixes=(
            f"Sum both terms over the same elements, or multiply the term{at_place(other.site)} by a weight that grows "
            "from 0 during training.",
        ),
    )


def cut_before_decoder(run: RecordedRun) -> Claim | None:
    """The same if the code is cut off from its graph: then only the other term trains what comes before it.

    A straight-through estimator cuts its code, too, but adds what gradients pass through: its reconstruction improves.
    """
    collapsed = unused_code(run)
    if collapsed is None or drawn_without_gradient(run) is not None:
        return None
    cuts = [
        (look.step, cut) for look in run.sampled.steps for cut in look.breaks if cut.reaches_loss and cut.parameters
    ]
    trained = [(step, cut) for step, cut in cuts if all(run.parameters[p].optimizers for p in cut.parameters)]
    if len({step for step, _ in trained}) < 3 or len({cut.site for _, cut in trained}) != 1:
        return None
    step, cut = trained[0]
    names = [run.label(number) for number in cut.parameters]
    return Claim(
        0.9,
        f"The code is cut off from {count_of(len(names), 'parameter')} before it ({', '.join(names[:3])}) by "
        f"{words_of_cut(cut)}: the reconstruction gives them no gradient, only the other term of the loss does. "
        f"{collapsed.summary}",
        step=step,
        where=(cut.site, *names[:3]),
        evidence={**collapsed.evidence, "cut": cut.to_json()},
        fixes=(fix_of_cut(cut),),
    )


def drawn_without_gradient(run: RecordedRun) -> Claim | None:
    """A code that is drawn by `sample()`, not `rsample()`: the layers behind it do not train those before it.

    Those before it still have a gradient, of another term such as a divergence from a prior.
    """
    found = [
        (look.step, cut)
        for look in run.sampled.steps
        for cut in look.breaks
        if cut.drawn_for_layers and cut.parameters and all(run.parameters[p].optimizers for p in cut.parameters)
        and any({*cut.parameters} & {*look.backward_calls[number].parameters} for number in cut.backward_calls)
    ]  # fmt: skip
    if len({step for step, _ in found}) < 3:
        return None
    step, cut = found[0]
    names = [run.label(number) for number in cut.parameters]
    return Claim(
        0.9,
        f"What is drawn{at_place(cut.site)} from a distribution that {count_of(len(names), 'parameter')} "
        f"({', '.join(names[:3])}) {'determine' if len(names) > 1 else 'determines'} has no gradient, and the layers "
        "that use it lead to the loss: their error does not train these parameters, only another term does.",
        step=step,
        where=(cut.site, *names[:3]),
        evidence={"cut": cut.to_json(), "sampled_steps": len({step for step, _ in found})},
        fixes=(f"Draw with `rsample()`{at_place(cut.site)}, or with `mean + std * torch.randn_like(std)`.",),
    )


_UNIFORM = 0.999
"""A policy whose entropy is above this share of the maximum chooses every action alike."""
_LARGE_BONUS = 0.5
"""Entropy is usually weighted by 0.001 to 0.05."""


def entropy_dominates(run: RecordedRun) -> Claim | None:
    """A policy that chooses every action alike to the end, because the loss rewards that more than anything else.

    The weight of the entropy is the quotient of a term of the loss and the entropy that was recorded at that step.
    """
    held = {p.step: p for p in run.facts.policy_entropies if p.actions > 1}
    late = [p for p in held.values() if p.step >= 0.5 * run.steps]
    if run.steps < 100 or len(late) < 3 or any(p.entropy < _UNIFORM * math.log(p.actions) for p in late):
        return None
    for root in run.sampled.backward_calls:
        entropy = held[root.step].entropy if root.step in held else 0.0
        others = [abs(term.value) for term in root.terms or []]
        for term in root.terms or []:
            weight = abs(term.value) / entropy if entropy else 0.0
            if weight > _LARGE_BONUS and len(others) > 1 and _is_round(weight):
                return Claim(
                    0.85,
                    f"The entropy of the policy stays at its maximum ({late[-1].entropy:.4g} nats for "
                    f"{late[-1].actions} actions) in all {run.steps:,} steps: the term{at_place(term.site)} is "
                    f"{weight:.3g} times the entropy, {abs(term.value):.3g} at step {root.step}.",
                    step=root.step,
                    where=(term.site,),
                    evidence={"weight": weight, "entropy": late[-1].entropy, "actions": late[-1].actions}
                    | {"terms": [each.to_json() for each in root.terms or []]},
                    fixes=("Multiply the entropy by 0.01 in the loss.",),
                )
    return None


def _is_round(weight: float) -> bool:
    """Whether a number has at most two digits other than 0, as a coefficient in a script has."""
    return math.isclose(weight, float(f"{weight:.1e}"), rel_tol=1e-3)


def _as_mean(call: LossCall) -> LossCall:
    """A loss per element of its targets."""
    if call.reduction != "sum" or call.value is None:
        return call
    return replace(call, reduction="mean", value=call.value / max(1, math.prod(call.target.shape)))


def _rest(run: RecordedRun, losses: list[LossCall], measured: BackwardCall) -> float:
    """The size of what the loss holds besides a loss function, in late steps; of a sum that is divided, before that."""
    factor = sum(term.value for term in measured.terms or []) / measured.value if measured.value else 1.0
    values = {root.step: root.value * factor for root in run.sampled.backward_calls if root.value is not None}
    found = [abs(total - call.value) for call in losses if call.value and (total := values.get(call.step)) is not None]
    return median(found) if found else math.inf


def _reconstructs(run: RecordedRun, loss: LossCall) -> bool:
    """Whether the targets of a loss are what the model was given in the same step."""
    given = [call.inputs[0] for call in run.sampled.trained_model_calls if call.step == loss.step and call.inputs]
    goal = loss.target
    return any(
        math.prod(each.shape) == math.prod(goal.shape)
        and (each.mean, each.min, each.max) == (goal.mean, goal.min, goal.max)
        for each in given
    )


RULES: tuple[Rule, ...] = (
    Rule("loss.term-dominates", "value", term_dominates, explains=("lr.too-low",)),
    Rule("loss.term-dominates", "value", entropy_dominates, explains=("optim.not-learning", "rl.zero-advantage")),
    Rule("loss.term-dominates", "value", unused_code, explains=("lr.*", "optim.not-learning", "model.*")),
    Rule("optim.detached-graph", "wiring", cut_before_decoder,
         explains=("loss.term-dominates", "lr.*", "optim.not-learning", "model.*")),
    Rule("optim.detached-graph", "wiring", drawn_without_gradient,
         explains=("loss.term-dominates", "lr.*", "optim.not-learning", "model.*")),
)  # fmt: skip
