"""The wiring of parameters, optimizers and gradients."""

from __future__ import annotations

from itertools import takewhile
from math import prod
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place, count_of
from surefoot.diagnose.curves import present
from surefoot.diagnose.data_summary import main_line
from surefoot.diagnose.initial_weights import began_new, look_trained, size_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.watch.operation_names import DECISIONS, STEP_FUNCTIONS

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import GraphBreak, LayerCall, OptimizerFacts, ParameterFacts, RiskyCall


def missing_zero_grad(run: RecordedRun) -> Claim | None:
    """Each backward starts with the gradient that the last step already used."""
    everyone: list[OptimizerFacts | None] = [*run.optimizers] or [None]
    for held in everyone:
        left = present((held.series if held is not None else run.facts.backward_series).leftover[1:])
        mostly = sum(v > 0.5 for v in left)
        if held is not None and _read_at_others(run, held):
            continue
        if len(left) >= 2 and (mostly >= 0.8 * len(left) or _never_fall(left) or _kept_at_first(left)):
            norms = run.grad_norms
            site = next((root.site for root in run.sampled.backward_calls), "")
            name = held.type if held else "the loop"
            return Claim(
                0.97,
                f"When backward ran{at_place(site)}, {median(left):.0%} of the parameters of {name} still had the "
                f"gradient of the previous step (median of {len(left)} sampled steps): gradients accumulate (norm "
                f"{norms[0]:.3g} at first, {max(norms):.3g} at most)."
                if norms
                else f"Gradients were never cleared between steps ({name}).",
                step=1,
                where=(site, held.site if held else ""),
                evidence={"share_left": median(left), "steps_looked_at": len(left), "norms": norms[:8]},
                fixes=() if held else ("Clear each gradient after it was used: `p.grad.zero_()` or `p.grad = None`.",),
            )
    return None


def _read_at_others(run: RecordedRun, held: OptimizerFacts) -> bool:
    """Whether most sampled backward calls that reach the parameters of an optimizer belong to another one's step.

    A generator's backward goes through the discriminator, whose gradients are cleared only before its own.
    """
    mine = {p.id for p in run.parameters.values() if held.number in p.optimizers}
    reaching = [root for root in run.sampled.backward_calls if root.optimizers and mine & set(root.parameters)]
    others = [root for root in reaching if held.number not in root.optimizers]
    return len(others) > 0.6 * len(reaching)


def _never_fall(left: list[float]) -> bool:
    """Whether the share of parameters with an old gradient only grows, and is never 0.

    If layers begin at 0, most gradients are 0 in the first steps, and an old gradient is not visible. A gradient that
    is never cleared does not become 0 again.
    """
    return left[0] > 0 and left[-1] > 0.5 and left == sorted(left)


_ROW = 8
"""Sampled steps in a row, from the first on, in which a gradient that is cleared rarely is seen."""


def _kept_at_first(left: list[float]) -> bool:
    """Whether the first sampled steps, and most of all, begin with an old gradient: it is cleared once per epoch, say.

    Later ones may not show it: units that died of it have a gradient of 0.
    """
    return len(list(takewhile(lambda share: share > 0.5, left))) >= max(_ROW, 0.5 * len(left))


