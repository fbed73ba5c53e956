"""A run that learned nothing, although no rule finds the cause: it is not healthy.

The loss is compared with that of the best constant answer, which a model reaches without using its inputs: the entropy
of the labels, or the variance of the targets. If that is not known, a supervised loss that ends where it began counts.
These claims come last; `why_unjudged` is their weaker form, for losses whose level indicates little (such as those of
metric learning) and for runs whose loss was still falling.

Losses of policies, of adversaries, and of very short runs do not indicate what was learned: they are not judged. Those
of parameters that were trained or loaded before are judged if the first loss shows that the task is new to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, pstdev
from typing import TYPE_CHECKING, NamedTuple

from surefoot.core.wording import at_place
from surefoot.diagnose.by_hand import updates_by_hand
from surefoot.diagnose.curves import present
from surefoot.diagnose.data_summary import chance, reads_long_sequences, weights_moved
from surefoot.diagnose.initial_weights import began_new
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.sampled import level_of
from surefoot.watch.operation_names import BINARY_LOSSES, CLASS_LOSSES, DISTANCE_LOSSES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import LayerCall, LossCall, OptimizerFacts

FEWEST = 40
"""With fewer losses, a run is not judged."""
_AT_CONSTANT = 0.98
"""From this share of the best constant answer's loss on, only that answer was learned."""
_SPIKE = 10.0
"""A loss this many times as large as the best constant answer's counts as no larger."""
_SUPERVISED = CLASS_LOSSES | BINARY_LOSSES | DISTANCE_LOSSES


@dataclass(frozen=True)
class Course:
    """The course of a loss, by quarters of the run."""

    first: float
    """The mean of the first quarter."""
    second: float
    third: float
    last: float
    error: float
    """The standard error of the mean of a quarter, from the spread of the last one."""
    lowest: float
    """The lowest mean of a tenth of the run."""

    @property
    def is_falling(self) -> bool:
        """Whether the last quarter is clearly below the previous one."""
        return self.third - self.last > max(3 * self.error, 0.005 * abs(self.third))

    @property
    def creeps(self) -> bool:
        """Whether every quarter is below the previous one, however little, by more than noise."""
        falls = self.first > self.second > self.third
        return falls and self.third - self.last > 2 * self.error and self.first - self.last > 6 * self.error

    @property
    def fell(self) -> bool:
        """Whether it was ever clearly below its beginning."""
        margin = max(2 * self.error, 0.03 * abs(self.first))
        return self.first - self.last > margin or self.first - self.lowest > max(6 * self.error, 0.1 * abs(self.first))


def course_of(losses: list[float]) -> Course:
    """The quarters of at least `FEWEST` losses."""
    quarter, tenth = len(losses) // 4, max(4, len(losses) // 10)
    last = losses[-quarter:]
    return Course(
        first=mean(losses[:quarter]),
        second=mean(losses[quarter : 2 * quarter]),
        third=mean(losses[-2 * quarter : -quarter]),
        last=mean(last),
        error=pstdev(last) / math.sqrt(quarter),
        lowest=min(mean(losses[i : i + tenth]) for i in range(0, len(losses) - tenth + 1, tenth)),
    )


def _is_at_constant(run: RecordedRun, level: float) -> bool:
    """Whether the loss ended no lower than that of the best constant answer.

    A few losses far above it do not hide what was learned.
    """
    return course_of([min(loss, _SPIKE * level) for loss in run.curve.finite]).last >= _AT_CONSTANT * level


def _can_judge(run: RecordedRun) -> bool:
    """Whether the level of the loss indicates what was learned, and there are enough losses."""
    curve = run.curve
    return curve.count >= FEWEST and _means_something(run)


def _means_something(run: RecordedRun) -> bool:
    """Whether the level of the loss indicates what was learned, for a run of any length."""
    curve = run.curve
    if run.facts.preflight is not None or run.adversarial or not curve.finite or not math.isfinite(curve.values[-1]):
        return False
    if curve.blind or curve.continued or curve.around_zero or min(curve.finite) < 0:
        return False
    return updates_by_hand(run) if run.main is None else curve.begins_at_chance or not _was_loaded(run, run.main)


