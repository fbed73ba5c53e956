"""The script as it is: the run that all others are compared with."""

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
    """What the unchanged script came to."""

    reading: RunReading
    diagnosis: Diagnosis
    facts: RunFacts
    seconds: float
    cut_short: bool
    """It was ended because its share of the budget was over."""

    @cached_property
    def run(self) -> RecordedRun:
        """As the rules of the diagnosis see it."""
        return RecordedRun(self.facts)

    @property
    def why_not(self) -> str:
        """Why no experiment could cure it; empty if one might."""
        if not self.reading.fails:
            return self._nothing_to_cure()
        if self.reading.outcome == "crashed" and not is_numeric(self.reading.crash):
            return f"the script ends with {self.reading.crash}, which no change of the training cures."
        return ""

    @property
    def likely_fixes(self) -> dict[str, str]:
        """The changes that would fix the first finding that any change would fix."""
        serious = [finding.cause for finding in self.diagnosis.findings if finding.severity != "info"]
        return next((FIXES[cause] for cause in serious if cause in FIXES), {})

    def _nothing_to_cure(self) -> str:
        words = f"nothing needs curing: {self.reading.steps} steps, the loss {self.reading.words}."
        if self.reading.outcome == "too short":
            words = f"nothing to judge: {self.reading.words}."
        elif self.diagnosis.serious:
            named = self.diagnosis.serious[0]
            words = (
                f"the loss does not fail ({self.reading.words}), so there is nothing to cure by experiment; "
                f"the diagnosis names {named.cause}."
            )
        return words + (" It was ended when its share of the budget was over." if self.cut_short else "")


def run_baseline(children: Children, seconds: float, deadline: float) -> Baseline:
    """Run the script; it is told to end after `seconds`, and made to after twice that."""
    child = children.start("baseline", {"change": None, "seconds": seconds})
    children.wait(until=min(deadline, time.monotonic() + 2 * seconds))
    facts, description = usable_facts(child)
    diagnosis = diagnose(facts, description)
    verdict = diagnosis.verdict if diagnosis.serious else "healthy"  # as far as it was judged
    reading = _with_findings(read(facts, description, verdict), diagnosis)
    ended = facts.experiment.ended if facts.experiment is not None else None
    cut_short = ended == "time" or description.exit_code is None
    return Baseline(reading, diagnosis, facts, child.seconds, cut_short)


def usable_facts(child: Child) -> tuple[RunFacts, RunDescription]:
    """What the run left. A script that cannot be experimented with is wrong use, with a way out."""
    log = child.folder / "output.txt"
    try:
        facts, description = load(child.folder)
    except UsageError:
        raise UsageError(
            f"the script showed nothing in {child.seconds:.0f} s: see {log}, or give it a larger --budget."
        ) from None
    recorded, crash, code = facts.experiment, facts.crash, description.exit_code
    if crash is not None and crash.type == UsageError.__name__:  # said by surefoot itself, inside the run
        raise UsageError(crash.message)
    if recorded is None:
        raise UsageError(f"the script ended (exit code {code}) without importing torch: see {log}.")
    if recorded.refused:
        raise UsageError(
            f"the script writes to {recorded.refused}, which is outside of the working directory and was there before; "
            "experiments would change it. Have the script write inside the working directory."
        )
    if crash is not None and crash.type == "PermissionError":
        raise UsageError(
            f"the script ended with PermissionError: {crash.message}. Experiments may write only inside the "
            "working directory, and not to what is shared: have the script write there, or name another folder with "
            "--allow-writes"
        )
    if recorded.problem:
        raise UsageError(recorded.problem)
    if not facts.backwards:
        why = f"it ended with {crash.type}" if crash is not None else f"exit code {code}"
        raise UsageError(f"the script never called backward ({why}): see {log}.")
    return facts, description


def _with_findings(reading: RunReading, diagnosis: Diagnosis) -> RunReading:
    """A run that learns, but whose diagnosis names a cause that a change could cure, may learn much better."""
    named = next((finding for finding in diagnosis.findings if finding.severity != "info"), None)
    if named is None:
        return reading
    reading = replace(reading, suspected_at=named.step)
    if reading.outcome == "learned" and named.cause in FIXES:
        return replace(reading, outcome="slow", words=f"{reading.words}, though {named.cause}")
    return reading
