"""Precision, accumulation and memory: how numbers are rounded, summed, and kept alive."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.nonfinite import details
from surefoot.diagnose.rule import Claim, Rule
from surefoot.record.facts import STEPS_ONLY

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import BackwardCall, CrashFacts, SampledStep


MANY_SKIPS = 5
LOW_SCALE = 256.0
"""A scaler below this scale has met gradients above 256, because fp16 ends at 65504."""
_FEWEST_RISEN, _FEWEST_HELD, _MANY_HELD = 8, 24, 100
"""Graphs of the steps between two counts that are all held; held at once: worth a mention, and a warning."""


def _uses(run: RecordedRun, dtype: str) -> bool:
    """Whether models run in a type, by autocast or by their weights."""
    if any(note.autocast == dtype for note in run.sampled.model_calls):
        return True
    return any(p.dtype == dtype and p.in_graph for p in run.parameters.values())


def fp16_overflow(run: RecordedRun) -> Claim | None:
    """The first infinite value appeared in a half-precision tensor."""
    notes = run.sampled.calls.overflows
    harmless = {note.site for note in notes if _did_no_harm(run, note.step)}
    notes = [note for note in notes if note.site not in harmless]
    often = len({n.step for n in notes}) >= max(2, 0.3 * len(run.sampled.steps))
    if notes and (often or not run.curve.learned):
        note = notes[0]
        return Claim(
            0.93,
            f"{note.op}{at_place(note.site)} overflows in fp16 at step {note.step}: {note.infinite} of "
            f"{note.of} results are infinite (limit 65504) from finite inputs of up to {note.largest_in:.3g}.",
            step=note.step,
            where=(note.site, note.module),
            evidence={"overflows": [{"step": call.step, **call.to_json()} for call in notes[:5]]},
        )
    return _overflowed_loss(run) or _overflowed_gradient(run)


def _overflowed_loss(run: RecordedRun) -> Claim | None:
    """A loss that is not finite in half precision."""
    bad = run.nonfinite.loss
    if bad is None or bad.without_graph or not (_uses(run, "float16") or bad.dtype == "float16"):
        return None
    call, place = bad.call or bad.op, bad.site or "the model"
    step = run.steps if bad.step is None else bad.step
    where = (bad.site or "", bad.module or "")
    if bad.kind == "operation" and bad.dtype == "float16":
        return Claim(
            0.93,
            f"{call} at {place} overflowed at step {step}: its fp16 result exceeded 65504 ({bad.inf or 0} infinite, "
            f"{bad.nan or 0} NaN).",
            step=bad.step,
            where=where,
            evidence=details(bad),
        )
    if bad.kind == "data" and bad.dtype == "float16" and not bad.nan:
        return Claim(
            0.8,
            f"The fp16 input of {call} at {place} contains {bad.inf or 0} infinite values at step {step}. None was "
            "seen in the batch: values beyond 65504 become infinite in the cast.",
            step=bad.step,
            where=where,
            evidence=details(bad),
            fixes=("Scale the inputs, or keep this layer in float32: the largest value in fp16 is 65504.",),
        )
    peak = _largest_half(run)
    if bad.kind in ("unknown", "operation") or (bad.kind != "data" and peak > 3e4):
        return Claim(
            0.75,
            f"The loss became {bad.value} at step {step} in fp16; the largest activation seen in it is {peak:.3g} "
            "(limit 65504).",
            step=bad.step,
            where=(bad.site or "",),
            evidence={"largest": peak, **details(bad)},
        )
    return None


def _overflowed_gradient(run: RecordedRun) -> Claim | None:
    """A finite loss whose gradients are not, in half precision."""
    bad, event = run.nonfinite.loss, next(iter(run.nonfinite.gradients), None)
    halved = _uses(run, "float16") or (bad is not None and bad.dtype == "float16")
    if event is None or not halved or (bad is not None and bad.without_graph):
        return None
    if not event.loss_finite or run.facts.loss_scaler.enabled:
        return None
    return Claim(
        0.75,
        f"Gradients overflowed in fp16 at step {event.step} while the loss was finite "
        f"({', '.join(event.parameters[:3])}).",
        step=event.step,
        where=tuple(event.parameters[:4]),
        evidence=event.to_json(),
    )


def _did_no_harm(run: RecordedRun, step: int) -> bool:
    """Whether the step was taken with a finite loss, in a run that learned or failed elsewhere: the -inf of a mask."""
    curve, skipped = run.curve, run.facts.loss_scaler.skip_steps
    loss = dict(zip(curve.steps, curve.values, strict=True)).get(step, math.nan)
    broke = any(event.step == step for event in run.nonfinite.gradients)
    taken = math.isfinite(loss) and step not in skipped and not broke
    return taken and (curve.learned or curve.first_bad is not None)


def _largest_half(run: RecordedRun) -> float:
    values = [call.out_largest for call in run.sampled.calls.layers if call.dtype == "float16"]
    return max(filter(math.isfinite, values), default=0.0)


def fp16_underflow(run: RecordedRun) -> Claim | None:
    """Gradients in fp16 that are exactly zero, with no loss scaling."""
    if not _uses(run, "float16") or run.facts.loss_scaler.enabled or run.curve.learned:
        return None
    zeros = [row.zeros for _, row in run.sampled.weight_updates() if row.zeros is not None]
    if not zeros or median(zeros) < 0.3:
        return None
    sizes = [row.largest for _, row in run.sampled.weight_updates() if row.largest]
    return Claim(
        0.9,
        f"{median(zeros):.0%} of the gradient's entries are exactly 0 in fp16, without loss scaling; the largest are "
        f"{median(sizes) if sizes else 0:.1e} (the smallest value in fp16 is 6e-8). The loss moved from "
        f"{run.curve.start:.4g} to {run.curve.end:.4g}.",
        step=0,
        where=tuple(run.label(row.parameter) for _, row in list(run.sampled.weight_updates())[:3]),
        evidence={"zeros": median(zeros), "largest": median(sizes) if sizes else 0},
    )


def low_precision_weights(run: RecordedRun) -> Claim | None:
    """Weights in 16 bits on which most updates round to nothing."""
    stuck: list[float] = []
    names: list[str] = []
    for _, row in run.sampled.weight_updates():
        p = run.parameters[row.parameter]
        if p.dtype in ("bfloat16", "float16") and row.stuck is not None and row.grad:
            stuck.append(row.stuck)
            names.append(p.label)
    if len(stuck) < 3 or median(stuck) < 0.6:
        return None
    weak = not run.curve.learned or run.curve.drop < 0.3
    return Claim(
        0.92 if median(stuck) > 0.85 else 0.75,
        f"{median(stuck):.0%} of the weights in {run.parameters[0].dtype if 0 in run.parameters else '16 bits'} "
        f"stay the same bit for bit at a step although their gradient is not 0: the updates are rounded away (loss "
        f"{run.curve.start:.4g} to {run.curve.end:.4g}).",
        step=run.sampled.steps[0].step,
        where=tuple(dict.fromkeys(names))[:4],
        evidence={"unchanged": median(stuck), "rows": len(stuck)},
        severity="error" if weak else "warning" if median(stuck) > 0.85 else "info",
    )


def scaler_stuck(run: RecordedRun) -> Claim | None:
    """Every step is skipped, permanently."""
    scaler = run.facts.loss_scaler
    attempts, skips, steps = scaler.attempts, scaler.skips, scaler.skip_steps
    tail = 0
    while tail < len(steps) and steps[-1 - tail] == attempts - 1 - tail:
        tail += 1
    if attempts < 10 or tail < 10 or tail < 0.3 * attempts:
        return None
    trace = scaler.trace or [0.0]
    return Claim(
        0.93,
        f"The last {tail} of {attempts} steps were all skipped by the gradient scaler; its scale fell from "
        f"{trace[0]:.3g} to {trace[-1]:.3g} and every scale overflowed.",
        step=attempts - tail,
        where=(),
        evidence={"attempts": attempts, "skipped": skips, "skipped_at_end": tail, "scale": trace[-1]},
    )


def scaler_skips(run: RecordedRun) -> Claim | None:
    """Gradients overflow so often that a good part of the steps is lost.

    A few skips are normal: at the beginning, until the scale fits, and each time the scaler tries a larger one.
    """
    scaler = run.facts.loss_scaler
    attempts, skips, trace = scaler.attempts, scaler.skips, scaler.trace
    first = next((number for number, step in enumerate(scaler.skip_steps) if step != number), len(scaler.skip_steps))
    later = skips - first - sum(_was_tried(trace, step) for step in scaler.skip_steps if len(trace) == attempts)
    keeps_on = later >= MANY_SKIPS and later > 0.05 * attempts
    fell_far = skips >= 8 and skips > 0.1 * attempts and bool(trace) and trace[-1] < LOW_SCALE
    known = run.facts.scope == STEPS_ONLY or _uses(run, "float16")  # in a stabilizer's folder only the steps are known
    if not known or not (keeps_on or fell_far) or scaler_stuck(run) is not None:
        return None
    fell = f", whose scale fell from {max(trace):.3g} to {trace[-1]:.3g}" if trace and trace[-1] < max(trace) else ""
    return Claim(
        0.7,
        f"Gradients overflowed in fp16 in {skips} of {attempts} steps, which the gradient scaler skipped{fell}: "
        f"{later} of them after a step without overflow.",
        step=scaler.skip_steps[0] if scaler.skip_steps else None,
        evidence={"attempts": attempts, "skipped": skips, "later": later, "scale": trace[-1] if trace else None},
        severity="warning",
    )


def _was_tried(trace: list[float], step: int) -> bool:
    """Whether the scale of a step was a larger one, tried for the first time."""
    return step >= 2 and trace[step - 1] > trace[step - 2]


def clip_before_unscale(run: RecordedRun) -> Claim | None:
    """Gradients were clipped while still multiplied by the loss scale."""
    scaler = run.facts.loss_scaler
    count, scale = scaler.clipped_scaled, scaler.scale or 1.0
    if count < 2 or scale <= 1.0:
        return None
    return Claim(
        0.97,
        f"Clipping{at_place(scaler.clip_site)} ran {count} times on gradients that are still multiplied by the loss "
        f"scale of {scale:.3g}: the effective limit is {1 / scale:.2g} times the given one.",
        step=0,
        where=(str(scaler.clip_site or ""),),
        evidence={"clipped": count, "scale": scale},
        fixes=("Call `scaler.unscale_(optimizer)` before clipping.",),
    )


def _windows(run: RecordedRun) -> list[list[BackwardCall]]:
    """The backward calls of each sampled step, in order."""
    return [look.backward_calls for look in run.sampled.steps if look.backward_calls and look.updates]


def accum_not_divided(run: RecordedRun) -> Claim | None:
    """Several backward calls per step, each with a whole loss."""
    if run.adversarial or not run.main or (run.main.zeroed_between or 0) > 0.5 * run.main.steps:
        return None  # gradients that are zeroed in between do not add up
    counts = [int(v) for v in run.series.backwards if v]
    closures = [v for v in run.series.closure if v]
    sites = [int(v) for v in run.series.roots if v]
    if len(counts) < 3 or median(counts) < 2 or closures or not sites or max(sites) > 1:
        return None
    size = int(median(counts))
    windows = [w for w in _windows(run) if len(w) == size]
    if not windows or not all(_same_weights(w) for w in windows):
        return None
    roots = [root for window in windows for root in window]
    known = [root for root in roots if root.sign is not None and root.sign.factor is not None]
    if any(map(_is_divided, known or roots)):
        return None
    return Claim(
        0.9 if all(root.sign for root in roots) else 0.75,
        f"backward runs {size} times per step{at_place(roots[0].site)}, each time on a loss that is not divided by "
        f"{size}: the gradient is {size} times that of the batch.",
        step=0,
        where=(roots[0].site, run.main.site),
        evidence={"backwards_per_step": size, "steps": len(counts), "values": [r.value for r in roots[:size]]},
        severity="error" if run.failing else "warning",
        fixes=(f"Divide the loss by {size} before backward.",),
    )


def _same_weights(window: list[BackwardCall]) -> bool:
    return all(root.parameters == window[0].parameters for root in window)


def _is_divided(root: BackwardCall) -> bool:
    """Whether the loss was scaled. Accelerate divides by 1 if it does not accumulate."""
    if root.sign is not None and root.sign.factor is not None:
        return abs(root.sign.factor) != 1.0
    return root.factor not in (None, 1.0) or (root.operations or [""])[0] in ("Div", "Mul")


def accum_uneven(run: RecordedRun) -> Claim | None:
    """Microbatches of unequal size that count equally. Losses of equal size may be weighted, as by a return."""
    uneven = []
    total = 0
    for look in run.sampled.steps:
        roots = look.backward_calls
        if len(roots) < 2 or not _same_weights(roots) or not look.updates or len({r.site for r in roots}) > 1:
            continue
        sizes = _sizes(look)
        factors = [abs(root.factor or 0.0) for root in roots]
        if len(sizes) != len(roots) or min(factors) == 0 or "Sum" in (roots[0].operations or [])[:2]:
            continue
        total += 1
        weights = [factor / size for factor, size in zip(factors, sizes, strict=True)]  # the weight of one target
        if max(weights) > 1.3 * min(weights) and max(sizes) > min(sizes):
            uneven.append((look.step, sizes, roots[0].site))
    if total < 3 or len(uneven) < 0.5 * total:
        return None
    step, sizes, site = uneven[0]
    return Claim(
        0.88,
        f"The microbatches of a step hold {sizes} targets, and the mean of each counts the same: a target in the "
        f"smallest weighs {max(sizes) / max(1, min(sizes)):.1f} times one in the largest "
        f"({len(uneven)} of {total} observed steps).",
        step=step,
        where=(site,),
        evidence={"sizes": sizes, "steps_uneven": len(uneven), "steps_looked_at": total},
        severity="warning",
        fixes=("Sum the loss over each microbatch and divide by the number of targets in the whole window.",),
    )


def _sizes(look: SampledStep) -> list[int]:
    """The number of targets that each backward of a step averages over."""
    losses = [n for n in look.calls.losses if n.trained_on]
    if len(losses) == len(look.backward_calls):
        if any(n.reduction != "mean" for n in losses):
            return []
        return [n.valid or math.prod(n.target.shape or [1]) for n in losses]
    passes = [n for n in look.model_calls if n.trained_on and n.inputs]
    if losses or len(passes) != len(look.backward_calls):
        return []
    return [n.inputs[0].shape[0] for n in passes]


def _ran_out(run: RecordedRun) -> bool:
    """Whether the script ended because no memory was left."""
    return run.facts.crash is not None and run.facts.crash.type in ("OutOfMemoryError", "MemoryError")


def graph_retained(run: RecordedRun) -> Claim | None:
    """Graphs of earlier steps that are still referenced."""
    crash, untrained = run.facts.crash, run.facts.preflight is not None
    if crash is not None and run.steps:  # the first step ran: this one met the graph of an earlier one
        freed = "backward through the graph a second time" in crash.message
        if freed or (untrained and "modified by an inplace operation" in crash.message):
            return _used_twice(crash)
    counts = run.facts.retained_graphs
    if len(counts) < 3:
        return None
    held = [alive / max(1, total - 8) for _, alive, total in counts]
    last_step, alive, total = counts[-1]
    growing = all(b[1] >= a[1] for a, b in pairwise(counts))
    least = 3 if untrained else 24  # the doctor itself holds none
    if not (alive >= least and growing and median(held) > 0.9):
        return _held_for_a_while(run)
    return Claim(
        0.95,
        f"The graphs of {alive} of {total} backward calls were still held at step {last_step}, one more with every "
        "step: the script keeps the loss (or a tensor computed from it) with its graph.",
        step=counts[0][0],
        where=tuple(dict.fromkeys(root.site for root in run.sampled.backward_calls))[:1],
        evidence={
            "held": alive,
            "backwards": total,
            "trace": [list(each) for each in counts[:: max(1, len(counts) // 10)]],
        },
        severity="error" if _ran_out(run) else "warning",
        fixes=("Keep `loss.item()` or `loss.detach()`, not `loss`.",),
    )


def _held_for_a_while(run: RecordedRun) -> Claim | None:
    """Graphs that are held one more with every step and then released, as by a sum that begins again in each epoch."""
    counts = run.facts.retained_graphs
    rises = [(a, b) for a, b in pairwise(counts) if b.alive - a.alive == b.made - a.made >= _FEWEST_RISEN]
    most = max(counts, key=lambda count: count.alive)
    if len(rises) < 2 or most.alive < _FEWEST_HELD:
        return None
    return Claim(
        0.9,
        f"The graphs of {most.alive} backward calls were held at step {most.step}, one more with every step until they "
        "were released together: the script adds up or collects the loss with its graph, so memory grows in every "
        "epoch.",
        step=rises[0][0].step,
        where=tuple(dict.fromkeys(root.site for root in run.sampled.backward_calls))[:1],
        evidence={"held": most.alive, "trace": [list(each) for each in counts[:: max(1, len(counts) // 10)]]},
        severity="warning" if most.alive >= _MANY_HELD else "info",
        fixes=("Add up `loss.item()` or `loss.detach()`, not `loss`.",),
    )


def _used_twice(crash: CrashFacts) -> Claim:
    return Claim(
        0.85,
        f"backward{at_place(crash.site)} reached into the graph of an earlier step: "
        f"{crash.message.splitlines()[0][:160]}",
        where=(crash.site or "",),
        evidence={"message": crash.message[:300]},
    )


RULES = (
    Rule("precision.fp16-overflow", "value", fp16_overflow, explains=("lr.*", "loss.undefined-op", "model.*", "init.*",
                                                                       "precision.fp16-underflow")),
    Rule("precision.fp16-underflow", "value", fp16_underflow,
         explains=("lr.too-low", "model.vanishing-gradient", "model.dead-units", "data.labels-uninformative",
                   "data.class-collapse", "optim.no-update", "precision.low-precision-weights")),
    Rule("precision.low-precision-weights", "value", low_precision_weights,
         explains=("lr.too-low", "optim.no-update", "data.labels-uninformative", "data.class-collapse")),
    Rule("precision.scaler-stuck", "value", scaler_stuck, from_steps=True,
         explains=("lr.*", "optim.no-update", "precision.fp16-overflow")),
    Rule("precision.fp16-overflow", "dynamics", scaler_skips, from_steps=True),
    Rule("clip.before-unscale", "wiring", clip_before_unscale, explains=("clip.saturated", "lr.*")),
    Rule("accum.not-divided", "wiring", accum_not_divided, explains=("lr.*", "clip.saturated", "model.*", "init.*")),
    Rule("accum.uneven-microbatches", "value", accum_uneven),
    Rule("memory.graph-retained", "value", graph_retained, explains=("device.out-of-memory",)),
)  # fmt: skip