def _was_loaded(run: RecordedRun, optimizer: OptimizerFacts) -> bool:
    """Whether most of what an optimizer trains had been trained before."""
    mine = [p for p in run.parameters.values() if optimizer.number in p.optimizers and p.requires_grad]
    if not began_new(run.facts, mine):
        return True
    sizes = {p.id: math.prod(p.shape) for p in mine}
    before = [p for p in mine if p.loaded or any(number < optimizer.number for number in p.trained_by)]
    loaded = sum(sizes[p.id] for p in before)
    return loaded > 0.5 * sum(sizes.values())


def constant_answer(run: RecordedRun) -> float | None:
    """The loss of the best constant answer, if the run minimises one plain loss without weights or smoothing."""
    if any(call.weighted or call.smoothing for call in run.main_sampled.training_losses()):
        return None
    found = chance(run)
    level = found.level if found is not None else run.main_sampled.chance
    return level if level is not None and level > 1e-6 else None


def not_learning(run: RecordedRun) -> Claim | None:
    """The loss ends no lower than that of the best constant answer, or where it began; nothing else explains it."""
    if not _can_judge(run):
        return None
    course, level = course_of(run.curve.finite), constant_answer(run)
    if (course.is_falling or _only_began(run, course)) and not run.curve.rose:
        return None
    if level is not None:
        if not _is_at_constant(run, level) or _may_begin_late(run, course, level):
            return None
        if run.main is not None and course.last < level and _was_loaded(run, run.main):
            return None  # weights that know something may learn the little that there is
        place = (
            "at the loss of the best constant answer" if course.last < 1.1 * level else "above the best constant answer"
        )
        words = (
            f"The loss ended {place}: {course.last:.4g}, and the loss of the best constant answer is {level:.4g}. It "
            f"began at {run.curve.start:.4g}, {run.curve.count:,} steps earlier"
        )
        return _claim(run, words, course, level, 0.8)
    if (course.fell or run.curve.fell_through_noise) and not run.curve.rose:
        return None  # a few spikes raise a mean, not a median
    functions = {root.sign.function for root in run.sampled.backward_calls if root.sign is not None}
    if not functions or not functions <= _SUPERVISED:
        return None
    words = (
        f"The loss did not fall: its mean was {course.first:.4g} over the first quarter of {run.curve.count:,} steps "
        f"and {course.last:.4g} over the last"
    )
    return _claim(run, words, course, None, 0.6)


def _may_begin_late(run: RecordedRun, course: Course, level: float) -> bool:
    """Whether a recurrent network over long sequences is at the best constant answer, as such networks are for long."""
    return reads_long_sequences(run) and course.last < 1.1 * level


_FIRST_STEPS = 0.5
"""While all steps together have changed the weights by less than this share of their norm, a run has only begun."""


def _only_began(run: RecordedRun, course: Course) -> bool:
    """Whether the weights are close to where they began, and the run is short or its loss falls slowly but steadily."""
    return 0.0 < weights_moved(run) < _FIRST_STEPS and (course.creeps or run.curve.count < 2 * FEWEST)


_FEWEST_CALLS = 8
"""Sampled calls from which on a term of the loss is judged by itself."""
_SMALLEST_LEVEL = 0.05
"""A term whose best constant answer is lower, like one with a single class, is not judged by itself."""


class _StuckTerm(NamedTuple):
    """One of several loss functions that ends no lower than its best constant answer."""

    calls: list[LossCall]
    last: float
    """The mean of the last third of the sampled calls."""
    level: float

    @property
    def words(self) -> str:
        return (
            f"The term `{self.calls[0].op}` of the loss{at_place(self.calls[0].site)} is at {self.last:.4g} over the "
            f"last sampled steps, and the loss of its best constant answer is {self.level:.4g}"
        )