def no_update(run: RecordedRun) -> Claim | None:
    """Gradients exist, but the parameters do not change."""
    if run.facts.loss_scaler.skips:
        return None
    made = run.facts.optimizers
    compiled = run.facts.compiled  # a compiled `step` is not observed
    if made and not run.optimizers and not compiled and run.facts.backwards >= 5:
        if (run.curve.learned and not run.blind) or any(p.moved_alone for p in run.parameters.values()):
            return None  # something else changes them
        return Claim(
            0.95,
            f"backward ran {run.facts.backwards} times, but `step` of the {_named(made[0])} was never called: the loss "
            f"stays at {run.curve.end:.3g}.",
            step=0,
            where=(made[0].site,),
            evidence={"backwards": run.facts.backwards, "steps": 0},
            fixes=("Call `optimizer.step()` after backward.",),
        )
    for held in run.optimizers:
        if held.zeroed_before_step >= max(2, 0.5 * held.steps):
            return Claim(
                0.97,
                f"zero_grad ran between backward and step at {held.zeroed_before_step} of {held.steps} steps of "
                f"{held.type}: the step has no gradients.",
                step=0,
                where=(held.zero_site, held.site),
                evidence={"zeroed_before_step": held.zeroed_before_step, "steps": held.steps},
                fixes=("Order them: zero_grad, backward, step.",),
            )
        mine = [p for p in run.parameters.values() if held.number in p.optimizers and p.sampled]
        trainable = [p for p in mine if p.requires_grad]
        if not trainable or any(p.changed for p in trainable) or held.steps < 3:
            continue
        if run.facts.guard is not None and run.facts.guard.skipped and not any(p.unchanged for p in trainable):
            continue  # every sampled step was skipped
        if is_far_too_low(held) and run.facts.preflight is None:
            continue  # `lr.too-low` names it
        if is_far_too_low(held):
            return _silent(held, trainable, f"its learning rate is {max(present(held.series.lr)):g} throughout", 0.9)
        if any(p.in_graph for p in trainable) and not any(p.with_grad for p in trainable):
            return _silent(held, trainable, "they had no gradient left when the step ran", 0.9)
        if not any(p.in_graph or p.with_grad for p in trainable):
            never = _never_differentiated(run)
            if never and not any(p.used for p in run.parameters.values()):
                continue  # nothing was computed: the script plots a schedule, say
            why = "no `backward` was called" if never else "the loss does not depend on any of them"
            return _silent(held, trainable, why, 0.9)
        if all(p.zero_grad < p.with_grad for p in trainable):
            return _silent(held, trainable, "although they have gradients", 0.8)
    return None


_SAME_DIRECTION = 0.9
"""The smallest cosine between a gradient and the one that clipping leaves of it."""


def lost_microbatch(run: RecordedRun) -> Claim | None:
    """Gradients are zeroed between the backward calls of one step, all made by one line: only the last one counts.

    An attack or a perturbation (FGSM, SAM) zeroes them, too, but calls backward in a line of its own, or for the same
    batch again, as a projection of the gradients of several losses does. A loop that adds the gradients up itself, as
    one that clips them row by row, puts another gradient there than the last one.
    """
    if len(run.optimizers) != 1 or run.facts.preflight is not None:
        return None
    held = run.optimizers[0]
    looks = [look.backward_calls for look in run.sampled.steps if look.backward_calls]
    sites = {root.site for roots in looks for root in roots}
    count = median(len(roots) for roots in looks) if looks else 0
    zeroed = held.zeroed_between or 0
    if zeroed < max(3, 0.8 * held.steps) or len(sites) != 1 or count < 2 or _repeats_batch(run):
        return None
    as_left = [update.as_left for look in run.sampled.steps for update in look.updates if update.as_left is not None]
    if not as_left or median(as_left) < _SAME_DIRECTION:
        return None
    return Claim(
        0.93,
        f"backward runs {count:.0f} times for each step of {held.type}, and zero_grad runs between them at "
        f"{zeroed} of {held.steps} steps: only the gradient of the last microbatch reaches the weights, "
        "and the work for the rest is lost.",
        step=0,
        where=(held.zero_site, *sites),
        evidence={"zeroed_between": zeroed, "steps": held.steps, "backwards": count},
        fixes=("Call zero_grad once before the loop over the microbatches, not inside it.",),
    )


def _repeats_batch(run: RecordedRun) -> bool:
    """Whether all backward calls of some step had the same data."""
    prints: dict[int, list[int]] = {}
    for note in main_line(run):
        if note.input_print is not None:
            prints.setdefault(note.step, []).append(note.input_print)
    return any(len(each) > 1 and len(set(each)) == 1 for each in prints.values())


def _never_differentiated(run: RecordedRun) -> bool:
    """Whether there was no `backward`, and no gradient from elsewhere (`torch.autograd.grad`)."""
    facts = run.facts
    return not facts.backwards and facts.preflight is None and not any(p.with_grad for p in run.parameters.values())


def is_far_too_low(held: OptimizerFacts) -> bool:
    """Whether the learning rate is 0, or so low that no weight of ordinary size would change by a bit."""
    rates = present(held.series.lr)
    return bool(rates) and 0 <= max(rates) < 1e-9


def _silent(held: OptimizerFacts, mine: list[ParameterFacts], why: str, confidence: float) -> Claim:
    return Claim(
        confidence,
        f"{_named(held)} stepped {held.steps} times and none of its {len(mine)} parameters changed: {why}.",
        step=0,
        where=(held.site, *[p.label for p in mine[:3]]),
        evidence={"steps": held.steps, "parameters": len(mine), "changed": 0},
    )


