"""The unchanged script: the run with which all others are compared."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from surefoot.diagnose.engine import diagnose, load
from surefoot.diagnose.run import RecordedRun
from surefoot.errors import UsageError
from surefoot.experiments.change_causes import FIXES
from surefoot.experiments.run_comparison import RunReading, is_numeric, read

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Diagnosis
    from surefoot.experiments.processes import Child, Children
    from surefoot.record.facts import RunDescription, RunFacts


@dataclass(frozen=True)
class Baseline:
    """The outcome of the unchanged script."""

    reading: RunReading
    diagnosis: Diagnosis
    facts: RunFacts
    seconds: float
    cut_short: bool
    """The run was ended because it had used its share of the budget."""

    @cached_property
    def run(self) -> RecordedRun:
        """The run in the form that the diagnosis rules read."""
        return RecordedRun(self.facts)

    @property
    def why_not(self) -> str:
        """Why no experiment can cure it; empty if one might."""
        if not self.reading.fails:
            return self._nothing_to_cure()
        if self.reading.outcome == "crashed" and not is_numeric(self.reading.crash):
            return f"the script ends with {self.reading.crash}, which no change to the training can cure."
        return ""

    @property
    def likely_fixes(self) -> dict[str, str]:
        """The changes that would fix the first finding that any change would fix."""
        serious = [finding.cause for finding in self.diagnosis.findings if finding.severity != "info"]
        return next((FIXES[cause] for cause in serious if cause in FIXES), {})

    def _nothing_to_cure(self) -> str:
        text = f"the script does not fail: {self.reading.steps} steps, the loss {self.reading.words}."
        if self.reading.outcome == "too short":
            text = f"too short to judge: {self.reading.words}."
        elif self.diagnosis.serious:
            named = self.diagnosis.serious[0]
            text = (
                f"the loss does not fail ({self.reading.words}), so experiments cannot show a cure; "
                f"the diagnosis reports {named.cause}."
            )
        return text + (" The run was ended when it had used its share of the budget." if self.cut_short else "")


def run_baseline(children: Children, seconds: float, deadline: float) -> Baseline:
    """Run the script. It is asked to end after `seconds`, and killed after twice that time."""
    child = children.start("baseline", {"change": None, "seconds": seconds})
    children.wait(until=min(deadline, time.monotonic() + 2 * seconds))
    facts, description = usable_facts(child)
    diagnosis = diagnose(facts, description)
    verdict = diagnosis.verdict if diagnosis.serious else "healthy"  # no serious finding counts as healthy
    reading = _with_findings(read(facts, description, verdict), diagnosis)
    ended = facts.experiment.ended if facts.experiment is not None else None
    cut_short = ended == "time" or description.exit_code is None
    return Baseline(reading, diagnosis, facts, child.seconds, cut_short)


def usable_facts(child: Child) -> tuple[RunFacts, RunDescription]:
    """What the run recorded. Raises `UsageError` if the script cannot be used for experiments."""
    log = child.folder / "output.txt"
    try:
        facts, description = load(child.folder)
    except UsageError:
        raise UsageError(
            f"the script recorded nothing in {child.seconds:.0f} s. See {log}, or set a larger --budget."
        ) from None
    recorded, crash, code = facts.experiment, facts.crash, description.exit_code
    if crash is not None and crash.type == UsageError.__name__:  # raised by surefoot inside the run
        raise UsageError(crash.message)
    if recorded is None:
        raise UsageError(f"the script ended (exit code {code}) without importing torch. See {log}.")
    if recorded.refused:
        raise UsageError(
            f"the script writes to {recorded.refused}, which existed before and is outside the working directory; "
            "the experiments would change it. Make the script write inside the working directory."
        )
    if crash is not None and crash.type == "PermissionError":
        raise UsageError(
            f"the script ended with PermissionError: {crash.message}. Experiments may write only inside the "
            "working directory, and not to shared folders. Make the script write there, or allow another folder with "
            "--allow-writes."
        )
    if recorded.problem:
        raise UsageError(recorded.problem)
    if not facts.backwards:
        why = f"it ended with {crash.type}" if crash is not None else f"exit code {code}"
        raise UsageError(f"the script never called backward ({why}). See {log}.")
    return facts, description


def _with_findings(reading: RunReading, diagnosis: Diagnosis) -> RunReading:
    """A run that learns may learn much better if its diagnosis names a cause that a change could fix."""
    named = next((finding for finding in diagnosis.findings if finding.severity != "info"), None)
    if named is None:
        return reading
    reading = replace(reading, suspected_at=named.step)
    if reading.outcome == "learned" and named.cause in FIXES:
        return replace(reading, outcome="slow", words=f"{reading.words}, but with {named.cause}")
    return reading
