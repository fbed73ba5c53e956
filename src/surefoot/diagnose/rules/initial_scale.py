"""Initial weights: too large, too small, or equal for all units of a layer."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import count_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.scale import did_badly, saturated_units
from surefoot.record.facts import WeightScale
from surefoot.watch.operation_names import RECURRENT

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LayerCall, ParameterFacts, PreflightFacts

HEALTHY_GAIN = (0.1, 3.0)
"""std(weight) x sqrt(fan-in): 1.4 after He, 1 after Xavier, 0.58 by torch's default."""
_TINY = 0.05
"""If all weights have a smaller gain than this, the run starts far from where it can learn."""
_MUCH = 0.3
"""The share of what there was to learn from which on much is left."""
_UNUSUAL = 2.5
"""If half of the layers have a larger gain than this, it is mentioned even in a run that did well."""


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
    """The gain of each layer's weight when it was first recorded. Weights of one sign add up, so their mean counts."""
    found = []
    for note in chain:
        first = run.parameters[note.parameter].first if note.parameter is not None else WeightScale()
        fan_in = note.fan_in or first.fan_in
        if first.std is not None and fan_in:
            count = math.prod(run.parameters[note.parameter].shape) if note.parameter is not None else 0
            size = (first.norm or 0.0) / math.sqrt(count) if count else 0.0
            found.append(max(first.std, size) * math.sqrt(fan_in))
    return found


def init_too_large(run: RecordedRun) -> Claim | None:
    """Activations grow with depth before the first update, or weights are not even finite."""
    if (claim := _never_initialised(run)) is not None:
        return claim
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
    harms = (large or grows) and (did_badly(run) or (extreme and not _ended_well(run)))
    unusual = worst > _UNUSUAL or (worst > 1.6 and run.curve.start > 10 * (run.curve.chance or math.inf))
    delays = unusual and not run.nonfinite.seen and (run.curve.starts_far_up or _saturates(run))
    if not harms and not delays and not (large and median(gains) > _UNUSUAL):
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
        severity="error" if harms else "warning" if delays else "info",
    )


def _saturates(run: RecordedRun) -> bool:
    """Whether units are at their bounds from the first step on, and that does harm: large weights put them there."""
    claim = saturated_units(run)
    return claim is not None and claim.severity != "info" and claim.evidence["at_start"] > 0.6