def _named(held: OptimizerFacts) -> str:
    return f"{held.type} made{at_place(held.site)}" if held.site else held.type


def parameters_missing(run: RecordedRun) -> Claim | None:
    """A parameter that the loss depends on, but that is in no optimizer."""
    if not run.optimizers:
        return None
    given = [p for p in run.parameters.values() if p.optimizers]
    mine = any(p.model and p.in_graph for p in given)
    bare = not any(p.model for p in run.parameters.values())  # no modules: functions of tensors
    if not mine and not bare and any(p.in_graph or p.with_grad for p in given):
        return None  # inputs are being optimised, or copies of the weights
    lost = [
        p
        for p in run.parameters.values()
        if p.in_graph
        and p.registered
        and (p.model or (bare and _is_left_out(run, p)))
        and not p.optimizers
        and p.requires_grad
        and not p.loaded
        and not p.moved_alone
    ]
    if not lost or not began_new(run.facts, lost):
        return None
    all_of = [p for p in run.parameters.values() if p.requires_grad and p.registered and (p.model or bare)]
    share = size_of(lost) / max(1, size_of(all_of))
    site = run.optimizers[-1].site
    names = [p.label for p in lost]
    return Claim(
        0.95,
        f"{count_of(len(lost), 'parameter')} ({share:.0%} of the trainable weights) "
        f"{'get' if len(lost) > 1 else 'gets'} a gradient but {'are' if len(lost) > 1 else 'is'} in no optimizer, and "
        f"will never change: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}.",
        step=0,
        where=(site, *names[:6]),
        evidence={"parameters": names[:50], "share": share, "optimizer": run.optimizers[-1].type},
        fixes=(f"Pass them to the optimizer made{at_place(site)}.",) if site else (),
    )


def _is_left_out(run: RecordedRun, parameter: ParameterFacts) -> bool:
    """Whether a tensor that no module holds is in the graph of every sampled step and never changes."""
    return parameter.in_graph >= max(3, len(run.sampled.steps)) and not any(parameter.moves)


def frozen_parameters(run: RecordedRun) -> Claim | None:
    """Most parameters of the optimizer cannot change."""
    left_out = _left_out_by_trainer(run)
    mine = [*[p for p in run.parameters.values() if p.optimizers and p.model], *left_out]
    frozen = [p for p in mine if not p.requires_grad and not p.trained_by and not p.loaded]
    share = size_of(frozen) / max(1, size_of(mine))
    if share < 0.5 or not run.optimizers or look_trained(frozen) or not began_new(run.facts, frozen):
        return _frozen_and_left_out(run)
    weak = not run.curve.learned or run.curve.drop < 0.5
    if run.facts.preflight is not None:  # too few steps to tell; a few rows were tried
        weak = (run.facts.preflight.tiny_batch_left or 0.0) > 0.5
    whose = f"of `{mine[0].model}`" if left_out else f"given to {run.optimizers[-1].type}"
    otherwise = (
        "load the weights that were meant to be frozen"
        if left_out
        else "leave them out of the optimizer if they are frozen on purpose"
    )
    return Claim(
        0.9 if weak else 0.5,
        f"{share:.0%} of the weights {whose} have requires_grad=False and were neither "
        f"loaded nor trained before: {', '.join(p.label for p in frozen[:4])}. The loss went from "
        f"{run.curve.start:.3g} to {run.curve.end:.3g}.",
        step=0,
        where=(run.optimizers[-1].site, *[p.label for p in frozen[:6]]),
        evidence={"share": share, "frozen": [p.label for p in frozen[:50]], "drop": run.curve.drop},
        severity="error" if weak else "info",
        fixes=(f"Set requires_grad=True on them, or {otherwise}.",),
    )


def _left_out_by_trainer(run: RecordedRun) -> list[ParameterFacts]:
    """The frozen part of a model, if a trainer passes only parameters that require gradients to the optimizer.

    Then nobody has left them out on purpose. Empty if trained parameters are among the frozen ones, as adapters are.
    """
    if run.facts.trainer != "transformers":
        return []
    given = [p for p in run.parameters.values() if p.optimizers and p.model]
    models = {p.model for p in given}
    frozen = [p for p in run.parameters.values() if p.model in models and p.registered and not p.requires_grad]
    frozen = [p for p in frozen if not p.optimizers]
    modules = [p.name.split(".")[:-1] for p in frozen]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    body = [parts[0] for parts in shared]
    are_among = any(p.name.split(".")[: len(body)] == body for p in given)
    return [] if are_among else frozen


