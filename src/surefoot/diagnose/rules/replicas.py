"""Replicas that a stabilizer found to differ during the run; for `surefoot run` see `rank_rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.core.wording import capital
from surefoot.diagnose.rule import Claim, Rule
from surefoot.record.facts import IncidentEvent

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun

CODE = "dist.replicas-diverged"


def alarmed(run: RecordedRun) -> Claim | None:
    """The first alarm has the rank and the step; a later, detailed one also names the tensor."""
    alarms = [event for event in run.events(IncidentEvent) if event.kind == CODE]
    if not alarms:
        return None
    last = alarms[-1]
    words = last.summary.rstrip(".")
    return Claim(
        0.97,
        f"{capital(words)}.",
        alarms[0].step,
        evidence={"alarms": len(alarms), "first_alarm": alarms[0].step, "last_alarm": last.step},
    )


RULES = (Rule(CODE, "value", alarmed, dated=True, from_steps=True),)
