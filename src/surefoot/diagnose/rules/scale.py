"""Scales from layer to layer: initial weights, activations, gradients, dead and saturated units."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from surefoot.core.wording import count_of
from surefoot.diagnose.curves import present
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.data_labels import labels_uninformative
from surefoot.record.facts import SpikeEvent, WeightScale
from surefoot.watch.operation_names import RECURRENT

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import ActivationCall, LayerCall, NormalizationCall, PreflightFacts, SampledStep

HEALTHY_GAIN = (0.1, 3.0)
"""std(weight) x sqrt(fan-in): 1.4 after He, 1 after Xavier, 0.58 by torch's default."""


def _chain(run: RecordedRun) -> list[LayerCall]:
    """The layers with weights in the first step, in call order, before any update."""
    if not run.sampled.steps or run.sampled.steps[0].step > (
        0 if run.main else 1
    ):  # a loop without optimizer is seen from step 1
        return []
    layers = run.sampled.steps[0].calls.layers
    seen: set[object] = set()
    chain = []
    for note in layers:
        if note.trained_on and note.out_std is not None and note.parameter not in seen:
            seen.add(note.parameter if note.parameter is not None else object())
            chain.append(note)
    return chain


def _gains(run: RecordedRun, chain: list[LayerCall]) -> list[float]:
    """The gain of each layer's weight when it was first recorded."""
    found = []
    for note in chain:
        first = run.parameters[note.parameter].first if note.parameter is not None else WeightScale()
        fan_in = note.fan_in or first.fan_in
        if first.std is not None and fan_in:
            found.append(first.std * math.sqrt(fan_in))
    return found


def init_too_large(run: RecordedRun) -> Claim | None:
    """Activations grow with depth before the first update."""
    chain = _chain(run)
    gains = _gains(run, chain)
    if len(chain) < 2 or not gains:
        return _starts_above_chance(run)
    entering = chain[0].in_std
    first, last = chain[0].out_std or 0.0, max(note.out_std or 0.0 for note in chain)
    if entering is not None and entering > 10:
        return None  # the data itself is large
    worst = max(gains)
    large = worst > HEALTHY_GAIN[1] and last > 5 * max(1.0, entering or 1.0)
    grows = first > 0 and last > 30 * first and median(gains) > 1.6
    extreme = large and last > 100 * max(1.0, entering or 1.0)  # no model that starts there starts well
    if not (large or grows) or not (_badly(run) or (extreme and not _ended_well(run))):
        return _starts_above_chance(run)
    names = [run.label(n.parameter) for n in chain if n.parameter is not None]
    return Claim(
        0.9 if worst > 2 * HEALTHY_GAIN[1] else 0.75,
        f"Before the first update activations grow from a spread of {entering or first:.3g} to {last:.3g} over "
        f"{len(chain)} layers: weights have up to {worst:.3g} times the scale that preserves it (std x sqrt(fan-in); 1 "
        f"to 1.4 is right). The loss starts at {run.curve.start:.3g}.",
        step=0,
        where=tuple(names[:4]),
        evidence={"gains": gains[:20], "spread_in": entering, "spread_largest": last, "first_loss": run.curve.start},
    )


def _ended_well(run: RecordedRun) -> bool:
    """Whether the loss ended far below the best constant answer, or, if that is unknown, at a thousandth of itself."""
    curve = run.curve
    level = curve.chance
    return curve.learned and curve.end < (0.5 * level if level is not None else 1e-3 * abs(curve.start))


def _starts_above_chance(run: RecordedRun) -> Claim | None:
    """Before training: a classifier that is more confident than it can be, and wrong."""
    losses = run.sampled.steps[0].calls.losses if run.facts.preflight is not None and run.sampled.steps else []
    if len(losses) != 1 or losses[0].op != "cross_entropy" or losses[0].reduction != "mean" or not losses[0].targets:
        return None
    value, classes = losses[0].value, losses[0].distribution.classes if losses[0].distribution is not None else 0
    chance = math.log(max(classes, 2))
    if value is None or not value > 3 * chance + 1:
        return None
    return Claim(
        0.6,
        f"The first loss is {value:.3g}, and the chance level for {classes} classes is {chance:.3g}.",
        step=0,
        evidence={"first_loss": value, "chance": chance},
        severity="warning",
    )


