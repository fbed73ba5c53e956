"""What an optimizer does besides its rate: the denominator of its updates, weight decay, loaded moments, clipping."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from surefoot.diagnose.curves import present, present_finite
from surefoot.diagnose.initial_weights import began_new
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.pace import ADAPTIVE
from surefoot.diagnose.straight_path import straight_path
from surefoot.record.facts import ModelLoadedEvent, OptimizerLoadedEvent

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import OptimizerFacts, PreflightFacts


_MUCH = 0.2
"""The share of what there was to learn from which on a run that learned may have been held back."""
_SMALL_STEP = 1e-3
"""A change of the weights by this share is usual; a smaller one is a small step."""
_LARGE_STEP = 0.02
"""A change of the weights by this share is no small step."""


def epsilon(run: RecordedRun) -> Claim | None:
    """Adam's eps dominates the root of the second moment, or is too small to help."""
    if not run.main:
        return None
    eps = run.main.first_group.eps
    if eps is None:
        return None
    roots = [
        value
        for update in run.main_sampled.optimizer_updates(run.main.number, first=1, last=8)
        for row in update.rows
        if (value := row.root_second_moment) is not None and value > 0 and run.sampled.is_matrix(row.parameter)
    ]
    ratio = eps / median(roots) if roots else 0.0
    typical = median(run.update_ratios() or [math.inf])
    # Without eps, the steps would have been larger by this ratio, and of a usual size.
    shrunk = typical <= _SMALL_STEP <= typical * ratio and run.curve.left >= _MUCH
    slow = eps >= 1e-3 and ratio > 10 and (run.curve.drop < 0.7 or shrunk) and not run.blind
    straight = straight_path(run)
    held_back = straight is not None and straight.is_held_back
    hinders = ratio > 2 and (slow or held_back or not run.curve.learned)
    if (eps > 1e-7 and hinders) or (eps >= 1e-3 and ratio > 2 and not run.blind):
        return Claim(
            0.9,
            f"eps={eps:g} of {run.main.type} is {eps / median(roots):.3g} times the root of the second moment "
            f"({median(roots):.2g}): updates are smaller than the learning rate by this factor, and the loss moved "
            f"from {run.curve.start:.4g} to {run.curve.end:.4g}.",
            step=1,
            where=(run.main.site,),
            evidence={"eps": eps, "root_second_moment": median(roots), "ratio": eps / median(roots)},
            fixes=(f"Lower eps below {median(roots) / 10:.0e}; the default is 1e-8.",),
            severity="error" if hinders else "info",
        )
    bad = run.nonfinite.loss
    if bad is None or bad.kind != "parameter":
        return None
    names, earlier = bad.parameters or [], [e for e in run.nonfinite.gradients if e.step < (bad.step or 0)]
    if eps < 1e-14 and not earlier:
        return Claim(
            0.85,
            f"eps={eps:g} of {run.main.type}: where a second moment is 0 the update is 0/0. "
            f"{bad.count} parameters became non-finite although no gradient was ({', '.join(names[:3])}).",
            step=bad.step,
            where=(run.main.site, *names[:3]),
            evidence={"eps": eps, "parameters": names},
        )
    return None


def weight_decay(run: RecordedRun) -> Claim | None:
    """Decay dominates the gradient, and the weights shrink."""
    curve = run.curve
    learned = curve.learned and curve.drop > 0.6
    if not run.main or (learned and curve.left < _MUCH):
        return None
    decay = max((group.weight_decay or 0.0) for group in run.main.settings or [run.main.first_group])
    if decay <= 0:
        return None
    first, rate = next(iter(run.sampled.update_ratios()), 0.0), max(run.lr, default=0.0)
    if first > 1.0 and first > 10 * rate * decay:
        return None  # the steps of the gradients moved the weights far, and the decay only brings them back
    decoupled = run.main.type in ("AdamW", "SGDW", "Lion")
    shares: list[float] = []
    looks = run.sampled.steps[3:]
    # Where little is left to learn, any decay is as strong as the gradient: the first half of a run that learns tells.
    until = sum(look.step < 0.5 * run.steps for look in looks) if learned else len(looks)
    for update in run.sampled.optimizer_updates(run.main.number, first=3, last=3 + until):
        rate = update.lr[0] if update.lr else 0.0
        for row in update.rows:
            sizes = present_finite((row.weight, row.grad, row.update))
            if not run.sampled.is_matrix(row.parameter) or len(sizes) < 3 or not all(sizes):
                continue
            weight, grad, change = sizes
            shares.append(rate * decay * weight / change if decoupled else decay * weight / grad)
    left = _norm_left(run)
    if not shares or median(shares) < (0.4 if learned else 0.3) or (left > 0.6 and not learned):
        return None
    return Claim(
        0.9,
        f"weight_decay={decay:g} changes the weights {median(shares):.2g} times as much as the gradient does, and "
        f"{left:.0%} of their first norm is left; the loss is at {curve.end:.4g} (first {curve.start:.4g}).",
        step=run.sampled.steps[-1].step if run.sampled.steps else None,
        where=(run.main.site,),
        evidence={"weight_decay": decay, "decay_to_gradient": median(shares), "norm_left": left},
        fixes=(f"Lower weight_decay to {decay / 100:.0e} or less.",),
        severity="warning" if learned else "error",
    )


