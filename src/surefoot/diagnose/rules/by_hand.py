"""Loops that update their parameters themselves, without an optimizer: where the updates go."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.by_hand import updates_by_hand
from surefoot.diagnose.initial_weights import began_new
from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import ParameterFacts

_IN_PLACE = "Update in place: `p -= lr * p.grad` under no_grad; `p = p - …` only binds a new name."


def never_moved(run: RecordedRun) -> Claim | None:
    """No parameter ever changes."""
    mine = _parameters(run)
    looked = [p for p in mine if p.in_graph >= 3]
    norms = run.grad_norms
    if run.facts.optimizers or run.facts.backwards < 20 or not looked or any(p.moved_alone for p in mine):
        return None
    if not norms or median(norms) == 0 or not run.curve.count:
        return None
    return Claim(
        0.85,
        f"backward ran {run.facts.backwards} times{at_place(_site(run))}, with gradients (norm {median(norms):.3g}), "
        f"and {', '.join(p.label for p in looked[:4])} never changed: the updates do not reach them.",
        step=0,
        where=(_site(run), *[p.label for p in looked[:4]]),
        evidence={"backwards": run.facts.backwards, "parameters": [p.label for p in looked], "changed": 0},
        fixes=(_IN_PLACE,),
    )


def left_out(run: RecordedRun) -> Claim | None:
    """Some weights are updated and others never are.

    Only what layers use as their weights counts: inputs that require a gradient are leaves as well.
    """
    if not updates_by_hand(run):
        return None
    weights = {layer.parameter for layer in run.sampled.calls.layers}
    still = [p for p in _parameters(run) if p.in_graph >= 3 and not p.moved_alone and not p.loaded and p.id in weights]
    if not still or not began_new(run.facts, still):
        return None
    names = [p.label for p in still]
    return Claim(
        0.9,
        f"The loop updates its other parameters, but {len(still)} {'matrices' if len(still) > 1 else 'matrix'} "
        f"{'get' if len(still) > 1 else 'gets'} a gradient and never {'change' if len(still) > 1 else 'changes'}: "
        f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}.",
        step=0,
        where=(_site(run), *names[:6]),
        evidence={"parameters": names[:50]},
        fixes=(
            f"Update {', '.join(f'`{name}`' for name in names[:3])} like the others: `p -= lr * p.grad` under no_grad.",
        ),
    )


def uphill(run: RecordedRun) -> Claim | None:
    """Updates go along the gradient, and the loss rises with them.

    An objective of the script's own may be maximised, and so may a loss over inputs (adversarial examples).
    """
    mine = [p for p in _parameters(run) if p.along]
    cosines, curve = [each for p in mine for each in p.along], run.curve
    if not updates_by_hand(run) or len(cosines) < 2 or not curve.count:
        return None
    if min(p.along[0] for p in mine) < 0.5 or median(cosines) < 0.5:
        return None
    if any(p.model and p.in_graph and not p.moved_alone for p in run.parameters.values()):
        return None
    blown_up = run.nonfinite.seen or curve.end > 1e3 * abs(curve.start)
    if not blown_up and not (run.sampled.training_losses() and curve.end > curve.start):
        return None
    names = [p.label for p in mine]
    return Claim(
        0.95,
        f"Updates by hand move {', '.join(names[:4])} along {'their gradients' if len(names) > 1 else 'its gradient'} "
        f"(cosine {median(cosines):.2f}) instead of against {'them' if len(names) > 1 else 'it'}: the loss rises from "
        f"{curve.start:.3g} to {max(curve.finite):.3g}{' and is not finite' if run.nonfinite.seen else ''}.",
        step=0,
        where=(_site(run), *names[:4]),
        evidence={"cosines": cosines[:20], "first": curve.start, "last": curve.end},
        fixes=("Subtract the gradient: `p -= lr * p.grad`, not `p += lr * p.grad`.",),
    )


def _parameters(run: RecordedRun) -> list[ParameterFacts]:
    """The leaves of the first graph of a loop without an optimizer."""
    return [run.parameters[number] for number in run.facts.updated_by_hand if number is not None]


def _site(run: RecordedRun) -> str:
    return next((root.site for root in run.sampled.backward_calls), "")


RULES = (
    Rule("optim.no-update", "wiring", never_moved,
         explains=("lr.*", "model.*", "data.labels-uninformative", "data.class-collapse", "init.*", "optim.epsilon")),
    Rule("optim.parameters-missing", "wiring", left_out,
         explains=("lr.*", "optim.no-update", "model.dead-units", "init.*", "loss.sum-reduction")),
    Rule("loss.sign-flipped", "wiring", uphill,
         explains=("lr.*", "model.*", "init.*", "data.*", "loss.undefined-op", "loss.sum-reduction", "precision.*")),
)  # fmt: skip