def init_too_small(run: RecordedRun) -> Claim | None:
    """Activations vanish with depth before the first update."""
    chain = _chain(run)
    gains = _gains(run, chain)
    if len(chain) < 2 or not gains:
        return None
    entering = chain[0].in_std or 1.0
    # The doctor knows that a few rows can be learned; the part of the input that reaches the last layer shows it too.
    lost = run.facts.preflight is not None and _passes(gains) < 1e-4 and (chain[-1].in_std or 0.0) < 0.1 * entering
    if run.curve.before_bad.learned and not lost:
        return None
    inner = chain[:-1]
    if any(note.parameter is None and note.op not in RECURRENT for note in inner):
        return None  # computed weights, as in weight normalization, have another scale than their parts
    last = chain[-1].in_std or 0.0
    if not _starts_at_zero(run, chain[-1].parameter):  # heads do so on purpose, which says nothing about their inputs
        last = min(chain[-1].out_std or 0.0, last)  # a bias may hide that the activations vanish
    if any(run.parameters[n.parameter].first.rows_equal for n in inner if n.parameter is not None):
        return None
    notes = run.sampled.steps[0].calls.activations
    if any(note.units and (note.dead or 0) > 0.7 * note.units for note in notes):
        return None  # the units are dead, at any scale
    if any((note.saturated or 0) > 0.6 for note in notes):
        return None  # a closed gate passes nothing, at any scale
    # A norm in between gives a later layer the scale of the first one: the activations do not vanish.
    is_restored = any((note.in_std or 0.0) > 0.5 * entering for note in chain[1:])
    small = median(gains[:-1] or gains) < 3 * HEALTHY_GAIN[0] and last < 1e-2 * entering
    # Only the biases remain, which differ between units; the product of the gains is what passes of the input.
    small = small or (
        max(gains[:-1] or gains) < 1.5 * HEALTHY_GAIN[0] and last < 0.1 * entering and _passes(gains) < 1e-3
    )
    dies = last < 1e-4 * entering and median(gains) < 0.7
    if not ((small and not is_restored) or dies):
        return None
    names = [run.label(n.parameter) for n in chain if n.parameter is not None]
    return Claim(
        0.88,
        f"Before the first update activations shrink from a spread of {entering:.3g} to {last:.2g} over {len(chain)} "
        f"layers: weights have {median(gains):.2g} times the scale that preserves it (std x sqrt(fan-in)). The loss "
        f"went from {run.curve.start:.4g} to {run.curve.end:.4g}.",
        step=0,
        where=tuple(names[:4]),
        evidence={"gains": gains[:20], "spread_in": entering, "spread_last": last},
    )


def _starts_at_zero(run: RecordedRun, parameter: int | None) -> bool:
    return parameter is not None and run.parameters[parameter].first.norm == 0.0


def _passes(gains: list[float]) -> float:
    return math.prod(gains[:-1] or gains)


def init_symmetric(run: RecordedRun) -> Claim | None:
    """The units of a layer start equal and stay equal."""
    if run.facts.preflight is not None:
        return _alike_after_updates(run.facts.preflight)
    alike = [
        p
        for p in run.parameters.values()
        if p.first.rows_equal
        and p.last.rows_equal
        and p.requires_grad
        and p.optimizers
        and p.sampled >= 3
        and p.in_graph
        and p.shape[0] > 1
        and "Embedding" not in p.module_type
        and "Norm" not in p.module_type
    ]
    if not alike:
        return _constant_hidden_weights(run)
    names = [p.label for p in alike]
    p = alike[0]
    return Claim(
        0.95,
        f"All {p.shape[0]} rows of `{names[0]}` are equal at the start and still equal at the end: its units compute "
        "the same values, get the same gradient, and stay "
        f"equal{f' (also {chr(44).join(names[1:4])})' if len(names) > 1 else ''}.",
        step=0,
        where=tuple(names[:6]),
        evidence={"parameters": names[:20], "units": p.shape[0], "largest_weight": p.first.largest},
    )


def _constant_hidden_weights(run: RecordedRun) -> Claim | None:
    """The units of hidden layers start with equal weights other than 0, and only their biases make them differ.

    Heads and residual branches start with weights of 0 on purpose.
    """
    hidden = [run.parameters[note.parameter] for note in _chain(run)[:-1] if note.parameter is not None]
    alike = [p for p in hidden if p.first.rows_equal and p.first.norm and p.requires_grad and min(p.shape[:2]) > 1]
    alike = [p for p in alike if p.module_type.startswith(("Linear", "Conv")) and p.optimizers]
    if not alike:
        return None
    names = [p.label for p in alike]
    return Claim(
        0.85,
        f"All {alike[0].shape[0]} rows of `{names[0]}` are equal at the start (norm {alike[0].first.norm:.3g}): the "
        f"units of {count_of(len(alike), 'hidden layer')} differ only by their biases, and learn nearly the same. The "
        f"loss went from {run.curve.start:.3g} to {run.curve.end:.3g}.",
        step=0,
        where=tuple(names[:6]),
        evidence={"parameters": names[:20], "units": alike[0].shape[0], "largest_weight": alike[0].first.largest},
        severity="error" if run.failing else "warning",
    )


_ROUNDING = 1e-2
"""The share of an update by which rounding, or a bias, may separate rows with the same gradient."""