def _norm_left(run: RecordedRun) -> float:
    """The share of its first norm that is left of the typical matrix, or of all together if that is less."""
    norms = [
        (p.first.norm, p.last.norm)
        for p in run.parameters.values()
        if len(p.shape) >= 2 and p.first.norm and p.last.norm is not None and p.optimizers
    ]
    if not norms:
        return 1.0
    first, last = (math.hypot(*sizes) for sizes in zip(*norms, strict=True))
    return min(last / first, median(last / first for first, last in norms))


def stale_state(run: RecordedRun) -> Claim | None:
    """Moments that do not belong to these parameters or these gradients."""
    if run.facts.preflight is not None:
        return _foreign_moments(run.facts.preflight)
    emptied = _emptied_moments(run)
    if emptied is not None:
        return emptied
    loaded = [held for held in run.facts.optimizers if held.state_loaded_at_step is not None]
    for held in loaded:
        when = next((e.step for e in run.events(OptimizerLoadedEvent) if e.optimizer == held.number), 0)
        looks = [look for look in run.sampled.steps if look.step >= when][:3]
        ratios = []
        for look in looks:
            for step in look.updates:
                for row in step.rows if step.optimizer == held.number else []:
                    size = math.sqrt(max(1, math.prod(run.parameters[row.parameter].shape)))
                    grad, root = row.grad, row.root_second_moment
                    if grad and root and len(run.parameters[row.parameter].shape) >= 2:
                        ratios.append(root * size / grad)
        mine = [p for p in run.parameters.values() if held.number in p.optimizers]
        known = (
            run.events(ModelLoadedEvent) or any(p.loaded or p.rewritten for p in mine) or not began_new(run.facts, mine)
        )
        fresh = not known and (held.loaded_state_steps or 0) > 1
        if ratios and (median(ratios) > 30 or median(ratios) < 1 / 30):
            return Claim(
                0.9,
                f"The moments loaded into {held.type} (from {held.loaded_state_steps or 0:.0f} steps) do not match the "
                f"gradients at step {when}: the root of the second moment is {median(ratios):.3g} times the gradient's "
                "entries.",
                step=when,
                where=(held.site,),
                evidence={"moment_to_gradient": median(ratios), "age": held.loaded_state_steps},
            )
        if fresh:
            return Claim(
                0.8,
                f"{held.type} was given an optimizer state of {held.loaded_state_steps:.0f} steps, but the model was "
                "never loaded: the moments belong to other weights.",
                step=when,
                where=(held.site,),
                evidence={"age": held.loaded_state_steps, "model_loaded": False},
            )
    return None


def _foreign_moments(preflight: PreflightFacts) -> Claim | None:
    """Of a state that came with the optimizer, without its history: only a gross misfit tells."""
    for held in preflight.moments:
        if held.shape != held.parameter_shape:
            shapes = tuple(held.shape), tuple(held.parameter_shape)
            return Claim(0.95, f"`{held.moment}` has shape {shapes[0]} and its parameter {shapes[1]}.", step=0)
    worst = max(present(held.gradient_ratio for held in preflight.moments), default=1.0)
    if worst <= 1e3:
        return None
    return Claim(
        0.7,
        f"A gradient is {worst:.3g} times the value that the second moment of its parameter implies.",
        step=0,
        evidence={"gradient_to_moment": worst},
        severity="warning",
    )