def _frozen_and_left_out(run: RecordedRun) -> Claim | None:
    """Most of a model is frozen at random values and in no optimizer, and the rest does not learn."""
    trained = {p.model for p in run.parameters.values() if p.optimizers and p.model and p.changed}
    mine = [p for p in run.parameters.values() if p.model in trained and p.registered]
    frozen = [
        p for p in mine
        if not p.requires_grad and not p.optimizers and not p.loaded and not p.rewritten and not p.moved_alone
    ]  # fmt: skip
    frozen = [p for p in frozen if not p.trained_by and len(p.shape) > 1]
    curve = run.curve
    share = size_of(frozen) / max(1, size_of(mine))
    if run.facts.preflight is not None:
        return None
    if share < 0.3 or curve.learned or curve.blind or curve.count < 20:
        return None
    if look_trained(frozen) or not began_new(run.facts, frozen):
        return None
    return Claim(
        0.8,
        f"{share:.0%} of the weights of `{frozen[0].model}` have requires_grad=False, are in no optimizer and were "
        f"neither loaded nor trained before: {', '.join(p.label for p in frozen[:4])} stay at random values. The loss "
        f"went from {curve.start:.3g} to {curve.end:.3g}.",
        step=0,
        where=(run.optimizers[-1].site, *[p.label for p in frozen[:6]]),
        evidence={"share": share, "frozen": [p.label for p in frozen[:50]], "drop": curve.drop},
        fixes=("Load the weights that were meant to be frozen, or set requires_grad=True and pass them too.",),
    )


def detached_graph(run: RecordedRun) -> Claim | None:
    """Parameters take part in the forward, but get no gradient."""
    crash = run.facts.crash
    if crash is not None and "does not require grad and does not have a grad_fn" in crash.message:
        cuts = _cuts_of_last_root(run)
        at = cuts[-1].site if cuts else crash.site
        return Claim(
            0.95,
            f"backward{at_place(crash.site)} was called on a tensor without a graph"
            + (f"; it was detached by {cuts[-1].op}{at_place(at)}." if cuts else "."),
            step=run.steps,
            where=(str(crash.site), str(at)),
            evidence={"message": crash.message, "cuts": [cut.to_json() for cut in cuts[-3:]]},
        )
    if _never_differentiated(run):
        return None  # no graph was ever followed: `optim.no-update` reports it
    dead = [
        p
        for p in run.parameters.values()
        if p.optimizers and p.requires_grad and p.sampled >= 2 and p.used and not p.in_graph
        and not p.with_grad and not p.moved_alone
    ]  # fmt: skip
    if not dead:
        return _cut_inside_compiled(run) or _loss_without_graph(run) or _flattened(run)
    if _are_copies(run, dead):
        return None  # `optim.parameters-missing` reports the trained ones
    cut = _cut_behind(run, dead)
    names = [p.label for p in dead]
    share = size_of(dead) / max(1, size_of([p for p in run.parameters.values() if p.optimizers]))
    if cut is None:
        if share < 0.05:
            return None
        return Claim(
            0.5,
            f"The forward pass uses {count_of(len(dead), 'parameter')} that the loss does not depend on "
            f"({', '.join(names[:4])}).",
            step=0,
            where=tuple(names[:6]),
            evidence={"parameters": names[:50], "share": share},
            severity="info",
        )
    return Claim(
        0.95 if cut.reaches_loss else 0.85,
        f"The forward pass uses {count_of(len(dead), 'parameter')} without a gradient "
        f"({', '.join(names[:4])}{' …' if len(names) > 4 else ''}): {words_of_cut(cut)} cuts the graph.",
        step=0,
        where=(cut.site, *names[:6]),
        evidence={"parameters": names[:50], "cut": cut.to_json(), "share": share},
        fixes=(fix_of_cut(cut),),
    )


def _are_copies(run: RecordedRun, held: list[ParameterFacts]) -> bool:
    """Whether an optimizer was given a copy that needs no gradient, as a target network, instead of what is trained."""
    trained = [p for p in run.parameters.values() if p.in_graph and p.requires_grad and not p.optimizers]
    return sorted(p.shape for p in held) == sorted(p.shape for p in trained)