def _alike_after_updates(preflight: PreflightFacts) -> Claim | None:
    alike = [rows for rows in preflight.alike_rows if rows.apart <= _ROUNDING * rows.moved]
    if not alike:
        return None
    names = [rows.parameter for rows in alike]
    return Claim(
        0.95,
        f"All rows of {', '.join(names[:3])} are equal at the start, and still are after {alike[0].updates} updates: "
        "units that compute the same values get the same gradient, and stay equal.",
        step=0,
        where=tuple(names[:6]),
        evidence={"layers": len(alike), "parameters": names[:20]},
    )


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
    bad = share >= 0.95 or (share >= 0.6 and (not run.curve.learned or at_start > 0.5)) or not run.curve.learned
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
        last_layer = max((n.index for n in look.calls.layers), default=-1)
        for note in look.calls.activations:
            if note.saturated is not None and note.index < last_layer:
                groups.setdefault((note.module, note.site, note.op), []).append(note)
    for (module, site, op), found in groups.items():
        shares = present(n.saturated for n in found)
        from_start = median(shares[:3]) > 0.6
        well = run.curve.learned and run.curve.drop > 0.5
        if len(shares) >= 3 and median(shares) > 0.6 and (from_start or not well):
            return Claim(
                0.85,
                f"{median(shares):.0%} of the outputs of {op} at {site} are at its bounds, where its derivative is "
                f"near 0 ({shares[0]:.0%} already at step {found[0].step}).",
                step=found[0].step,
                where=(module, site),
                evidence={"saturated": median(shares), "at_start": shares[0], "sampled_steps": len(shares)},
                severity="warning" if well else "error",
                fixes=(
                    f"Give the layer before the {op} at {site} smaller initial weights and a bias near 0: its outputs "
                    "should begin between -3 and 3.",
                )
                if from_start
                else (),
            )
    return None


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
    first = median(sizes[: max(1, len(profile) // 4)])
    last = median(sizes[-max(1, len(profile) // 4) :])
    if last <= 0 or first / last > 1e-3 or _recovers(sizes, last):
        return None
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
    thrown = max(run.sampled.update_ratios()[:3], default=0.0) > 0.3  # the learning rate caused it
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
            if note.parameter is not None and note.input_requires_grad:
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
            f"A batch norm at {crash.site} was given 1 value per channel: {crash.message}",
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
        severity="warning",
    )


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
        poor = _badly(run) or run.curve.drop < 0.6 or extreme
        if last > 50 and last > 8 * max(first, 1e-6) and gradual and sharp < 0.5 * calm and poor:
            return Claim(
                0.85,
                f"The largest attention logit at {site} rises from {first:.3g} to {last:.3g} while the entropy of the "
                f"heads falls from {calm:.3g} to {sharp:.3g}.",
                step=notes[-1].step,
                where=(module, site),
                evidence={"first": first, "last": last, "entropy_first": calm, "entropy_last": sharp},
                severity="error" if _badly(run) else "warning",
            )
    return None


def _badly(run: RecordedRun) -> bool:
    """Whether the run failed: not finite, risen, spiky, or never clearly fallen."""
    return run.nonfinite.seen or run.curve.rose or run.curve.blew_up or not run.curve.learned or _spiky(run)


RULES = (
    Rule("init.too-large", "dynamics", init_too_large,
         explains=("lr.*", "model.saturated-units", "model.exploding-gradient", "model.dead-units",
                   "model.vanishing-gradient", "clip.saturated", "loss.undefined-op", "data.class-collapse")),
    Rule("init.too-small", "dynamics", init_too_small,
         explains=("lr.*", "model.vanishing-gradient", "data.labels-uninformative", "data.class-collapse",
                   "optim.epsilon")),
    Rule("init.symmetric", "wiring", init_symmetric,
         explains=("lr.*", "model.*", "data.labels-uninformative", "init.too-small", "data.class-collapse")),
    Rule("model.dead-units", "dynamics", dead_units,
         explains=("lr.too-low", "data.labels-uninformative", "data.class-collapse", "model.vanishing-gradient")),
    Rule("model.saturated-units", "dynamics", saturated_units,
         explains=("lr.too-low", "model.vanishing-gradient", "data.labels-uninformative", "data.class-collapse")),
    Rule("model.vanishing-gradient", "dynamics", vanishing_gradient,
         explains=("lr.too-low", "data.labels-uninformative", "data.class-collapse")),
    Rule("model.exploding-gradient", "dynamics", exploding_gradient, explains=("lr.*", "clip.saturated")),
    Rule("model.batchnorm-tiny-batch", "value", batchnorm_tiny_batch, explains=("data.bad-batch",)),
    Rule("model.attention-logit-growth", "dynamics", attention_logit_growth),
)  # fmt: skip