def _stuck_term(run: RecordedRun) -> _StuckTerm | None:
    """The first term of the loss that learned nothing; `None` if there is none, or if the loss is a single term."""
    if not _can_judge(run) or run.steps < 100 or any(root.custom for root in run.main_sampled.backward_calls):
        return None  # a function of the script's own may reverse gradients
    if run.facts.policy_entropies:
        return None  # returns that are mostly noise: a value function says little beyond their mean for long
    terms: dict[tuple[str, str], list[LossCall]] = {}
    for call in run.main_sampled.training_losses():
        terms.setdefault((call.op, call.site), []).append(call)
    added = _added_sites(run)
    # Not those of an evaluation with gradients, or the loss before the adaptation, in meta-learning.
    mine = [calls for calls in terms.values() if calls[0].site in added]
    for calls in mine if len(mine) > 1 else ():
        late = present(call.value for call in calls[-max(4, len(calls) // 3) :])
        level = level_of(calls)
        if level is None or level < _SMALLEST_LEVEL or len(calls) < _FEWEST_CALLS or len(late) < 4:
            continue
        if mean(late) >= _AT_CONSTANT * level:
            return _StuckTerm(calls, mean(late), level)
    return None


def _added_sites(run: RecordedRun) -> set[str]:
    """The lines of the loss functions that the loss is a sum of: its measured terms, or scalars right before it."""
    roots = run.main_sampled.backward_calls
    measured = {term.loss_site for root in roots for term in root.terms or [] if term.loss_site}
    return measured or {call.site for root in roots for call in root.made_from or [] if call.shape == []}


def term_not_learning(run: RecordedRun) -> Claim | None:
    """One of several loss functions ends no lower than its best constant answer, and the sum of them falls no more.

    While the sum still falls, the term may be learned later, as the second task of a language model is.
    """
    term = _stuck_term(run)
    if term is None or course_of(run.curve.finite).is_falling:
        return None
    return Claim(
        0.6,
        f"{term.words}: it learned nothing. The whole loss went from {run.curve.start:.4g} to {run.curve.end:.4g}, and "
        "no longer falls.",
        step=term.calls[0].step,
        where=(term.calls[0].site,),
        evidence={"last": term.last, "best_constant_answer": term.level, "calls": len(term.calls)},
        severity="warning",
        fixes=("Train on this term alone; if it still does not fall, check that its targets belong to its rows.",),
    )


def _claim(run: RecordedRun, words: str, course: Course, level: float | None, confidence: float) -> Claim:
    moved = run.update_ratios()
    middle = sorted(moved)[len(moved) // 2] if moved else None
    norms = sorted(run.grad_norms)
    gradient = norms[len(norms) // 2] if norms else None
    silent = [p.label for p in run.parameters.values() if p.optimizers and p.sampled and p.with_grad == p.zero_grad]
    seen = [f"a step changes the weights by {middle:.1e} of their norm"] if middle is not None else []
    seen += [f"the gradient norm is {gradient:.2g}"] if gradient is not None else []
    seen += [f"the gradient of {', '.join(silent[:3])} is 0"] if silent else []
    return Claim(
        confidence,
        f"{words}; {', '.join(seen) or 'no update was seen'}. No single cause was found.",
        step=run.curve.steps[-1],
        where=(run.main.site if run.main is not None else "", *silent[:3]),
        evidence={
            "first": run.curve.start,
            "last": course.last,
            "best_constant_answer": level,
            "update_to_weight": middle,
            "grad_norm": gradient,
            "without_gradient": silent[:20],
        },
    )


def started_over(run: RecordedRun) -> Claim | None:
    """A new model for every pass over the data: the progress of the last one is lost.

    In cross-validation and in searches each model is trained on its rows many times; here, once.
    """
    made = [held for held in run.optimizers if held.series.loss]
    lives = [held for held in made if held.site and held.site == made[0].site and held.type == made[0].type]
    if len(lives) < 3 or len(lives) != len(made) or run.adversarial or run.nonfinite.seen:
        return None
    lengths = {held.steps for held in lives[:-1]}
    if len(lengths) != 1 or min(lengths) < 3 or any(_was_loaded(run, held) for held in lives):
        return None
    curves = [run.curve_of(held) for held in lives]
    if any(not curve.finite or curve.blind for curve in curves) or _passes(run, len(lives)) != 1:
        return None
    starts, ends = [curve.finite[0] for curve in curves], [curve.finite[-1] for curve in curves]
    if mean(starts[1:]) < 0.9 * starts[0]:
        return None
    return Claim(
        0.7,
        f"A new model and a new {lives[0].type} were created {len(lives)} times{at_place(lives[0].site)}, each for one "
        f"pass of {lives[0].steps} steps over the same rows: every pass begins at a loss of about {mean(starts):.3g} "
        f"again, although the one before ended at {mean(ends):.3g}.",
        step=lives[1].created_at_step,
        where=(lives[0].site,),
        evidence={"models": len(lives), "steps_each": lives[0].steps, "starts": starts[:10], "ends": ends[:10]},
        severity="warning",
        fixes=("Create the model and the optimizer once, before the loop over epochs.",),
    )


def runs_over_the_batch(run: RecordedRun) -> Claim | None:
    """A recurrent layer uses the rows of the batch as time steps, and the steps as rows."""
    found = []
    for look in run.sampled.steps:
        losses = [loss for loss in look.calls.losses if loss.trained_on]
        layers = [layer for layer in look.calls.layers if layer.time_steps and layer.trained_on]
        rows = losses[0].target.shape[0] if len(losses) == 1 and losses[0].target.shape else 0
        if not rows or math.prod(losses[0].target.shape) != rows:
            continue  # several targets per row
        calls = [call for call in look.model_calls if call.trained_on and call.inputs]
        given = calls[0].inputs[0].shape[:1] == [rows] if len(calls) == 1 else False
        found += [
            layer for layer in layers if given and layer.time_steps == rows and 1 < (layer.sequences or 0) != rows
        ]
    if len({layer.step for layer in found}) < 3:
        return None
    layer = found[0]
    return Claim(
        0.9,
        f"`{layer.op}` in `{layer.module}`{at_place(layer.site)} runs over the {layer.time_steps} rows of the batch as "
        f"if they were time steps, and treats the {layer.sequences} steps as rows: every output depends on rows before "
        f"it in the batch. The loss is at {run.curve.end:.3g}.",
        step=layer.step,
        where=(layer.site, layer.module),
        evidence={"time_steps": layer.time_steps, "sequences": layer.sequences, "rows": layer.time_steps},
        fixes=("Create the layer with `batch_first=True`.",),
    )


def uses_first_step_only(run: RecordedRun) -> Claim | None:
    """The recurrent weights of a layer never get a gradient: only outputs of its first time step reach the loss."""
    layers = [call for call in run.sampled.calls.layers if (call.time_steps or 0) > 1 and call.trained_on]
    inner = [p for p in run.parameters.values() if ".weight_hh_l" in f".{p.label}" and p.optimizers and p.sampled >= 3]
    silent = [p for p in inner if p.with_grad == p.zero_grad == p.sampled]
    if not layers or not silent or len(silent) != len(inner) or run.nonfinite.seen:
        return None
    fed = [p for p in run.parameters.values() if ".weight_ih_l" in f".{p.label}" and p.with_grad > p.zero_grad]
    if not fed:
        return None  # the whole layer is cut off: another cause
    call, name = layers[0], silent[0].label
    return Claim(
        0.9,
        f"`{call.op}` in `{call.module}`{at_place(call.site)} runs over {call.time_steps} time steps, but the gradient "
        f"of `{name}` is exactly 0 in all {silent[0].sampled} sampled steps: only the output of the first time step "
        f"reaches the loss, which is at {run.curve.end:.3g}.",
        step=call.step,
        where=(call.site, name),
        evidence={"time_steps": call.time_steps, "without_gradient": [p.label for p in silent]},
        severity="error" if run.failing else "warning",
        fixes=("Use the output of the last time step, `output[:, -1]` with `batch_first=True`, or the final state.",),
    )


def without_activation(run: RecordedRun) -> Claim | None:
    """All layers of a model follow directly on one another: together they are one linear function.

    The input of a layer has exactly the mean and the spread of the output before it. A model that does far better than
    a constant answer needs no activation.
    """
    calls, level = run.sampled.calls, constant_answer(run)
    if not _can_judge(run) or calls.activations or calls.normalizations or calls.softmaxes or level is None:
        return None
    first = run.sampled.steps[0].calls.layers if run.sampled.steps else []
    chain = [layer for layer in first if layer.trained_on and layer.parameter is not None]
    if len(chain) < 2 or any(not _follows(*pair) for pair in pairwise(chain)) or run.curve.end < 0.5 * level:
        return None
    shapes = [run.parameters[layer.parameter].shape for layer in chain if layer.parameter is not None]
    if any(shape[0] < min(shapes[0][-1], shapes[-1][0]) for shape in shapes[:-1]):
        return None  # a narrow layer in between makes a product of low rank on purpose, as word embeddings are
    return Claim(
        0.85,
        f"Nothing lies between the {len(chain)} layers from `{chain[0].module}`{at_place(chain[0].site)} to "
        f"`{chain[-1].module}`{at_place(chain[-1].site)}: each is given exactly what the one before returns, so "
        f"together they are one linear function. The loss is at {run.curve.end:.4g}, and the loss of the best constant "
        f"answer is {level:.4g}.",
        step=0,
        where=(chain[0].site, chain[-1].site, chain[0].module, chain[-1].module),
        evidence={"layers": len(chain), "last": run.curve.end, "best_constant_answer": level},
        fixes=("Put an activation such as `nn.ReLU()` between the layers.",),
    )


def _follows(before: LayerCall, after: LayerCall) -> bool:
    """Whether a layer is given what another one returns."""
    pairs = ((before.out_std, after.in_std), (before.out_mean, after.in_mean))
    return all(a is not None and b is not None and math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) for a, b in pairs)


_MOST_DROPPED = 0.75
"""A dropout above this is rarely meant: some frameworks count the share that is kept."""


def drops_nearly_everything(run: RecordedRun) -> Claim | None:
    """A dropout that leaves a small part of its input, in a run whose loss hardly falls."""
    strong = [call for call in run.sampled.calls.dropouts if _MOST_DROPPED < call.p <= 1.0]
    if run.adversarial or run.curve.blind or run.curve.learned or run.steps < 30 or run.nonfinite.seen:
        return None
    if len({call.step for call in strong}) < 3:
        return None
    call = max(strong, key=lambda call: call.p)
    return Claim(
        0.8,
        f"`{call.op}` in `{call.module}`{at_place(call.site)} sets {call.p:.0%} of its input to 0 in training, and the "
        f"loss went from {run.curve.start:.4g} to {run.curve.end:.4g} in {run.curve.count:,} steps.",
        step=call.step,
        where=(call.site, call.module),
        evidence={"p": call.p, "first": run.curve.start, "last": run.curve.end},
        fixes=(f"Set `p` of this dropout to {max(0.1, min(0.5, 1 - call.p)):.1g}: it is the share that is dropped.",),
    )


def _passes(run: RecordedRun, lives: int) -> float | None:
    """How often each model was trained on each row, rounded; `None` if not every row is known."""
    held = list(run.facts.step_data.rows.values())
    if len(held) != 1 or not held[0].whole or not held[0].prints:
        return None
    sizes = [note.size for note in run.facts.step_data.batches]
    if len(sizes) < run.facts.backwards or any(size is None for size in sizes):
        return None
    return round(sum(size or 0 for size in sizes) / len(held[0].prints) / lives)


_METRIC = {"triplet_margin_loss", "triplet_margin_with_distance_loss", "cosine_embedding_loss", "margin_ranking_loss"}
"""Losses that compare outputs of the model: their level indicates little, but most of them fall."""


def why_unjudged(run: RecordedRun) -> str:
    """Why a run without a finding cannot be called healthy because of its loss; empty if it can."""
    functions = {loss.op for loss in run.sampled.training_losses()}
    compares = bool(functions) and functions <= _METRIC and run.curve.count >= FEWEST and not run.adversarial
    if not _can_judge(run) and not compares:
        return _too_short(run) if _means_something(run) else ""
    course, level = course_of(run.curve.finite), constant_answer(run)
    at_constant = level is not None and _is_at_constant(run, level)
    if level is not None and at_constant and _may_begin_late(run, course, level):
        return (
            f"The loss is at that of the best constant answer ({course.last:.4g}; {level:.4g}). A recurrent network "
            "over long sequences can begin to learn late: train for more steps, or on shorter sequences."
        )
    if level is not None and at_constant:
        return (
            f"The loss was still falling at the end, at {course.last:.4g}, and the loss of the best constant answer is "
            f"{level:.4g}: the run is too short to judge whether it learns."
        )
    if level is not None and course.last + 2 * course.error >= _AT_CONSTANT * level and not course.fell:
        return (
            f"The loss is at {course.last:.4g} ± {course.error:.2g}, which cannot be distinguished from that of the "
            f"best constant answer ({level:.4g}), and it did not clearly fall: train for more steps, or with larger "
            "batches."
        )
    if (term := _stuck_term(run)) is not None:
        return f"{term.words}. The whole loss was still falling: the run is too short to judge whether the term learns."
    if level is None and (not (course.fell or run.curve.fell_through_noise) or run.curve.rose):
        if _only_began(run, course) and not run.curve.rose:
            return (
                f"The loss has hardly moved (its mean was {course.first:.4g} over the first quarter of "
                f"{run.curve.count:,} steps and {course.last:.4g} over the last), and neither have the weights (all "
                f"steps together by at most {100 * weights_moved(run):.2g} % of their norm): the steps are too "
                "few or too small to judge whether it learns."
            )
        return (
            f"The loss did not fall (its mean was {course.first:.4g} over the first quarter of {run.curve.count:,} "
            f"steps and {course.last:.4g} over the last), and for this loss it is not known whether it should fall."
        )
    return ""


def _too_short(run: RecordedRun) -> str:
    """Why a run with too few losses for a curve is not called healthy: it is not below the best constant answer."""
    level, end = constant_answer(run), run.curve.end
    if level is None or end < _AT_CONSTANT * level:
        return ""
    return (
        f"The run is too short to judge whether it learns: after {run.curve.count} losses it is at {end:.4g}, and the "
        f"loss of the best constant answer is {level:.4g}."
    )


RULES: tuple[Rule, ...] = (
    Rule("model.mixes-rows", "wiring", runs_over_the_batch,
         explains=("data.labels-uninformative", "lr.*", "model.*", "data.class-collapse", "optim.not-learning")),
    Rule("optim.not-learning", "wiring", uses_first_step_only,
         explains=("data.labels-uninformative", "lr.*", "model.*", "data.class-collapse", "optim.detached-graph")),
    Rule("optim.not-learning", "wiring", without_activation, explains=("lr.*", "data.labels-uninformative", "model.*")),
    Rule("optim.not-learning", "value", drops_nearly_everything,
         explains=("lr.*", "model.*", "data.class-collapse", "data.labels-uninformative", "init.*",
                   "optim.weight-decay", "data.unscaled-input")),  # without a signal there is no gradient against them
    Rule("optim.not-learning", "dynamics", started_over, explains=("resume.*", "optim.stale-state", "lr.too-low")),
)  # fmt: skip
"""`not_learning` itself runs last: see `last_resort`."""
