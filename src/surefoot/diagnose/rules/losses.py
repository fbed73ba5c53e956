"""Losses with wrong inputs, wrong signs, wrong bounds or wrong sums."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Protocol, TypeVar

from surefoot.core.wording import at_place
from surefoot.diagnose.curves import present, present_finite
from surefoot.diagnose.data_summary import weights_moved
from surefoot.diagnose.nonfinite import details
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.pace import fails_at_its_rate
from surefoot.diagnose.rules.row_mixing import has_softmax_over_rows
from surefoot.diagnose.run import weighs_by_reward

if TYPE_CHECKING:
    from collections.abc import Iterable

    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import (
        BackwardCall,
        CallSite,
        LossCall,
        OverlapCall,
        RowDistribution,
        SampledCall,
    )

_Call = TypeVar("_Call", bound="SampledCall")
_MOVED = 0.2
"""The distance, relative to their size, from which on weights have moved."""


class HasProducer(Protocol):
    """A call whose first operand was made by another call."""

    @property
    def site(self) -> str:
        """The line of the script."""

    @property
    def producer(self) -> CallSite | None:
        """That other call, if it was recorded."""


def source_of(call: HasProducer) -> str:
    """The call that made the values, if it was recorded."""
    return call.producer.site if call.producer is not None else ""


def _maker(call: HasProducer) -> str:
    return (call.producer.module or call.producer.op) if call.producer is not None else "the model"


def softmax_before_cross_entropy(run: RecordedRun) -> Claim | None:
    """Every row that reaches cross-entropy is non-negative and sums to one."""
    for site, found in by_site(run.sampled.training_losses("cross_entropy")).items():
        notes = [n for n in found if _has_probabilities(n)]
        seen = [n.distribution for n in notes if n.distribution]
        if len(seen) < min(2, max(1, run.steps)) or not seen:
            continue
        if not {n.producer for n in found if n not in notes} <= {n.producer for n in notes} - {None}:
            continue  # a loss over the columns of a matrix, whose rows are probabilities, is given them as well
        rows, classes = sum(d.rows for d in seen), seen[0].classes
        floor = math.log(math.e + classes - 1) - 1
        fix = _drop("softmax", notes[0])
        return Claim(
            0.97,
            f"`{_maker(notes[0])}` returns probabilities (every row sums to 1 ± "
            f"{max(d.sum_error for d in seen):.0e}, all ≥ 0) and they go into cross_entropy, which applies "
            f"log-softmax itself: the loss cannot fall below {floor:.3f} = ln(e+{classes - 1})-1 with {classes} "
            f"classes; it is at {run.curve.end:.3f}.",
            step=notes[0].step,
            where=(site, source_of(notes[0])),
            evidence={
                "rows": rows,
                "classes": classes,
                "lowest": min(d.min for d in seen),
                "largest_sum_error": max(d.sum_error for d in seen),
                "floor": floor,
                "loss": run.curve.end,
                "steps": [n.step for n in notes],
            },
            fixes=fix,
        )
    return _softmax_twice(run) or _softmax_over_rows(run)


def _has_probabilities(loss: LossCall) -> bool:
    """Whether each row that a loss is given has non-negative values that sum to one."""
    held = loss.distribution
    slack = 2e-2 if loss.input.dtype in ("float16", "bfloat16") else 1e-4
    return held is not None and held.classes > 1 and held.min >= 0 and max(held.max - 1, held.sum_error) <= slack


def _softmax_twice(run: RecordedRun) -> Claim | None:
    """The same by hand: log-softmax of something that already is a distribution."""
    for site, notes in by_site(
        [n for n in run.sampled.calls.softmaxes if n.op == "log_softmax" and n.trained_on]
    ).items():
        if len(notes) >= 2 and all(n.is_distribution for n in notes):
            return Claim(
                0.9,
                f"log_softmax{at_place(site)} gets rows that are already probabilities (all ≥ 0, sums of 1): "
                "the softmax is applied twice.",
                step=notes[0].step,
                where=(site, source_of(notes[0])),
                evidence={"calls": len(notes), "shape": notes[0].shape},
                fixes=_drop("softmax", notes[0]),
            )
    return None


def _softmax_over_rows(run: RecordedRun) -> Claim | None:
    """Cross-entropy is given a softmax over another dimension than the classes: rows depend on one another."""
    for site, notes in by_site(run.sampled.training_losses("cross_entropy")).items():
        op = notes[0].producer.op if notes[0].producer is not None else ""
        seen = [n.distribution for n in notes if n.distribution is not None and n.distribution.classes > 1]
        if op not in ("softmax", "log_softmax") or len(seen) < 3:
            continue
        error = min(d.sum_error if op == "softmax" else d.log_sum_error for d in seen)
        inside = all(d.min >= 0 and d.max <= 1 if op == "softmax" else d.max <= 0 for d in seen)
        if not inside or error < 0.05:
            continue
        return Claim(
            0.9,
            f"cross_entropy{at_place(site)} is given the result of {op}{at_place(source_of(notes[0]))}, but its rows "
            f"are no distributions over the {seen[0].classes} classes (the sums differ from 1 by {error:.2g} or more): "
            f"the {op} runs over another dimension, so that the scores of a row depend on the other rows. The loss is "
            f"at {run.curve.end:.3g}.",
            step=notes[0].step,
            where=(site, source_of(notes[0])),
            evidence={"operation": op, "smallest_sum_error": error, "classes": seen[0].classes, "calls": len(seen)},
            fixes=_drop(op, notes[0]),
        )
    return None


def sigmoid_before_bce_logits(run: RecordedRun) -> Claim | None:
    """Everything that reaches BCE-with-logits lies between 0 and 1."""
    for site, notes in by_site(run.sampled.training_losses("binary_cross_entropy_with_logits")).items():
        spread = [n for n in notes if (n.input.std or 0) > 0]
        if not spread or any((n.inside_unit or 0) < 1 for n in notes):
            continue
        made = notes[0].producer.op if notes[0].producer is not None else None
        sure = made in ("sigmoid", "sigmoid_", "softmax", "hardsigmoid")
        if not sure and (len(spread) < 5 or made in ("relu", "relu_", "clamp")):
            continue
        low, high = min(present(n.input.min for n in notes)), max(present(n.input.max for n in notes))
        if not sure and (high - low < 0.5 or (run.update_ratios() and weights_moved(run) < _MOVED)):
            continue  # logits close to one another, or those of weights that hardly move, may lie anywhere
        return Claim(
            0.97 if sure else 0.8,
            f"`{_maker(notes[0])}` returns values between {low:.3g} and {high:.3g}, never outside (0, 1), and they go "
            f"into binary_cross_entropy_with_logits, which applies the sigmoid itself; the loss is at "
            f"{run.curve.end:.3f}.",
            step=notes[0].step,
            where=(site, source_of(notes[0])),
            evidence={"lowest": low, "highest": high, "calls": len(notes), "made_by": made, "loss": run.curve.end},
            fixes=_drop("sigmoid", notes[0]),
        )
    return None


def sigmoid_twice(run: RecordedRun) -> Claim | None:
    """Everything that reaches BCE lies between sigmoid(0) and sigmoid(1), where a sigmoid of a sigmoid ends."""
    for site, notes in by_site(run.sampled.training_losses("binary_cross_entropy")).items():
        low = min(present(n.input.min for n in notes), default=0.0)
        high = max(present(n.input.max for n in notes), default=1.0)
        both = [n for n in notes if len(n.labels or {}) == 2]
        made = notes[0].producer.op if notes[0].producer is not None else None
        if len(both) < 5 or made not in ("sigmoid", "sigmoid_") or low < 0.4999 or high > 0.7312:
            continue
        return Claim(
            0.93,
            f"All probabilities that binary_cross_entropy gets{at_place(site)} lie between {low:.3g} and {high:.3g}, "
            f"never below 0.5 nor above 0.731: the sigmoid{at_place(source_of(notes[0]))} is given values between 0 "
            f"and 1, as after another sigmoid.",
            step=notes[0].step,
            where=(site, source_of(notes[0])),
            evidence={"lowest": low, "highest": high, "calls": len(notes), "loss": run.curve.end},
            fixes=(f"Remove one of the two: the sigmoid{at_place(source_of(notes[0]))}, or the one in the model.",),
        )
    return None


def scores_crash(run: RecordedRun) -> Claim | None:
    """`binary_cross_entropy` raised, or failed on a device, because its input was not probabilities."""
    crash = run.facts.crash
    if crash is None or crash.call != "binary_cross_entropy" or crash.arguments is None:
        return None
    given = crash.arguments.input
    failed_later = crash.step is not None  # on a device, whose message contains no reason
    if given is None or given.nonfinite or not (failed_later or "between 0 and 1" in crash.message):
        return None
    return Claim(
        0.97,
        f"binary_cross_entropy{at_place(crash.site)} was given values from {given.min or 0:.3g} to "
        f"{given.max or 0:.3g}; it takes probabilities.",
        where=(str(crash.site),),
        evidence={"lowest": given.min, "highest": given.max},
        fixes=("Use binary_cross_entropy_with_logits, or put a sigmoid before it.",),
    )


def swapped_arguments(run: RecordedRun) -> Claim | None:
    """A loss is given the labels as its prediction, and the scores of the model as its target.

    Only the target has a gradient, and it holds values that no label or probability has. Probabilities in its place can
    be meant, as in the reverse term of a symmetric cross-entropy.
    """
    functions = "binary_cross_entropy_with_logits", "binary_cross_entropy", "cross_entropy"
    for site, found in by_site(run.sampled.training_losses(*functions)).items():
        notes = [n for n in found if n.target.requires_grad and not n.input.requires_grad]
        low = min(present(n.target.min for n in notes), default=0.5)
        high = max(present(n.target.max for n in notes), default=0.5)
        if not notes or len(notes) < len(found) or 0.0 <= low <= high <= 1.0:
            continue
        if notes[0].op == "cross_entropy" and run.curve.learned and run.curve.end >= 0:
            continue  # probabilities that an interpolation has taken beyond 0 and 1
        first = notes[0]
        return Claim(
            0.97,
            f"The arguments of `{first.op}`{at_place(site)} are swapped: its target has the gradient and runs from "
            f"{low:.3g} to {high:.3g}, as the scores of a model do, and its input, from {first.input.min or 0:g} to "
            f"{first.input.max or 0:g}, has none. The loss has no lower bound then; it is at {run.curve.end:.3g}.",
            step=first.step,
            where=(site,),
            evidence={"target_lowest": low, "target_highest": high, "calls": len(notes), "loss": run.curve.end},
            fixes=(f"Swap the two arguments{at_place(site)}: `{first.op}(scores, labels)`.",),
        )
    return None


def _scores(notes: Iterable[LossCall]) -> list[RowDistribution]:
    """The finite scores that a loss got: those of a run that has diverged do not show what they were meant to be."""
    known = [n.distribution for n in notes if n.distribution is not None]
    return [each for each in known if each.classes > 1 and math.isfinite(each.log_sum_error)]


def logits_into_probability_loss(run: RecordedRun) -> Claim | None:
    """A loss for (log-)probabilities gets something else."""
    if has_softmax_over_rows(run):
        return None  # the softmax is there, over the wrong dimension
    for site, notes in by_site(run.sampled.training_losses("nll_loss", "nll_loss2d")).items():
        seen = _scores(notes)
        if seen and all(d.log_sum_error > 0.05 for d in seen):
            probabilities = all(d.min >= 0 and d.sum_error < 1e-2 for d in seen)
            kind = "probabilities, not their logarithms" if probabilities else "raw scores, not log-probabilities"
            return Claim(
                0.97,
                f"nll_loss{at_place(site)} is given {kind}: values from {min(d.min for d in seen):.3g} to "
                f"{max(d.max for d in seen):.3g}, whose exponentials do not sum to 1. The loss went to "
                f"{run.curve.end:.3g}.",
                step=notes[0].step,
                where=(site, source_of(notes[0])),
                evidence={
                    "largest_value": max(d.max for d in seen),
                    "log_sum_error": min(d.log_sum_error for d in seen),
                    "loss": run.curve.end,
                },
                fixes=("Put log_softmax before nll_loss, or use cross_entropy.",),
            )
    for site, notes in by_site(run.sampled.training_losses("kl_div", "ctc_loss")).items():
        seen = _scores(notes)
        if seen and all(d.log_sum_error > 0.05 for d in seen):
            return Claim(
                0.9,
                f"{notes[0].op}{at_place(site)} gets values that are not log-probabilities (up to "
                f"{max(d.max for d in seen):.3g}).",
                step=notes[0].step,
                where=(site, source_of(notes[0])),
                evidence={"log_sum_error": min(d.log_sum_error for d in seen)},
            )
    return None


def sign_flipped(run: RecordedRun) -> Claim | None:
    """The negative of a loss is minimised."""
    if run.adversarial:
        return _plunging_side(run)
    calls = run.sampled.backward_calls
    flipped = [(call, call.sign) for call in calls if call.sign and (call.sign.factor or 0) < 0]
    if flipped and len(flipped) >= 0.5 * len(calls) and not (run.curve.learned and run.curve.end > 0):
        root, sign = flipped[0]
        return Claim(
            0.95,
            f"backward{at_place(root.site)} runs on minus {sign.function} (called{at_place(sign.site)}): the loss "
            f"goes from {run.curve.start:.3g} to {run.curve.end:.3g}, and the fit gets worse with it.",
            step=root.step,
            where=(root.site, sign.site),
            evidence={"factor": sign.factor, "first": run.curve.start, "last": run.curve.end},
            fixes=("Remove the minus sign.",),
        )
    curve = run.curve
    if curve.count < 10 or run.sampled.calls.ratios or run.facts.policy_entropies or _has_advantages(run):
        return None
    falling = curve.start < 0 and curve.end < 10 * curve.start and curve.end < -10 and not _settles(curve.finite)
    plunging = curve.end < -1e3 * max(1.0, abs(curve.start))
    if falling or plunging:
        return Claim(
            0.85,
            f"The loss starts at {curve.start:.3g} and falls to {curve.end:.3g} without a lower bound: the loss, or a "
            "term of it, has the wrong sign.",
            step=0,
            where=(calls[0].site,) if calls else (),
            evidence={"first": curve.start, "last": curve.end, "operations": calls[0].operations[:6] if calls else []},
        )
    return None


def overlap_minimised(run: RecordedRun) -> Claim | None:
    """The loss rises with the overlap of predictions and targets: it is the Dice score instead of 1 minus it."""
    if run.adversarial or run.main is None or run.main.first_group.maximize or not _trains_modules(run):
        return None
    if run.sampled.training_losses():
        return None  # beside another loss, an overlap with what must not be predicted is a penalty
    signs: list[tuple[BackwardCall, OverlapCall, bool]] = []
    for look in run.sampled.steps:
        overlaps = {call.index: call for call in look.calls.overlaps if call.binary}
        for root in look.backward_calls:
            found = [each for each in root.product_gradients or [] if each.index in overlaps and each.total]
            signs += [(root, overlaps[each.index], (each.total or 0.0) > 0) for each in found]
    wrong = [(root, call) for root, call, rises in signs if rises]
    if len({root.step for root, _ in wrong}) < 3 or len(wrong) < 0.9 * len(signs):
        return None
    root, call = wrong[0]
    return Claim(
        0.95,
        f"The loss rises with the overlap of predictions and targets that is computed{at_place(call.ratio_site)}, in "
        f"all of {len(wrong)} sampled calls: minimising it drives the overlap to 0. The loss goes from "
        f"{run.curve.start:.3g} to {run.curve.end:.3g}.",
        step=root.step,
        where=(call.ratio_site, root.site),
        evidence={"calls": len(wrong), "first": run.curve.start, "last": run.curve.end},
        fixes=(f"Use 1 minus the overlap as the loss: `1 - …`{at_place(call.ratio_site)}.",),
    )


def _trains_modules(run: RecordedRun) -> bool:
    """Whether weights of a module are trained; an attack trains its input instead, to make the overlap small."""
    return any(p.optimizers and p.model for p in run.parameters.values())


def _plunging_side(run: RecordedRun) -> Claim | None:
    """The loss of one side of an adversarial run falls without a bound, and its gradient grows with it.

    A critic's loss is negative, but a penalty or clipped weights bound its gradient. Without them, the generator's
    loss may fall with the critic's scores, but not as far as the loss whose term has the wrong sign.
    """
    curves = [(side, run.curve_of(side)) for side in run.optimizers]
    long = [(side, curve) for side, curve in curves if curve.count >= 30]  # that of an empty one ends at NaN
    for side, curve in sorted(long, key=lambda each: each[1].end):
        norms = present_finite(side.series.grad_norm)
        if len(norms) < 30 or curve.end > -1e3 * max(1.0, abs(curve.start)):
            continue
        first, last = median(norms[:10]), median(norms[-10:])
        if last > 1e3 * first > 0:
            return Claim(
                0.85,
                f"The loss that the {side.type} of {side.site} minimises goes from {curve.start:.3g} to {curve.end:.3g}"
                f", and its gradient norm from {first:.2g} to {last:.2g}: nothing bounds it from below. A term of it, "
                "such as a penalty, has the wrong sign, or is missing.",
                step=next(s for s, v in zip(curve.steps, curve.values, strict=True) if v < 0.1 * curve.end),
                where=(side.site,) if side.site else (),
                evidence={"loss": [curve.start, curve.end], "gradient": [first, last]},
                fixes=("Add the penalty to the loss with a plus sign.",),
            )
    return None


def _settles(losses: list[float]) -> bool:
    """Whether it fell far less in its second half than in its first: a density has a floor, a flipped sign has none."""
    size = max(1, len(losses) // 20)
    middle = len(losses) // 2
    first, half, last = (median(losses[at : at + size]) for at in (0, middle, len(losses) - size))
    return half - last < 0.5 * (first - half)


def _has_advantages(run: RecordedRun) -> bool:
    return any(weighs_by_reward(n) for n in run.sampled.calls.products)


def no_valid_targets(run: RecordedRun) -> Claim | None:
    """A batch without any valid target."""
    bad = run.nonfinite.loss
    if bad is not None and bad.all_ignored:
        return Claim(
            0.97,
            f"At step {run.nonfinite.loss_step} every target is the ignore index ({bad.ignore_index}): the mean over "
            "no targets is 0/0.",
            step=run.nonfinite.loss_step,
            where=(str(bad.site or ""),),
            evidence=details(bad),
        )
    if bad is not None and bad.all_weightless:
        return Claim(
            0.97,
            f"At step {run.nonfinite.loss_step} all {bad.bad} targets at {bad.site or 'the loss'} belong to classes "
            "with the weight 0: the mean is divided by the sum of their weights, and 0/0 is NaN.",
            step=run.nonfinite.loss_step,
            where=(str(bad.site or ""),),
            evidence=details(bad),
            fixes=("Give every class in `weight` a value above 0, or leave batches without a weighted class out.",),
        )
    if bad is not None and bad.empty_count:
        return Claim(
            0.85,
            f"At step {run.nonfinite.loss_step} the loss was divided by a count of 0 at {bad.site or 'the loss'}: no "
            "element of the batch was left after masking.",
            step=run.nonfinite.loss_step,
            where=(str(bad.site or ""),),
            evidence=details(bad),
        )
    empty = [n for n in run.sampled.training_losses("cross_entropy", "nll_loss") if n.targets and n.valid == 0]
    if empty:
        return Claim(
            0.9,
            f"At step {empty[0].step} all {empty[0].targets} targets of {empty[0].op}{at_place(empty[0].site)} "
            f"are the ignore index ({empty[0].ignore_index}).",
            step=empty[0].step,
            where=(empty[0].site,),
            evidence={"targets": empty[0].targets, "value": empty[0].value},
        )
    return None


def sum_reduction(run: RecordedRun) -> Claim | None:
    """A loss summed over the batch, in a run that fails."""
    preflight = run.facts.preflight
    does_well = not fails_at_its_rate(preflight) if preflight is not None else run.curve.learned
    if does_well and not run.nonfinite.seen:
        return None
    for note in run.sampled.training_losses():
        count = math.prod(note.target.shape or [1])
        if note.reduction == "sum" and count > 4 and _is_root(run, note):
            return _summed(run, note.site, note.op, count, note.step)
    for root in run.sampled.backward_calls:
        made = root.made_from or []
        count = math.prod(made[1].shape or [1]) if len(made) > 1 else 0
        if root.operations[:1] == ["Sum"] and count > 4:
            return _summed(run, made[0].site, "sum", count, root.step)
    return None


def _is_root(run: RecordedRun, note: LossCall) -> bool:
    """Whether a loss goes into backward undivided. One line that calls a trainer may compute many losses."""
    sign = run.sampled.signs.get((note.step, note.index))
    return sign is not None and sign.factor == 1


def _summed(run: RecordedRun, site: str, op: str, count: int, step: int) -> Claim | None:
    norms = run.grad_norms[:8]
    pushed = max(run.update_ratios()[:8], default=0.0) > 0.02
    if not norms or not (run.nonfinite.seen or run.curve.rose or run.curve.peak > 3 * abs(run.curve.start) or pushed):
        return None
    return Claim(
        0.85,
        f"{op}{at_place(site)} sums {count} elements instead of averaging them: the gradient norm starts at "
        f"{norms[0]:.3g}, {norms[0] / count:.3g} per element, so the step is {count} times that of a mean, "
        f"and the loss went from {run.curve.start:.3g} to {run.curve.end:.3g}.",
        step=step,
        where=(site,),
        evidence={"elements": count, "grad_norm": norms[0], "first": run.curve.start, "last": run.curve.end},
        fixes=("Use the mean, or divide the learning rate by the number of elements.",),
    )


def by_site(notes: Iterable[_Call]) -> dict[str, list[_Call]]:
    """Calls by their line."""
    groups: dict[str, list[_Call]] = {}
    for note in notes:
        groups.setdefault(note.site, []).append(note)
    return groups


def _drop(what: str, note: HasProducer) -> tuple[str, ...]:
    """The first fix. A layer of `nn.Sequential` has no line of its own: it runs at the line that calls the model."""
    made = note.producer
    if made is None or not made.site:
        return ()
    place = f"in `{made.module}`" if made.module and made.site == note.site else f"at {made.site}"
    if what not in made.op:  # results of the softmax that were weighted and added, as those of several experts
        what += f" whose results go into `{made.op}`"
    return (f"Pass the logits: remove the {what} {place}.",)


RULES = (
    Rule("loss.softmax-before-cross-entropy", "wiring", softmax_before_cross_entropy,
         explains=("lr.*", "model.*", "data.labels-uninformative", "data.class-collapse", "optim.weight-decay",
                   "loss.bounded-output")),
    Rule("loss.sigmoid-before-bce-logits", "wiring", sigmoid_before_bce_logits,
         explains=("lr.*", "model.*", "data.labels-uninformative", "data.class-collapse")),
    Rule("loss.sigmoid-before-bce-logits", "wiring", sigmoid_twice,
         explains=("lr.*", "model.*", "data.labels-uninformative", "data.class-collapse", "loss.bounded-output",
                   "optim.not-learning")),
    Rule("loss.logits-into-probability-loss", "crash", scores_crash,
         explains=("lr.*", "loss.sign-flipped", "model.*", "init.*", "data.class-collapse")),
    Rule("loss.logits-into-probability-loss", "wiring", logits_into_probability_loss,
         explains=("lr.*", "loss.sign-flipped", "model.*", "init.*", "data.class-collapse")),
    Rule("loss.logits-into-probability-loss", "wiring", swapped_arguments,
         explains=("loss.*", "lr.*", "model.*", "init.*", "data.*", "optim.*")),
    Rule("loss.sign-flipped", "wiring", sign_flipped,
         explains=("lr.*", "model.*", "init.*", "data.*", "loss.undefined-op", "precision.*")),
    Rule("loss.sign-flipped", "wiring", overlap_minimised,
         explains=("lr.*", "model.*", "init.*", "data.*", "optim.*", "fit.*")),
    Rule("loss.no-valid-targets", "value", no_valid_targets, explains=("loss.undefined-op", "lr.*", "data.*")),
    Rule("loss.sum-reduction", "value", sum_reduction,
         explains=("lr.too-high", "model.exploding-gradient", "model.dead-units", "clip.saturated", "lr.no-warmup",
                   "loss.undefined-op", "precision.fp16-overflow")),
)  # fmt: skip