def _flattened(run: RecordedRun) -> Claim | None:
    """Parameters whose gradient is always 0, because a piecewise constant function comes after them.

    A straight-through estimator rounds as well, and its parameters have a gradient.
    """
    mine = [p for p in run.parameters.values() if p.optimizers and p.sampled >= 2]
    dead = [p for p in mine if p.with_grad and p.zero_grad >= p.with_grad]
    cut = _cut_behind(run, dead, flat=True)
    if cut is None or any(p.id in cut.parameters and p not in dead for p in mine):
        return None  # others before it have a gradient, so it is 0 for another reason
    dead = [p for p in dead if p.id in cut.parameters]
    names, share = [p.label for p in dead], size_of(dead) / max(1, size_of(mine))
    return Claim(
        0.95,
        f"The gradient of {count_of(len(dead), 'parameter')} ({share:.0%} of the weights of the optimizer) is exactly "
        f"0 in each of {dead[0].with_grad} sampled steps ({', '.join(names[:4])}{' …' if len(names) > 4 else ''}): the "
        f"slope of {words_of_cut(cut)}, which comes after them, is 0 everywhere.",
        step=0,
        where=(cut.site, *names[:6]),
        evidence={"parameters": names[:50], "cut": cut.to_json(), "share": share, "sampled_steps": dead[0].with_grad},
        fixes=(fix_of_cut(cut),),
    )


_ONLY_SCALED = {"Neg", "Mean", "Sum", "Div", "View", "Reshape", "Squeeze", "Unsqueeze"}
"""What may come between the logarithms and the loss: then every one of them counts."""


def held_at_floor(run: RecordedRun) -> Claim | None:
    """Probabilities that a `clamp` holds at its lower bound before their logarithm is the loss: no gradient passes it.

    A bound far below 1 only keeps the logarithm finite, and holds few rows. Rows at an upper bound, and those at the
    lower one of a logarithm that is minimised itself, are the best ones.
    """
    found: list[RiskyCall] = []
    for look in run.sampled.steps:
        for root in look.backward_calls:
            at = root.operations.index("Log") if "Log" in root.operations else -1
            clamps = root.operations[at + 1 : at + 2] in (["Clamp"], ["ClampMin"])
            is_turned = root.operations[:at].count("Neg") % 2 == 1
            if at >= 0 and clamps and is_turned and _ONLY_SCALED.issuperset(root.operations[:at]):
                found += [c for c in look.calls.risky if c.at_floor is not None and (c.nearest_zero or 1.0) <= _FLOOR]
    late = [call for call in found if call.step >= 0.3 * run.steps]
    share = median(call.at_floor or 0.0 for call in late) if len(late) >= _FEWEST_CLAMPED else 0.0
    if share < _MANY_ROWS or len({call.site for call in found}) != 1:
        return None
    call = late[-1]
    return Claim(
        0.9,
        f"`log`{at_place(call.site)} gets {share:.0%} of its values from the lower bound of a `clamp` "
        f"({call.nearest_zero:.3g} at step {call.step}), in {len(late)} sampled steps: these rows, which the loss "
        f"judges worst, have a gradient of 0. The loss is at {run.curve.end:.3g}.",
        step=found[0].step,
        where=(call.site,),
        evidence={"share": share, "bound": call.nearest_zero, "sampled_steps": len(late)},
        fixes=("Use `F.cross_entropy` of the logits, or `F.log_softmax`, without a clamp; or a bound such as 1e-12.",),
    )


_FEWEST_CLAMPED = 4
_FLOOR = 0.5
"""The largest lower bound of probabilities; a larger value is an upper one."""
_MANY_ROWS = 0.4
"""The share of the rows without a gradient from which on they are missed."""


