"""Claims about a run that ended with a non-finite loss, or learned nothing, if no other rule finds the cause.

Such a run is never healthy, nor is one in which `--guard` had to skip steps. These rules run only if no other rule has
a claim; they describe what was observed and how to find the cause, with a low confidence. That a run learned nothing is
claimed beside warnings as well, unless one of them is sure: that is then the cause.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from surefoot.diagnose.nonfinite import details
from surefoot.diagnose.rule import Claim, Rule
from surefoot.diagnose.rules.not_learning import not_learning, term_not_learning
from surefoot.record.facts import TRAINING

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun

_NAMED = 3
_REPLAY = (
    "Run `surefoot replay` on the incident in the run folder: it names the first operation that produced a non-finite "
    "value, with its line."
)
_KEEP_AND_REPLAY = (
    "Pass `incidents=` with the run folder where the guard is made, run again, and run `surefoot replay` on the "
    "incident: it names the first operation that produced a non-finite value, with its line."
)


def _ended_badly(run: RecordedRun) -> bool:
    """Whether the last loss was not finite: a run that lost a few steps and recovered needs no explanation."""
    return bool(run.curve.values) and not math.isfinite(run.curve.values[-1])


def steps_left_out(run: RecordedRun) -> str:
    """The number of steps that the guard skipped, in one sentence; empty if there are none."""
    guard = run.facts.guard
    if guard is None or not guard.skipped:
        return ""
    count, checked = guard.skipped, guard.checked
    when = f"{'' if count == 1 else 'the first '}at step {guard.first}"
    who = "The guard" if run.facts.scope == TRAINING else "`--guard`"
    return f"{who} skipped {count:,} of {checked:,} steps, {when}."


def left_out(run: RecordedRun) -> Claim | None:
    """`--guard` skipped steps whose gradients would have broken the weights."""
    guard = run.facts.guard
    if guard is None or not guard.skipped:
        return None
    count, checked, names = guard.skipped, guard.checked, guard.parameters
    some = f"the gradient of {', '.join(names[:_NAMED])} was" if len(names) == 1 else "the result was"
    if len(names) > 1:
        some = f"the gradients of {', '.join(names[:_NAMED])} were"
    one = count == 1
    return Claim(
        0.5,
        f"{steps_left_out(run)[:-1]}: {some} not finite. "
        f"The weights are as if {'that step' if one else 'those steps'} had not been made.",
        step=guard.first,
        where=tuple(names[:_NAMED]),
        evidence=guard.to_json(),
        severity="error" if count > 0.5 * checked else "warning",
        fixes=(_KEEP_AND_REPLAY if run.facts.scope == TRAINING else _REPLAY,),
    )


def broken_gradient(run: RecordedRun) -> Claim | None:
    """A finite loss had a non-finite gradient, which was applied to the weights."""
    events = run.nonfinite.gradients
    if not _ended_badly(run):
        return None
    norm = _first_bad_norm(run)
    if not events or (norm is not None and norm[0] < events[0].step):
        return _broken_norm(run)
    if not events[0].loss_finite:
        return None
    event = events[0]
    hit, spared = event.parameters, event.finite
    named, fine = ", ".join(hit[:_NAMED]), ", ".join(spared[:_NAMED])
    some = f"some gradients were not finite although the loss was: those of {named} (those of {fine} were finite)"
    some = some if spared else "no gradient was finite although the loss was"
    return Claim(
        0.5,
        f"At step {event.step} {some}. An operation of that step has no finite derivative "
        "at its input. The update made the weights non-finite, and every loss since.",
        step=event.step,
        where=tuple(hit[:_NAMED]),
        evidence=event.to_json(),
        fixes=(_REPLAY,),
    )


def _broken_norm(run: RecordedRun) -> Claim | None:
    """The same if only the norm of the gradients was recorded: on a device it is read some steps later."""
    bad = _first_bad_norm(run)
    if bad is None:
        return None
    step, norm, loss = bad
    return Claim(
        0.5,
        f"The loss at step {step} was {loss:.4g}, but the norm of its gradient {norm}: an operation of that step has "
        "no finite derivative at its input. The update made the weights non-finite, and every loss since.",
        step=step,
        evidence={"step": step, "loss": loss, "grad_norm": norm},
        fixes=(_REPLAY,),
    )


def _first_bad_norm(run: RecordedRun) -> tuple[int, float, float] | None:
    """The first step with a finite loss and a non-finite gradient: step, norm and loss."""
    series = run.series
    for step, norm, loss in zip(series.step, series.grad_norm, series.loss, strict=False):
        if norm is not None and loss is not None and not math.isfinite(norm):
            return (step, norm, loss) if math.isfinite(loss) else None
    return None


def broken_update(run: RecordedRun) -> Claim | None:
    """Weights in fp16 were not finite after a step with finite gradients: the update itself overflowed."""
    bad = run.nonfinite.loss
    if not _ended_badly(run) or bad is None or bad.kind != "parameter" or _had_bad_gradient(run):
        return None
    if bad.step is None or not _was_measured(run, bad.step - 1):
        return None
    halves = [p.label for p in run.parameters.values() if p.dtype == "float16" and p.optimizers]
    named = [name for name in bad.parameters or [] if name in halves]
    if not named:
        return None
    first = run.main.first_group if run.main is not None else None
    eps = first.eps if first is not None else None
    lost = f" Its eps of {eps:g} is 0 in fp16, so that a gradient of 0 is divided by 0." if eps and eps < 3e-8 else ""
    return Claim(
        0.6,
        f"{', '.join(named[:_NAMED])} became non-finite by step {bad.step}, although every gradient before was "
        f"finite: the optimizer computes in fp16, as the weights are, and its update exceeded the range of fp16.{lost}",
        step=bad.step,
        where=tuple(named[:_NAMED]),
        evidence={**bad.to_json(), "eps": eps},
        fixes=("Keep the weights in float32 and use `torch.autocast`, with a `GradScaler` for fp16.",),
    )


def _was_measured(run: RecordedRun, step: int) -> bool:
    """Whether the gradients of a step are known. On a device, those of most steps are not."""
    known = zip(run.series.at or run.series.step, run.series.grad_norm, strict=False)
    return any(at == step and norm is not None for at, norm in known)


def _had_bad_gradient(run: RecordedRun) -> bool:
    """Whether a gradient was not finite before the first non-finite loss."""
    bad = run.nonfinite.loss
    step = (bad.step if bad is not None else None) or 0
    norm = _first_bad_norm(run)
    return any(event.step < step for event in run.nonfinite.gradients) or (norm is not None and norm[0] < step)


def broken_weights(run: RecordedRun) -> Claim | None:
    """Weights were not finite, although no gradient before had been."""
    bad = run.nonfinite.loss
    if not _ended_badly(run) or bad is None or bad.kind != "parameter" or bad.step == 0:
        return None  # before the first step, nothing was updated: see `init_too_large`
    if _had_bad_gradient(run):
        return None
    named = ", ".join((bad.parameters or [])[:_NAMED])
    hold = "hold" if (bad.count or 1) > 1 else "holds"
    return Claim(
        0.4,
        f"{named} {hold} values that are not finite at step {bad.step}, "
        "although no earlier gradient was seen to be non-finite: an update overflowed, or other code "
        "wrote to them.",
        step=bad.step,
        where=tuple((bad.parameters or [])[:_NAMED]),
        evidence=bad.to_json(),
        fixes=("Check the code that writes to the weights: `copy_`, `load_state_dict`, an average, a custom update.",),
    )


def broken_loss(run: RecordedRun) -> Claim | None:
    """The loss was not finite, and its origin was not observed."""
    if not _ended_badly(run):
        return None
    step, bad = run.curve.first_bad, run.nonfinite.loss
    if bad is not None and bad.from_model:
        return Claim(
            0.5,
            f"The input of `{bad.call or bad.op}` at {bad.site or 'the loss'} is not finite at step "
            f"{bad.step}, and a model computed it without gradients, like a target network or a frozen "
            "part: its weights or its inputs are not finite.",
            step=bad.step,
            where=(str(bad.site or ""),),
            evidence=details(bad),
            fixes=("Check the weights and the inputs of the model that runs without gradients.", _REPLAY),
        )
    return Claim(
        0.4,
        f"The loss is not finite from step {step} on, although the observed data and weights were finite: "
        "an operation between them and the loss produced it.",
        step=step,
        evidence={"step": step, "seen": bad.kind if bad is not None else None},
        fixes=(_REPLAY,),
    )


LAST_RESORT = (
    Rule("precision.fp16-overflow", "curve", broken_update),
    Rule("loss.undefined-op", "curve", left_out),
    Rule("loss.undefined-op", "curve", broken_gradient),
    Rule("loss.undefined-op", "curve", broken_weights),
    Rule("loss.undefined-op", "curve", broken_loss),
    Rule("optim.not-learning", "curve", not_learning),
    Rule("optim.not-learning", "curve", term_not_learning),
)
"""In this order; the first claim is used."""
BESIDE_WARNINGS = (Rule("optim.not-learning", "curve", not_learning),)
"""For a run with warnings alone, none of them sure: if it learned nothing it is broken, whatever else was noticed."""
