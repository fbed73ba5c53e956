"""An alarm of a stabilizer about its replicas is a finding of the run."""

from recorded import facts_of
from surefoot.diagnose.engine import diagnose


def alarm(step, summary):
    return {"event": "incident", "step": step, "kind": "dist.replicas-diverged", "severity": "error", "action": "",
            "summary": summary}  # fmt: skip


def test_the_last_alarm_is_stated_with_the_step_of_the_first():
    closer = "rank 2 and rank 0 hold different values of fc.weight before step 40; they were equal before step 28"
    events = [alarm(41, "rank 2 and rank 0 hold different parameters"), alarm(57, closer)]
    diagnosis = diagnose(facts_of(scope="steps", events=events), strict=True)
    (finding,) = diagnosis.serious
    assert (finding.cause, finding.step, finding.severity) == ("dist.replicas-diverged", 41, "error")
    assert finding.summary == f"R{closer[1:]}."


def test_a_run_without_such_an_alarm_has_no_such_finding():
    assert diagnose(facts_of(scope="steps"), strict=True).serious == ()
