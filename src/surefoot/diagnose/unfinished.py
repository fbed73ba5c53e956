"""Judges a run of `surefoot run` that was killed, or is still running.

The facts of a run are saved at intervals, and its log is written all the time. What was saved last is judged by all
rules; the steps that were logged after it, by the rules that need no more than steps. A run that has not ended is never
called healthy.

Ranks of one run are not judged here (`merged.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.core.wording import count_of
from surefoot.diagnose.engine import diagnose, load_one
from surefoot.diagnose.insufficient import what_happened
from surefoot.diagnose.run import RecordedRun
from surefoot.errors import UsageError
from surefoot.record.facts import RunFacts
from surefoot.record.facts.of_log import facts_of_log
from surefoot.record.reading import load_run

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.diagnose.findings import Diagnosis
    from surefoot.record.facts import RunDescription


def judge_unfinished(folder: Path, description: RunDescription) -> Diagnosis:
    """The diagnosis by the facts that were saved last and by the steps that were logged since."""
    logged = facts_of_log(load_run(folder), description)
    try:
        facts = load_one(folder)[0]
    except UsageError:
        if not logged.steps:
            raise
        facts = RunFacts()  # killed before facts were saved for the first time
    saved = diagnose(facts, description)
    if saved.serious or logged.steps <= facts.steps:
        return saved
    by_log = replace(diagnose(logged, description), saved_steps=facts.steps)
    if by_log.serious:
        return by_log
    happened = what_happened(RecordedRun(logged, description)) or "no fault was found until then"
    known = (
        f"Data and operations were recorded up to step {facts.steps:,}; of later steps, the loss and the gradient norm."
        if facts.steps
        else "Only the loss and the gradient norm of each step were recorded."
    )
    steps = count_of(logged.steps, "step")
    reason = f"After {steps} the script had not ended (killed, or still running); {happened}. {known}"
    return replace(by_log, verdict="unknown", reason=reason)
