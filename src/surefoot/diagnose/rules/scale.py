"""Scales from layer to layer: activations, gradients, dead and saturated units."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from surefoot.core.wording import at_place
from surefoot.diagnose.curves import present
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.data_labels import labels_uninformative
from surefoot.record.facts import SpikeEvent

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import ActivationCall, NormalizationCall, SampledStep


_MUCH = 0.15
"""The share of what there was to learn from which on much is left."""
_UNMOVED = 0.1
"""Updates that add up to less than this share of the weights leave the units as they were."""


def dead_units(run: RecordedRun) -> Claim | None:
    """Units that are zero on every input."""
    worst: tuple[float, int, tuple[str, str], list[ActivationCall]] | None = None
    for (module, site, _, units), notes in _rectified(run).items():
        late = notes[len(notes) // 2 :] if len(notes) > 4 else notes
        if len(late) < 2 or units < 4 or notes[0].step > run.sampled.steps[:2][-1].step:
            continue  # a layer that appears only later belongs to an evaluation with gradients, and is not trained
        silent = set(late[0].dead_units or ())
        for note in late:
            silent &= set(note.dead_units or ())
        share = len(silent) / units
        if worst is None or share > worst[0]:
            worst = (share, units, (module, site), notes)
    if worst is None or worst[0] < 0.4:
        return None
    share, units, (module, site), notes = worst
    at_start = (notes[0].dead or 0) / units
    if share < 0.8 and at_start < 0.5 * share and labels_uninformative(run) is not None:
        return None  # the other units would learn what the labels say; these died while they were trained on noise
    if at_start >= share < 0.8 and median(run.sampled.update_ratios() or [1.0]) * run.steps < _UNMOVED:
        return None  # none has died: the weights have hardly moved since the beginning
    # Half of the units are off by chance where rows hardly differ; the other half can learn if none has died since.
    harms = not run.curve.learned and (share >= 0.6 or share > at_start)
    bad = share >= 0.95 or (share >= 0.6 and at_start > 0.5) or harms
    return Claim(
        0.85 if at_start > 0.4 else 0.7,
        f"{share:.0%} of the {units} units after `{module or site}` are zero on every input of the last "
        f"{len(notes) - len(notes) // 2} sampled steps ({at_start:.0%} at step {notes[0].step}): they get no gradient "
        "and cannot recover.",
        step=notes[-1].step,
        where=(module, site),
        evidence={"share": share, "units": units, "share_at_start": at_start, "sampled_steps": len(notes)},
        severity="error" if bad and share >= 0.8 else "warning" if bad else "info",
    )


def _rectified(run: RecordedRun) -> dict[tuple[str, str, int, int], list[ActivationCall]]:
    """Records of rectified layers: by module, line, position among the calls of that line, and width.

    A line that runs often in one step, as in a recurrence, is one layer. Positions are counted from the last call of a
    step: an evaluation comes before it, and would otherwise make the same layer a new one in the next step.
    """
    groups: dict[tuple[str, str, int, int], list[ActivationCall]] = {}
    for look in run.sampled.steps:
        seen: dict[tuple[str, str], int] = {}
        notes = [n for n in look.calls.activations if n.units and n.trained_on and (n.rows or 0) >= 4]
        for note in reversed(notes):
            line = (note.module, note.site)
            often = sum((n.module, n.site) == line for n in notes) > 4
            seen[line] = seen.get(line, -1) + 1
            groups.setdefault((*line, 0 if often else seen[line], note.units or 0), []).append(note)
    return groups


def saturated_units(run: RecordedRun) -> Claim | None:
    """Hidden sigmoid or tanh units that are at their bounds."""
    groups: dict[tuple[str, str, str], list[ActivationCall]] = {}
    for look in run.sampled.steps:
        last_layer = max((n.index for n in look.calls.layers if n.trained_on), default=-1)
        notes = [n for n in look.calls.activations if n.saturated is not None and n.trained_on]
        last = {(n.module, n.site, n.op): n.index for n in notes}  # of outputs, it comes after all layers
        for note in notes:
            key = (note.module, note.site, note.op)
            if last[key] < last_layer:
                groups.setdefault(key, []).append(note)
    for (module, site, op), found in groups.items():
        shares = present(n.saturated for n in found)
        from_start = median(shares[:3]) > 0.6
        well = run.curve.learned and run.curve.drop > 0.5
        if len(shares) >= 3 and median(shares) > 0.6 and (from_start or not well):
            return Claim(
                0.85,
                f"{median(shares):.0%} of the outputs of {op}{at_place(site)} are at its bounds, where its derivative "
                f"is near 0 ({shares[0]:.0%} already at step {found[0].step}).",
                step=found[0].step,
                where=(module, site),
                evidence={"saturated": median(shares), "at_start": shares[0], "sampled_steps": len(shares)},
                severity="info" if _is_solved(run) else "warning" if well else "error",
                fixes=(
                    f"Give the layer before the {op}{at_place(site)} smaller initial weights and a bias near 0: its "
                    f"outputs should begin between -3 and 3.",
                )
                if from_start
                else (),
            )
    return None


def _is_solved(run: RecordedRun) -> bool:
    """Whether the loss ended below a hundredth of the best constant answer's, or, if unknown, a thousandth of its own.

    Gradients that saturated units keep from the layers below were not needed then.
    """
    curve = run.curve
    return curve.learned and curve.end < (0.01 * curve.chance if curve.chance is not None else 1e-3 * abs(curve.start))


def _depth_profile(run: RecordedRun, looks: list[SampledStep]) -> list[tuple[int, float]]:
    """Layers with weights from first to last, with the typical size of their gradients relative to the weights."""
    if not run.sampled.steps:
        return []
    order: list[int] = []
    for look in run.sampled.steps:
        for note in look.calls.layers:
            number_ = note.parameter
            if number_ is not None and number_ not in order:
                order.append(number_)
    sizes: dict[int, list[float]] = {}
    for look in looks:
        for step in look.updates:
            for row in step.rows:
                grad = row.grad
                if row.parameter in order and grad is not None and math.isfinite(grad):
                    count = math.prod(run.parameters[row.parameter].shape)
                    sizes.setdefault(row.parameter, []).append(grad / math.sqrt(count))
    return [(i, median(sizes[i])) for i in order if i in sizes]


def vanishing_gradient(run: RecordedRun) -> Claim | None:
    """The gradient vanishes on its way back to the first layers."""
    early = run.sampled.steps[:6]
    profile = _depth_profile(run, early)
    if len(profile) < 4:
        return None
    sizes = [size for _, size in profile]
    first, last = _ends(sizes)
    if last <= 0 or first / last > 1e-3 or _recovers(sizes, last):
        return None
    before = _ends([size for _, size in _depth_profile(run, early[:1])] or [0.0])
    if early[0].step == 0 and before[0] > 0.01 * before[1] > 0:
        return None  # the gradient reached the first layers before the first update: the updates have changed that
    slow = run.curve.flat or not run.curve.before_bad.learned
    return Claim(
        0.85 if first / last < 1e-4 else 0.7,
        f"The gradient of `{run.label(profile[0][0])}` is {first / last:.1e} times that of "
        f"`{run.label(profile[-1][0])}` ({first:.2g} against {last:.2g} per weight): it vanishes in the backward pass "
        f"through {len(profile)} layers, and the first ones do not learn.",
        step=early[0].step if early else 0,
        where=(run.label(profile[0][0]), run.label(profile[-1][0])),
        evidence={"ratio": first / last, "layers": len(profile), "profile": [s for _, s in profile][:40]},
        severity="error" if slow else "info",
    )


def _ends(sizes: list[float]) -> tuple[float, float]:
    """The typical size of the first and of the last quarter of the layers."""
    quarter = max(1, len(sizes) // 4)
    return median(sizes[:quarter]), median(sizes[-quarter:])


def _recovers(sizes: list[float], last: float) -> bool:
    """Whether one of the first three layers gets as much gradient as the later ones: then none is lost on the way back.

    Queries and keys have far smaller gradients than their neighbours while attention is uniform, and a last layer has
    far larger ones than all others if its own weights are small: both at any depth.
    """
    behind = sizes[3 : -max(1, len(sizes) // 4)]
    return bool(behind) and max(sizes[:3]) > max(0.3 * median(behind), 1e-3 * last)


def exploding_gradient(run: RecordedRun) -> Claim | None:
    """The gradient grows on its way back, or with the length of a sequence."""
    early = run.sampled.steps[:4]
    profile = _depth_profile(run, early)
    norms = run.grad_norms
    bad = run.nonfinite.seen or run.curve.rose or run.curve.blew_up or _spiky(run)
    if not norms or not bad:
        return _jumped(run, norms) if run.facts.preflight is not None else None
    recurrent = _recurrent(run)
    if len(profile) >= 4:
        first = median(size for _, size in profile[: max(1, len(profile) // 4)])
        last = median(size for _, size in profile[-max(1, len(profile) // 4) :])
        if last > 0 and first / last > 1e3:
            return Claim(
                0.85,
                f"The gradient grows in the backward pass: `{run.label(profile[0][0])}` has {first / last:.1e} times "
                f"the gradient of `{run.label(profile[-1][0])}`, before the first update.",
                step=0,
                where=(run.label(profile[0][0]), run.label(profile[-1][0])),
                evidence={"ratio": first / last, "profile": [s for _, s in profile][:40]},
            )
    thrown = max(run.update_ratios()[:3], default=0.0) > 0.3  # the learning rate caused it
    if recurrent and (norms[0] > 100 or (max(norms) > 100 * median(norms) and not thrown)):
        return Claim(
            0.85,
            f"The gradient through the recurrence in `{recurrent}` explodes: norm {norms[0]:.3g} at step 0, "
            f"{median(norms):.3g} in the middle, {max(norms):.3g} at most.",
            step=_step_of(run, max(norms)),
            where=(recurrent,),
            evidence={"first": norms[0], "median": median(norms), "largest": max(norms)},
        )
    return None


def _step_of(run: RecordedRun, norm: float) -> int | None:
    """The first step with a certain gradient norm. Not every step on a device is measured."""
    known = zip(run.series.step, run.series.grad_norm, strict=False)
    return next((step for step, each in known if each == norm), None)


def _jumped(run: RecordedRun, norms: list[float]) -> Claim | None:
    """Within a few steps one norm is far beyond all earlier ones; the first three set the record."""
    jumps = [(norm / record, norm) for i, norm in enumerate(norms) if i > 2 and (record := max(norms[:i])) > 0]
    jump, norm = max(jumps, default=(1.0, 0.0))
    if jump < 100:
        return None
    return Claim(
        0.6,
        f"One gradient norm of the first {len(norms)} steps is {norm:.3g}, {jump:.3g} times the largest before it (the "
        f"median is {median(norms):.3g}).",
        step=_step_of(run, norm),
        evidence={"jump": jump, "largest": norm, "median": median(norms)},
        severity="warning",
    )


def _recurrent(run: RecordedRun) -> str:
    """The name of a recurrent part: an RNN module, or a layer that runs many times per step."""
    for look in run.sampled.steps[:3]:
        for note in look.calls.layers:
            if note.op.startswith(("rnn", "lstm", "gru")):
                return str(note.module or note.op)
        counts: dict[int, int] = {}
        for note in look.calls.layers:
            if note.parameter is not None and note.input_requires_grad and note.repeats is not False:
                counts[note.parameter] = counts.get(note.parameter, 0) + 1
        busiest = max(counts, key=lambda key: counts[key], default=None)
        if busiest is not None and counts[busiest] >= 8:
            return run.label(busiest)
    return ""


def _spiky(run: RecordedRun) -> bool:
    return len(run.events(SpikeEvent)) >= 3


def batchnorm_tiny_batch(run: RecordedRun) -> Claim | None:
    """Batch norm computes its statistics over very few values."""
    crash = run.facts.crash
    if crash is not None and "more than 1 value per channel" in crash.message:
        return Claim(
            0.95,
            f"A batch norm{at_place(crash.site)} was given 1 value per channel: {crash.message}",
            where=(crash.site or "",),
            evidence={"message": crash.message[:300]},
        )
    notes = [n for n in run.sampled.calls.normalizations if n.op == "batch_norm" and n.training and n.trained_on]
    tiny = [n for n in notes if _is_tiny(n)]
    if not notes or len(tiny) < 0.5 * len(notes):
        return None
    note = tiny[0]
    return Claim(
        0.88,
        f"`{note.module}` normalises with {note.per_statistic} value{'s' * (note.per_statistic != 1)} per "
        f"statistic (batch of {note.shape[0]}): mean and variance of so few are noise in training, and differ from "
        "the running ones used in evaluation.",
        step=note.step,
        where=(note.module, note.site),
        evidence={"per_statistic": note.per_statistic, "batch": note.shape[0], "calls": len(notes)},
        severity="warning" if run.failing or _leaves_much(run) or _runs_in_eval_mode(run) else "info",
    )


def _leaves_much(run: RecordedRun) -> bool:
    """Whether the training itself left much to learn: noisy statistics may be the reason."""
    return min(run.curve.finite, default=0.0) > 0 and run.curve.left >= _MUCH


def _runs_in_eval_mode(run: RecordedRun) -> bool:
    """Whether a model with batch norms is evaluated with its running statistics, and not with a known good result."""
    level, evaluated = run.curve.chance, run.facts.evaluation_passes
    known = [math.inf if each.loss is None else each.loss for each in evaluated[-3:]]
    if level is not None and known and max(known) < _MUCH * level:
        return False
    return any(call.batchnorms and not call.training for call in run.evaluations())


def _is_tiny(call: NormalizationCall) -> bool:
    count = call.per_statistic
    return count is not None and (count <= 4 or (call.shape[0] <= 2 and count <= 8))


class AttentionLogits(NamedTuple):
    """One attention at one step."""

    step: int
    largest: float
    entropy: float


def attention_logit_growth(run: RecordedRun) -> Claim | None:
    """Attention logits grow until the softmax is one-hot."""
    groups: dict[tuple[str, str], list[AttentionLogits]] = {}
    for note in run.sampled.calls.softmaxes:
        if note.largest is not None and note.entropy is not None and note.attends is not False:
            growth = AttentionLogits(note.step, note.largest, note.entropy)
            groups.setdefault((note.module, note.site), []).append(growth)
    for (module, site), notes in groups.items():
        if len(notes) < 5:
            continue
        first, last = median(n.largest for n in notes[:3]), max(n.largest for n in notes[-3:])
        calm, sharp = median(n.entropy for n in notes[:3]), min(n.entropy for n in notes[-3:])
        soon = [n.largest for n in notes if n.step <= max(8, 0.1 * run.steps)]
        gradual = max(soon, default=0.0) < 0.4 * last
        extreme = last > 200 and last > 30 * max(first, 1e-6)
        poor = did_badly(run) or run.curve.drop < 0.6 or extreme
        if last > 50 and last > 8 * max(first, 1e-6) and gradual and sharp < 0.5 * calm and poor:
            return Claim(
                0.85,
                f"The largest attention logit{at_place(site)} rises from {first:.3g} to {last:.3g} while the entropy "
                f"of the heads falls from {calm:.3g} to {sharp:.3g}.",
                step=notes[-1].step,
                where=(module, site),
                evidence={"first": first, "last": last, "entropy_first": calm, "entropy_last": sharp},
                severity="error" if did_badly(run) else "warning",
            )
    return None


def did_badly(run: RecordedRun) -> bool:
    """Whether the run failed: not finite, risen, spiky, or never clearly fallen."""
    return run.nonfinite.seen or run.curve.rose or run.curve.blew_up or not run.curve.learned or _spiky(run)


RULES = (
    Rule("model.dead-units", "dynamics", dead_units,
         explains=("lr.too-low", "data.labels-uninformative", "data.class-collapse", "model.vanishing-gradient")),
    Rule("model.saturated-units", "dynamics", saturated_units,
         explains=("lr.too-low", "model.vanishing-gradient", "data.labels-uninformative", "data.class-collapse")),
    Rule("model.vanishing-gradient", "dynamics", vanishing_gradient,
         explains=("lr.too-low", "data.labels-uninformative", "data.class-collapse")),
    Rule("model.exploding-gradient", "dynamics", exploding_gradient, explains=("lr.*", "clip.saturated")),
    Rule("model.batchnorm-tiny-batch", "value", batchnorm_tiny_batch, explains=("data.bad-batch", "lr.too-high")),
    Rule("model.attention-logit-growth", "dynamics", attention_logit_growth),
)  # fmt: skip