def _never_initialised(run: RecordedRun) -> Claim | None:
    """Parameters were not finite when the first loss was computed, before any update."""
    bad = run.nonfinite.loss
    if bad is None or bad.kind != "parameter" or bad.step != 0:
        return None
    names, count = bad.parameters or [], bad.count or 1
    more = f" and {count_of(count - len(names[:3]), 'more parameter')}" if count > len(names[:3]) else ""
    return Claim(
        0.95,
        f"{', '.join(names[:3])}{more} {'hold' if count > 1 else 'holds'} values that are not finite before the first "
        "step: memory that was never initialised, or a state that was loaded like this.",
        step=0,
        where=tuple(names[:4]),
        evidence={"parameters": names, "count": count},
        fixes=(
            "Initialise every parameter: after `to_empty()` or `torch.empty()`, call `reset_parameters()` of every "
            "submodule, not only that of the model; check a loaded state with `torch.isfinite`.",
        ),
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
    """Activations vanish with depth before the first update, or all weights are tiny and much is left to learn."""
    if (claim := _tiny_weights(run)) is not None:
        return claim
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
    dies = last < 1e-4 * entering and median(gains) < 0.7 and not _rows_are_alike(gains, last / entering)
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


def _tiny_weights(run: RecordedRun) -> Claim | None:
    """All matrices start far below any usual scale. Biases may hide that activations vanish."""
    mine = [p for p in run.parameters.values() if p.optimizers and p.first.norm and "Embedding" not in p.module_type]
    gains = {p.label: (p.first.norm or 0.0) / math.sqrt(p.shape[0]) for p in mine if len(p.shape) > 1}
    curve = run.curve
    if len(gains) < 2 or max(gains.values()) > _TINY or run.facts.preflight is not None:
        return None
    if curve.blind or curve.continued or curve.first_bad is not None or curve.count < 20 or curve.left < _MUCH:
        return None
    return Claim(
        0.88,
        f"All {len(gains)} weight matrices start with at most {max(gains.values()):.2g} times the scale that "
        f"preserves activations (std x sqrt(fan-in); 1 to 1.4 is right). The loss went from {curve.start:.4g} to "
        f"{curve.end:.4g}.",
        step=0,
        where=tuple(gains)[:4],
        evidence={"gains": [*gains.values()][:20], "loss_left": curve.left},
        severity="warning" if curve.learned else "error",
    )


def _starts_at_zero(run: RecordedRun, parameter: int | None) -> bool:
    return parameter is not None and run.parameters[parameter].first.norm == 0.0


def _passes(gains: list[float]) -> float:
    return math.prod(gains[:-1] or gains)


def _rows_are_alike(gains: list[float], ratio: float) -> bool:
    """Whether less of the spread remains than weights of this scale leave, even with a sigmoid after each layer.

    The spread of the inputs was then one between features: all rows were the same, as at the start of an episode.
    """
    return ratio < 1e-2 * math.prod(gains) * 0.25 ** len(gains)


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
        and not _is_head_without_input(run, p)
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


def _is_head_without_input(run: RecordedRun, parameter: ParameterFacts) -> bool:
    """Whether a last layer starts at 0, as heads may, and never gets a gradient: then all its inputs are 0.

    Its gradient is the product of its inputs and the errors, whatever its own weights are.
    """
    chain = _chain(run)
    is_last = bool(chain) and chain[-1].parameter == parameter.id
    return is_last and parameter.first.norm == 0.0 and parameter.with_grad == parameter.zero_grad


_WITH_UNITS = ("Linear", "Conv", "LSTM", "GRU", "RNN", "MultiheadAttention", "Bilinear")
"""Modules whose units need different weights."""


def _stay_alike(run: RecordedRun, parameters: list[ParameterFacts]) -> bool:
    """Whether the rows of a matrix still differ by less than the size of an entry; of usual ones, by three times it."""
    known = [p for p in parameters if p.last.row_range is not None and p.last.norm]
    if not known:
        return not _ended_well(run)
    return any((p.last.row_range or 0.0) * math.sqrt(p.shape[0]) < (p.last.norm or 0.0) for p in known)


def _constant_hidden_weights(run: RecordedRun) -> Claim | None:
    """The units of hidden layers start with equal weights other than 0, and only biases or dropout make them differ.

    Heads and residual branches start with weights of 0 on purpose.
    """
    chain = _chain(run)
    hidden = [p for p in run.parameters.values() if p.module_type.startswith(_WITH_UNITS) and p.optimizers]
    alike = [p for p in hidden if p.first.rows_equal and p.first.norm and p.requires_grad and min(p.shape[:2]) > 1]
    alike = [p for p in alike if p.in_graph and p.id != chain[-1].parameter] if chain else []
    if not alike:
        return None
    names = [p.label for p in alike]
    return Claim(
        0.85,
        f"All {alike[0].shape[0]} rows of `{names[0]}` are equal at the start (norm {alike[0].first.norm:.3g}): the "
        f"units of {count_of(len(alike), 'hidden layer')} differ only by biases or dropout, and learn nearly the same. "
        f"The loss went from {run.curve.start:.3g} to {run.curve.end:.3g}.",
        step=0,
        where=tuple(names[:6]),
        evidence={"parameters": names[:20], "units": alike[0].shape[0], "largest_weight": alike[0].first.largest},
        severity="error" if run.failing else "warning" if _stay_alike(run, alike) else "info",
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


RULES: tuple[Rule, ...] = (
    Rule("init.too-large", "dynamics", init_too_large,
         explains=("lr.*", "model.saturated-units", "model.exploding-gradient", "model.dead-units",
                   "model.vanishing-gradient", "clip.saturated", "loss.undefined-op", "data.class-collapse")),
    Rule("init.too-small", "dynamics", init_too_small,
         explains=("lr.*", "model.vanishing-gradient", "data.labels-uninformative", "data.class-collapse",
                   "optim.epsilon")),
    Rule("init.symmetric", "wiring", init_symmetric,
         explains=("lr.*", "model.*", "data.labels-uninformative", "init.too-small", "data.class-collapse")),
)  # fmt: skip