def _cut_inside_compiled(run: RecordedRun) -> Claim | None:
    """A compiled model takes weights into its graph and never gives them a gradient."""
    mine = [p for p in run.parameters.values() if p.optimizers and p.requires_grad and p.sampled >= 3]
    dead = [p for p in mine if p.in_graph >= p.sampled and not p.with_grad and not p.changed and not p.moved_alone]
    if not run.facts.compiled or not dead or not any(p.with_grad for p in mine):
        return None
    names, share = [p.label for p in dead], size_of(dead) / max(1, size_of(mine))
    return Claim(
        0.85,
        f"The compiled model uses {count_of(len(dead), 'parameter')} ({share:.0%} of the weights of the optimizer) "
        f"without a gradient at any of {dead[0].sampled} sampled steps: {', '.join(names[:4])}. A `detach` or "
        "`no_grad` inside it cuts the graph.",
        step=0,
        where=tuple(names[:6]),
        evidence={"parameters": names[:50], "share": share, "sampled_steps": dead[0].sampled},
        fixes=("Look for `detach()`, `.data` or `no_grad` behind these layers in `forward`, and remove it.",),
    )


def _loss_without_graph(run: RecordedRun) -> Claim | None:
    """A loss function is part of what `backward` is called on, but its predictions were cut off from the model."""
    found = []
    for look in run.sampled.steps:
        cuts = {
            cut.site: cut
            for cut in look.breaks
            if cut.backward_calls and cut.parameters and cut.op not in STEP_FUNCTIONS
        }
        kept = {entry.site for root in look.backward_calls for entry in root.made_from or [] if entry.shape == []}
        trained = {loss.site for loss in look.calls.losses if loss.trained_on}
        for loss in look.calls.losses:
            if loss.site in trained:
                continue  # the model computes it in its forward pass, and was evaluated in the same step
            cut = cuts.get(loss.producer.site if loss.producer is not None else "") or cuts.get(loss.site)
            if cut is not None and not loss.trained_on and loss.reduction != "none" and loss.site in kept:
                found.append((loss, cut))
    if len({loss.step for loss, _ in found}) < min(3, max(1, run.steps)):
        return None
    loss, cut = found[0]
    names = [run.label(number) for number in cut.parameters]
    return Claim(
        0.9,
        f"`{loss.op}`{at_place(loss.site)} is part of the loss that backward runs on, and no gradient goes through it: "
        f"{words_of_cut(cut)} cuts its predictions off from {count_of(len(names), 'parameter')} "
        f"({', '.join(names[:4])}). Its value is {found[-1][0].value or 0.0:.3g} at step {found[-1][0].step}.",
        step=loss.step,
        where=(cut.site, loss.site),
        evidence={"cut": cut.to_json(), "loss": loss.op, "first": loss.value, "last": found[-1][0].value},
        fixes=(fix_of_cut(cut),),
    )


def _cut_behind(run: RecordedRun, dead: list[ParameterFacts], flat: bool = False) -> GraphBreak | None:
    """The cut between parameters and the loss they are trained for; other losses may be cut off from them on purpose.

    With `flat`, a function whose gradient is 0 everywhere.

    A discriminator's loss leaves the generator alone: it is not the one that the generator's optimizer steps for.
    """
    lost = {p.id for p in dead}
    owners = {number for p in dead for number in p.optimizers}
    best, found = (False, False, 0, 0), None
    for look in run.sampled.steps:
        own = {number for number, root in enumerate(look.backward_calls) if owners & set(root.optimizers)}
        for b in look.breaks:
            hit = len(lost & set(b.parameters)) if (b.op in STEP_FUNCTIONS) == flat else 0
            under = own & set(b.backward_calls)
            rank = (bool(under), b.reaches_loss, hit, max(under, default=0))
            if hit and rank > best:
                best, found = rank, b
    return found


def _cuts_of_last_root(run: RecordedRun) -> list[GraphBreak]:
    """Where the last root of a backward was detached; all detached places of the run if that is not known."""
    looks = [look for look in run.sampled.steps if look.backward_calls]
    last = len(looks[-1].backward_calls) - 1 if looks else 0
    cuts = [b for b in looks[-1].breaks if last in b.backward_calls] if looks else []
    cuts = cuts or [b for look in run.sampled.steps for b in look.breaks]
    return [b for b in cuts if b.op not in STEP_FUNCTIONS]


def words_of_cut(cut: GraphBreak) -> str:
    """What cut a graph, and where."""
    what = "running without gradients (no_grad)" if cut.op == "no_grad" else f"`{cut.op}`"
    return f"{what}{at_place(cut.site)}"


def fix_of_cut(cut: GraphBreak) -> str:
    """The fix for a cut."""
    if cut.op in DECISIONS | STEP_FUNCTIONS:
        return (
            f"Pass the values that `{cut.op}` gets{at_place(cut.site)} to the loss instead of its result, which has no "
            "gradient: probabilities or logits, not decisions."
        )
    return f"Remove the cut{at_place(cut.site)}, so that gradients pass through it."


