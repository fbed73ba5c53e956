"""Decides whether a run without findings can be called healthy, or why not: too little data, or not observed.

A script that never trained, ended too early, crashed or was interrupted, and one that surefoot could not observe, have
no finding either. Their verdict is `unknown`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from surefoot.diagnose.crash_advice import crash_advice
from surefoot.diagnose.curves import FEWEST_LOSSES, LossCurve
from surefoot.diagnose.rules.not_learning import why_unjudged
from surefoot.diagnose.rules.policy import raises_unlikely
from surefoot.diagnose.validation import doubt_about_validation
from surefoot.diagnose.value_networks import doubt_about_values
from surefoot.record.facts import TRAINING, IncidentEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import SampledStep

_NO_EVIDENCE = frozenset({"run log", "incidents", "saving", "skipped steps", "replicas", "crash"})
"""Probes that record or protect: no rule uses their results."""
LONGEST_MESSAGE = 120
"""The maximum length of an error's message that is shown."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def why_unknown(run: RecordedRun, failed: Mapping[str, str] | None = None) -> str:
    """The reason in one sentence; empty if the run was judged. `failed` are rules that raised, with their errors."""
    ended, steps = _how_it_ended(run), f"{run.steps:,} step{'s' if run.steps != 1 else ''}"
    advice = f" {said}" if (said := crash_advice(run)) else ""
    unwatched = {probe: why for probe, why in run.facts.problems.items() if probe not in _NO_EVIDENCE}
    if not run.steps:
        why = ended or next(iter(unwatched.values()), "")
        return f"No training step was seen{f': {why}' if why else ''}.{advice}"
    if ended:
        return f"After {steps} {ended}; no fault was found until then.{advice}"
    losses = run.curve.count
    if not losses:
        return f"No loss was seen in {steps}: nothing that was trained on went through `backward`."
    if losses < FEWEST_LOSSES:
        return f"Too short to judge: {_losses_seen(losses)} seen, and a curve needs {FEWEST_LOSSES}."
    if unwatched:
        probe, why = next(iter(unwatched.items()))
        more = f" and {len(unwatched) - 1} more" if len(unwatched) > 1 else ""
        return f"surefoot stopped watching {probe}{more} ({why}), so not everything could be judged."
    if failed:
        return _failed_rules(failed)
    if run.facts.scope == TRAINING and (happened := what_happened(run)):
        return f"{happened}, and no rule finds the cause."
    if run.sampled.steps and not run.facts.compiled and not any(_saw_inside(look) for look in run.sampled.steps):
        return (
            f"No fault was found in {steps}, but the script trains inside a torch mode, so what happens between data "
            "and loss was not observed."
        )
    if raises_unlikely(run):
        return (
            "No fault was found, but the loss makes actions with a low weight more likely: that is right if the "
            "weights are costs, and the wrong sign if they are rewards or advantages."
        )
    return doubt_about_values(run) or why_unjudged(run) or doubt_about_validation(run)


def why_unknown_by_steps(run: RecordedRun, failed: Mapping[str, str] | None = None) -> str:
    """The same for a run of which only the steps are known: healthy if its loss clearly fell, without events."""
    if not run.steps:
        return "No training step was seen."
    if happened := what_happened(run):
        return (
            f"{happened}. What caused it cannot be judged: data and operations were not recorded. Run the script under "
            "`surefoot run`, or `surefoot replay` on the step if it was kept (`incidents=`)."
        )
    curve = LossCurve(run.curve.values, run.curve.steps)
    if curve.count < FEWEST_LOSSES:
        return f"Too short to judge: {_losses_seen(curve.count)} seen, and a curve needs {FEWEST_LOSSES}."
    if failed:
        return _failed_rules(failed)
    if not curve.learned:
        return (
            f"Only the steps were recorded, and the loss did not clearly fall (from {curve.start:.3g} to "
            f"{curve.end:.3g}): whether that is a fault cannot be judged without data and operations. Run the script "
            "under `surefoot run`."
        )
    return ""


def what_happened(run: RecordedRun) -> str:
    """The actions of a run's guard, as a phrase without a period; empty if there were none."""
    happened = [event for event in run.events(IncidentEvent) if event.action or event.severity == "error"]
    if not happened:
        return ""
    skipped = [event for event in happened if event.action == "skip"]
    number, first = len(skipped or happened), (skipped or happened)[0]
    of_steps = f"{number:,} of {run.steps:,} steps {'was' if number == 1 else 'were'} skipped"
    count = of_steps if skipped else f"{number:,} incident{'s' * (number != 1)}"
    when = "at" if number == 1 else "the first at"
    return f"{count}, {when} step {first.step:,} ({first.summary.rstrip('.')})"


def _losses_seen(count: int) -> str:
    return "no loss was" if not count else "only 1 loss was" if count == 1 else f"only {count} losses were"


def _failed_rules(failed: Mapping[str, str]) -> str:
    code, why = next(iter(failed.items()))
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"The rule for {code}{more} failed ({why}), so not everything could be judged."


def _saw_inside(look: SampledStep) -> bool:
    """Whether a sampled step recorded the path from the data to the loss.

    For a compiled model it never does. Its inputs and outputs, the loss, the gradients and the updates are still
    recorded, and most rules use those.
    """
    return bool(look.operations and look.backward_calls)


def _how_it_ended(run: RecordedRun) -> str:
    """What ended the run early; empty if it ended by itself."""
    if run.facts.experiment is not None and run.facts.experiment.ended:  # `surefoot bisect` ended it on purpose
        return ""
    code, error, crash = run.description.exit_code, run.description.error, run.facts.crash
    if error == "KeyboardInterrupt":
        return "the script was interrupted"
    if crash is not None:
        message = _first_line(crash.message)
        return f"the script ended with {crash.type}{f': {message}' if message else ''}"
    if error:
        return f"the script ended with {error}"
    if code is None:
        return "the script had not ended (killed, or still running)"
    return f"the script ended with exit code {code}" if code else ""


def _first_line(message: str) -> str:
    """The first line of an error's message without colours and final period, cut at a word if it is long."""
    lines = _COLOURS.sub("", message).strip().splitlines()
    line = lines[0].rstrip(". ") if lines else ""
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE].rpartition(" ")[0] + " ..."
