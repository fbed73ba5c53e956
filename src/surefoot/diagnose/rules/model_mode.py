"""The mode of a model: training steps in eval mode, and evaluations in training mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.core.wording import at_place, count_of
from surefoot.diagnose.by_hand import trained_models
from surefoot.diagnose.initial_weights import began_new, look_trained, size_of
from surefoot.diagnose.rule import Claim, Rule

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import ModelCall, SampledStep


def eval_mode_training(run: RecordedRun) -> Claim | None:
    """Steps are taken while dropout and batch norm are in eval mode."""
    groups: dict[str, list[ModelCall]] = {}
    for note in run.sampled.trained_model_calls:
        groups.setdefault(note.model, []).append(note)
    groups = {model: [n for n in notes if n.reached] or notes for model, notes in groups.items()}
    trained = trained_models(run)
    for model, notes in groups.items():
        if model not in trained:
            continue
        if _parts_never_on(run, model, notes):
            return _parts_in_eval_mode(model, notes)
        if (functional := _functional_dropout_off(run, model, notes)) is not None:
            return functional
        off = [n for n in notes if not n.training and _switched_off(n)]
        late = notes[-max(2, len(notes) // 4) :]
        often = len(off) >= max(2, 0.2 * len(notes)) and all(not n.training and _switched_off(n) for n in late)
        if often or _left_in_eval_mode(run, notes, off):
            first = off[0]
            parts = _parts_in_words(first.dropouts, first.batchnorms)
            return Claim(
                0.95,
                f"`{model}` is in eval mode (training=False) on steps that update its weights, from step "
                f"{first.step} on: {' and '.join(parts)} inactive in {len(off)} of {len(notes)} "
                "observed passes.",
                step=first.step,
                where=(model, first.site),
                evidence={"passes": len(notes), "in_eval_mode": len(off), "dropouts": first.dropouts,
                          "batchnorms": first.batchnorms},
                fixes=("Call `model.train()` before the training steps, and again after each evaluation.",),
            )  # fmt: skip
    return None


def _functional_dropout_off(run: RecordedRun, model: str, notes: list[ModelCall]) -> Claim | None:
    """The same for `F.dropout(x, training=self.training)`: it was active while the model was in training mode."""
    reached = [n for n in notes if n.reached]
    off = [n for n in reached if not n.training]
    active = {c.step: c for c in run.sampled.calls.dropouts if c.module == model or c.module.startswith(f"{model}.")}
    on = [active[n.step] for n in reached if n.training and n.step in active]
    if not on or len(off) < max(2, 0.2 * len(reached)) or reached[-len(off) :] != off:
        return None
    if any(n.step in active or n.dropouts or n.batchnorms for n in off):
        return None
    return Claim(
        0.95,
        f"`{model}` is in eval mode (training=False) on steps that update its weights, from step {off[0].step} on: "
        f"`{on[0].op}`{at_place(on[0].site)} was active at step {on[0].step}, and is inactive in {len(off)} of "
        f"{len(reached)} observed passes.",
        step=off[0].step,
        where=(model, on[0].site, off[0].site),
        evidence={"passes": len(reached), "in_eval_mode": len(off), "p": on[0].p},
        fixes=("Call `model.train()` before the training steps, and again after each evaluation.",),
    )


def _left_in_eval_mode(run: RecordedRun, notes: list[ModelCall], off: list[ModelCall]) -> bool:
    """Whether an evaluation in eval mode came between the last pass in training mode and all later ones.

    Then one sampled step is enough, if its gradients went through the pass: in a long run few steps are sampled.
    """
    if not off or notes[-len(off) :] != off or not all(n.reached for n in off) or len(off) == len(notes):
        return False
    last_on, first_off = notes[-len(off) - 1].step, off[0].step
    between = [
        call for call in run.facts.evaluations if last_on < call.step <= first_off and call.model == off[0].model
    ]
    return any(not call.training and not call.grad_mode for call in between)


def _parts_never_on(run: RecordedRun, model: str, notes: list[ModelCall]) -> bool:
    """Whether a model that is in training mode has all its dropouts and batch norms in eval mode, from the first step.

    Batch norms of a model that was loaded are often kept in eval mode on purpose, as is a frozen part. In a new model
    that is trained as a whole, they never see the statistics of the data.
    """
    mine = [p for p in run.parameters.values() if p.model == model and p.registered]
    trained = [p for p in mine if p.changed]
    if size_of(trained) < 0.9 * size_of(mine) or any(p.loaded or p.rewritten for p in mine) or look_trained(mine):
        return False
    return len(notes) >= 4 and all(n.training and _switched_off(n) for n in notes) and began_new(run.facts, mine)


def _parts_in_eval_mode(model: str, notes: list[ModelCall]) -> Claim:
    first = notes[0]
    parts = _parts_in_words(first.dropouts, first.batchnorms)
    return Claim(
        0.9,
        f"`{model}` is in training mode, but {' and '.join(parts)} inside it {'are' if len(parts) > 1 else 'is'} in "
        f"eval mode (training=False) in all {len(notes)} observed passes, from step {first.step} on.",
        step=first.step,
        where=(model, first.site),
        evidence={"passes": len(notes), "dropouts": first.dropouts, "batchnorms": first.batchnorms},
        fixes=("Do not call `eval()` on a part of the model before the training steps, or call `train()` after it.",),
    )


def _parts_in_words(dropouts: int, batchnorms: int) -> list[str]:
    """How many dropouts and batch norms, each only if there are any."""
    return [count_of(dropouts, "dropout")] * bool(dropouts) + [count_of(batchnorms, "batch norm")] * bool(batchnorms)


def _switched_off(note: ModelCall) -> bool:
    norms = note.batchnorms - note.batchnorms_frozen
    return bool((note.dropouts + norms) > 0 and note.dropouts_on == 0 and note.batchnorms_on == 0)


def train_mode_eval(run: RecordedRun) -> Claim | None:
    """Evaluation passes with dropout, or batch statistics, in training mode."""
    if (run.adversarial and not _side_by_side(run)) or run.facts.policy_entropies:
        return None  # samples and rollouts are drawn without gradients, in training mode, on purpose
    trained, blocks = trained_models(run), evaluating_blocks(run)
    notes = [n for n in run.facts.evaluations if n.model in trained and not n.grad_mode and n.block in blocks]
    hot = [n for n in notes if n.training and (n.dropouts_on or n.batchnorms_on)]
    if not hot or len(hot) < 0.5 * len(notes) or repeats_rows(hot):
        return _evaluated_with_gradients(run, trained) or _evaluated_at_each_step(run, trained)
    first = hot[0]
    parts = _parts_in_words(first.dropouts_on, first.batchnorms_on)
    return Claim(
        0.9,
        f"`{first.model}` was evaluated without gradients{at_place(first.site)} but in training mode: "
        f"{' and '.join(parts)} active in {len(hot)} of {len(notes)} such passes, so the results are noisy"
        f"{' and the running statistics take in evaluation data' if first.batchnorms_on else ''}.",
        step=first.step,
        where=(first.model, first.site),
        evidence={"passes": len(notes), "in_training_mode": len(hot), "dropouts": first.dropouts_on,
                  "batchnorms": first.batchnorms_on},
        severity="warning",
        fixes=("Call `model.eval()` before evaluating and `model.train()` after.",),
    )  # fmt: skip


def _side_by_side(run: RecordedRun) -> bool:
    """Whether no backward reaches parameters of two optimizers: the models are trained separately."""
    reached = [
        {n for p in root.parameters for n in run.parameters[p].optimizers} for root in run.sampled.backward_calls
    ]
    return bool(reached) and all(len(owners) == 1 for owners in reached)


def evaluating_blocks(run: RecordedRun) -> set[int | None]:
    """The blocks without gradients that evaluate, by number.

    A block at every step may be part of the training: it makes samples or targets, or selects rows. It is an evaluation
    if it computes a loss with a reduction.
    """
    if run.facts.evaluation_blocks < 0.5 * max(1, run.steps):
        return {call.block for call in run.facts.evaluations}
    judged = {b.block for b in run.facts.evaluation_calls if any(loss.reduction != "none" for loss in b.losses)}
    return set(judged) if len(judged) >= 3 else set()


def _evaluated_with_gradients(run: RecordedRun, trained: set[str]) -> Claim | None:
    """Forwards in training mode, between some of the steps, whose outputs no `backward` ever uses.

    What a script does at every step, such as labels that the model makes for itself, is a part of its training.
    """
    windows = [look for look in run.sampled.steps if look.step > 0 and look.backward_calls]
    hot: list[list[ModelCall]] = []
    for look in windows:
        calls = [n for n in look.model_calls if n.model in trained and n.trained_on and n.training]
        if any(n.reached for n in calls):
            hot.append([n for n in calls if n.reached is False and (n.dropouts_on or n.batchnorms_on)])
    passes = [calls for calls in hot if calls]
    if not passes or len(passes) > 0.5 * len(hot) or run.blind or any(repeats_rows(calls) for calls in passes):
        return None
    if sum(map(len, passes)) < 2 or any(_has_trained_rows(run, n) for calls in passes for n in calls):
        return None
    first = passes[0][0]
    parts = _parts_in_words(first.dropouts_on, first.batchnorms_on)
    return Claim(
        0.85,
        f"`{first.model}` was evaluated{at_place(first.site)} in training mode, with {' and '.join(parts)} active: "
        f"{len(passes[0])} passes before step {first.step} had gradients on, and no backward went through them.",
        step=first.step,
        where=(first.model, first.site),
        evidence={"passes": sum(map(len, passes)), "windows": len(passes), "dropouts": first.dropouts_on,
                  "batchnorms": first.batchnorms_on},
        severity="warning",
        fixes=("Call `model.eval()` before evaluating, under `torch.no_grad()`, and `model.train()` after.",),
    )  # fmt: skip


def _evaluated_at_each_step(run: RecordedRun, trained: set[str]) -> Claim | None:
    """The same at every step, if a loss is computed from the output and not trained on: a validation loss.

    A model that makes labels for itself computes no loss there. A loss without a reduction selects rows to train on.
    """
    windows = [look for look in run.sampled.steps if look.step > 0 and look.backward_calls]
    found = [(call, drops) for look in windows for call, drops in _judged_at_random(run, look, trained)]
    if len({call.step for call, _ in found}) < max(3, 0.5 * len(windows)) or run.blind:
        return None
    call, drops = found[0]
    parts = _parts_in_words(max(call.dropouts_on, drops), call.batchnorms_on)
    return Claim(
        0.85,
        f"`{call.model}` runs in training mode{at_place(call.site)}, with {' and '.join(parts)} active, in "
        f"{len(found)} of {len(windows)} observed steps, and the loss of its output is not trained on: it is evaluated "
        f"with random results.",
        step=call.step,
        where=(call.model, call.site),
        evidence={"windows": len(found), "of": len(windows), "dropouts": max(call.dropouts_on, drops),
                  "batchnorms": call.batchnorms_on},
        severity="warning",
        fixes=("Call `model.eval()` before evaluating, under `torch.no_grad()`, and `model.train()` after.",),
    )  # fmt: skip


def _judged_at_random(run: RecordedRun, look: SampledStep, trained: set[str]) -> list[tuple[ModelCall, int]]:
    """Model calls in training mode that no backward goes through and whose output is used in a loss.

    With each comes the number of calls in it that drop at random, functional ones included.
    """
    found, start = [], -1
    for call in look.model_calls:
        end = call.index if call.index is not None else -1
        drops = sum(start < drop.index < end for drop in look.calls.dropouts)
        judged = any(
            loss.index >= end and loss.producer is not None and start < loss.producer.index < end
            for loss in look.calls.losses
            if loss.trained_on and loss.reduction != "none" and (look.step, loss.index) not in run.sampled.signs
        )
        is_random = bool(call.dropouts_on or call.batchnorms_on or drops)
        if call.model in trained and call.training and call.reached is False and is_random and judged:
            found.append((call, drops))
        start = end
    return found


def _has_trained_rows(run: RecordedRun, call: ModelCall) -> bool:
    """Whether a row of a call is among those that were trained on, as far as they are known."""
    known = {row for held in run.facts.step_data.rows.values() for row in held.prints}
    return any(row in known for row in call.rows or [])


def repeats_rows(notes: list[ModelCall]) -> bool:
    """The same rows several times in one block: an ensemble of dropout masks, on purpose."""
    seen: dict[tuple[int | None, ...], int] = {}
    for note in notes:
        key = (note.block, *(note.rows or [])[:4])
        seen[key] = seen.get(key, 0) + 1
    return max(seen.values(), default=0) > 2


RULES = (
    Rule("model.eval-mode-training", "wiring", eval_mode_training),
    Rule("model.train-mode-eval", "wiring", train_mode_eval),
)