def unregistered_parameters(run: RecordedRun) -> Claim | None:
    """Weights in a plain list or attribute, which `parameters()` does not return."""
    lost = [p for p in run.parameters.values() if not p.registered and p.in_graph and not p.optimizers]
    lost = [p for p in lost if not p.moved_alone]
    if not lost or not run.optimizers:
        return None
    names = [p.label for p in lost]
    return Claim(
        0.96,
        f"Plain attributes of `{lost[0].model}` hold {count_of(len(lost), 'tensor')} with a gradient that parameters() "
        f"does not return: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}. No optimizer updates them.",
        step=0,
        where=(*names[:6], run.optimizers[-1].site),
        evidence={"tensors": names[:50], "weights": size_of(lost)},
    )


def made_in_forward(run: RecordedRun) -> Claim | None:
    """A layer that the forward pass creates: it has new random weights in every step, and no optimizer holds them.

    Its weights are leaves of the graph of a single step. Those of a layer that a script creates once are in all of
    them, and weights that are computed, as by a hypernetwork, are no leaves.
    """
    lost = [p for p in run.parameters.values() if p.in_graph == 1 and not (p.optimizers or p.name or p.model)]
    widths = {prod(p.shape[1:]) for p in lost if len(p.shape) > 1 and p.requires_grad}
    for site, calls in _nameless_layers(run).items():
        steps = {call.step for call in calls}
        if len(steps) < 3 or len(lost) < len(steps) or any(call.fan_in not in widths for call in calls):
            continue
        kind = calls[0].module
        return Claim(
            0.93,
            f"The `{kind}` that runs{at_place(site)} is created anew in every step: in each of {len(steps)} sampled "
            f"steps it has other weights, which depend on nothing that was learned, and no optimizer holds them.",
            step=calls[0].step,
            where=(site,),
            evidence={"layer": kind, "sampled_steps": len(steps), "tensors": len(lost)},
            fixes=(f"Create this `{kind}` in `__init__`, as an attribute of the module, and call it{at_place(site)}.",),
        )
    return None


def _nameless_layers(run: RecordedRun) -> dict[str, list[LayerCall]]:
    """Trained layers that belong to no model, though a model was called in the same step, by line."""
    found: dict[str, list[LayerCall]] = {}
    for look in run.sampled.steps:
        if any(call.trained_on for call in look.model_calls):
            for call in look.calls.layers:
                if call.parameter is None and call.trained_on and call.fan_in and call.module.isidentifier():
                    found.setdefault(call.site, []).append(call)
    return found


RULES = (
    Rule("optim.lost-microbatch", "wiring", lost_microbatch, explains=("accum.*", "lr.too-low")),
    Rule("optim.missing-zero-grad", "wiring", missing_zero_grad,
         explains=("lr.*", "model.*", "clip.saturated", "accum.not-divided", "loss.sum-reduction", "data.bad-batch",
                   "precision.fp16-overflow")),
    Rule("optim.no-update", "wiring", no_update,
         explains=("lr.*", "model.*", "data.labels-uninformative", "data.class-collapse", "init.*", "optim.epsilon")),
    Rule("optim.parameters-missing", "wiring", parameters_missing,
         explains=("lr.too-low", "optim.no-update", "model.dead-units")),
    Rule("optim.frozen-parameters", "wiring", frozen_parameters,
         explains=("lr.*", "data.labels-uninformative", "model.vanishing-gradient", "data.class-collapse", "init.*")),
    Rule("optim.detached-graph", "wiring", detached_graph,
         explains=("lr.*", "optim.no-update", "data.labels-uninformative", "init.symmetric", "data.class-collapse",
                   "model.*")),
    Rule("optim.detached-graph", "wiring", held_at_floor,
         explains=("lr.*", "init.*", "data.labels-uninformative", "data.class-collapse", "model.*")),
    Rule("model.unregistered-parameters", "wiring", unregistered_parameters,
         explains=("optim.parameters-missing", "lr.too-low", "optim.no-update")),
    Rule("model.unregistered-parameters", "wiring", made_in_forward,
         explains=("optim.parameters-missing", "lr.*", "loss.term-dominates", "data.labels-uninformative",
                   "optim.not-learning")),
)  # fmt: skip