def _emptied_moments(run: RecordedRun) -> Claim | None:
    """The second moment fell faster than its decay allows, while its age continued: it was partly reset.

    No gradient lowers it below what its decay leaves of it; the rest is for moments in bfloat16. Of float16, whose
    small values are 0, nothing is concluded.
    """
    before: dict[int, tuple[float, float]] = {}
    fallen: dict[int, list[str]] = {}
    worst = 1.0
    for look in run.sampled.steps:
        for step in look.updates:
            held = next(o for o in run.facts.optimizers if o.number == step.optimizer)
            decays = [group.betas[1] for group in held.settings if group.betas]
            if not decays:
                continue  # RMSprop and Adadelta have their own decay settings
            beta = min(decays)
            for row in step.rows:
                second, age = row.second_moment, row.age
                if second is None or age is None or run.parameters[row.parameter].dtype == "float16":
                    continue  # the squares of small gradients are 0 in float16
                if row.parameter in before:
                    was, then = before[row.parameter]
                    least = was * beta ** ((age - then) / 2)
                    if age > then and least > 0 and second < 0.7 * least:
                        fallen.setdefault(look.step, []).append(run.label(row.parameter))
                        worst = min(worst, second / least)
                before[row.parameter] = (second, age)
    for at, names in fallen.items():
        if len(names) >= 2:
            return Claim(
                0.9,
                f"By step {at} the second moment of {len(names)} parameters is at {worst:.1e} of the smallest value "
                "that its decay allows, while its step count continued: the moments were cleared but the bias "
                "correction was not, so the updates after that were many times too large.",
                step=at,
                where=tuple(names[:4]),
                evidence={"parameters": names[:20], "share_of_least": worst},
                fixes=("Reset the step count with the moments, or create a new optimizer.",),
            )
    return None


def clip_saturated(run: RecordedRun) -> Claim | None:
    """Nearly every step is clipped strongly, and learning is slow.

    Only mentioned for an adaptive optimizer, whose steps do not depend on the size of the gradients (see `epsilon`).
    """
    untrained = run.facts.preflight is not None  # whether this does harm is not known yet
    does_well = run.blind or (run.curve.learned and run.curve.drop > 0.3)  # a policy may learn while its loss rises
    if not run.main or (does_well and not untrained and not _limits_steps(run, run.main)):
        return None
    if not untrained and median(run.sampled.update_ratios() or [0.0]) > _LARGE_STEP:
        return None  # the gradient is large because the weights are thrown about, and clipping does not hold them
    pairs = [
        (norm, limit)
        for norm, limit in zip(run.series.clip_norm, run.series.clip_limit, strict=False)
        if norm is not None and limit is not None and limit > 0 and math.isfinite(norm)
    ]
    if len(pairs) < 10:
        return None
    excess = [norm / limit for norm, limit in pairs]
    hard = sum(e > 5 for e in excess) / len(excess)
    if hard < 0.9 or median(excess) < 10:
        return None
    clips = run.facts.clippings
    site = clips[0].site if clips else ""
    return Claim(
        0.85,
        f"{hard:.0%} of the steps are clipped, to {1 / median(excess):.1e} of the gradient (norm "
        f"{median(n for n, _ in pairs):.3g}, limit {pairs[0][1]:g}): the loss moved from {run.curve.start:.4g} to "
        f"{run.curve.end:.4g}.",
        step=0,
        where=(site,),
        evidence={"clipped": hard, "norm_to_limit": median(excess), "limit": pairs[0][1]},
        severity="warning" if untrained or does_well else "info" if _is_adaptive(run.main) else "error",
        fixes=(f"Raise max_norm to about {median(n for n, _ in pairs):.2g}.",),
    )


def _limits_steps(run: RecordedRun, held: OptimizerFacts) -> bool:
    """Whether the steps are too small, and in proportion to the gradient."""
    return not _is_adaptive(held) and straight_path(run) is not None


def _is_adaptive(held: OptimizerFacts) -> bool:
    """Whether an optimizer divides gradients by their size."""
    return held.type.startswith(ADAPTIVE)


RULES: tuple[Rule, ...] = (
    Rule("optim.epsilon", "value", epsilon, explains=("lr.too-low", "lr.too-high", "data.class-collapse",
                                                         "loss.undefined-op")),
    Rule("optim.weight-decay", "value", weight_decay,
         explains=("lr.*", "model.dead-units", "data.labels-uninformative", "model.vanishing-gradient",
                   "init.too-small", "data.class-collapse")),
    Rule("optim.stale-state", "value", stale_state, explains=("lr.*", "optim.epsilon")),
    Rule("clip.saturated", "value", clip_saturated, explains=("lr.too-low", "data.class-collapse")),
)  # fmt: skip
