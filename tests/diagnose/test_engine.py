"""How claims are ranked, what a verdict is, and what a run folder may do to the reader."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from recorded import facts_of, falling
from recorded import run as recorded
from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.curves import LossCurve
from surefoot.diagnose.engine import STRICT, _judge, covers, diagnose, load
from surefoot.diagnose.findings import Diagnosis, Severity
from surefoot.diagnose.rule import Claim, Kind, Rule
from surefoot.diagnose.rules import RULES
from surefoot.errors import UsageError
from surefoot.record.facts import RunFacts
from watched import CLASSES, FIT, LOOP, NET, VALUES

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun
    from watched import Nursery

Found = tuple[Rule, Claim]


def claimed(
    code: str, kind: Kind, confidence: float = 0.8, severity: Severity = "error", explains: tuple[str, ...] = ()
) -> Found:
    return Rule(code, kind, lambda run: None, explains), Claim(confidence, f"It is {code}.", severity=severity)


def judged(*found: Found) -> Diagnosis:
    return Diagnosis(*_judge(recorded(), list(found)))


def order(diagnosis: Diagnosis) -> list[str]:
    return [finding.cause for finding in diagnosis.findings]


FAULTS = {
    "loss.broadcast": VALUES + FIT + "loss_of = lambda given, target: F.mse_loss(given, target[:, 0])\n",
    "loss.softmax-before-cross-entropy": CLASSES + NET + "loss_of = lambda g, t: F.cross_entropy(g.softmax(1), t)\n",
    "loss.logits-into-probability-loss": CLASSES + NET + "loss_of = F.nll_loss\n",
    "optim.detached-graph": VALUES + FIT + "loss_of = lambda given, target: F.mse_loss(given.round(), target)\n",
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_place_that_is_not_known_is_left_out_of_every_text(watch: Nursery, cause: str) -> None:
    """A doctor is given objects, and a trainer calls them from its own code: neither has a line of the script."""
    facts = RunFacts.from_json(_without_sites(watch(FAULTS[cause], LOOP).facts))
    first = diagnose(facts).findings[0]
    assert first.cause == cause
    for text in (first.summary, *first.fixes):
        assert not re.search(r"  | at [,.:;)]| at$|^At ", text), text


def _without_sites(value: object) -> Any:
    """Recorded facts without any line of the script."""
    if isinstance(value, dict):
        return {key: "" if key == "site" else _without_sites(each) for key, each in value.items()}
    return [_without_sites(each) for each in value] if isinstance(value, list) else value


def ended(last: float, **facts: Any) -> RecordedRun:
    """A run whose best constant answer has a loss of 2."""
    found = recorded(**facts)
    found.curve = LossCurve(falling(end=last), list(range(100)), chance=2.0)
    return found


@pytest.mark.parametrize(
    ("last", "code", "severity"),
    [
        (0.1, "model.dead-units", "info"),
        (0.5, "model.dead-units", "error"),
        (0.1, "optim.detached-graph", "error"),  # the wiring is wrong, whatever the loss
    ],
)
def test_a_setting_is_only_mentioned_where_it_can_have_cost_nothing(last: float, code: str, severity: str) -> None:
    assert _judge(ended(last), [claimed(code, "dynamics")])[2][0].severity == severity


def test_an_evaluation_that_ends_high_leaves_room_for_harm() -> None:
    evaluated = ended(0.1, evaluation_passes=[{"step": 99, "function": "cross_entropy", "loss": 1.5, "rows": 64}])
    assert _judge(evaluated, [claimed("model.dead-units", "dynamics")])[2][0].severity == "error"


def test_what_came_later_does_not_explain_what_has_a_date_of_its_own() -> None:
    jump = Rule("lr.schedule-broken", "value", lambda run: None, dated=True), Claim(0.8, "It jumps.", step=40)
    overflow = Rule("precision.fp16-overflow", "value", lambda run: None, ("lr.*",))
    serious = lambda step: [  # noqa: E731
        finding.cause
        for finding in judged(jump, (overflow, Claim(0.9, "It overflows.", step=step))).findings
        if finding.severity == "error"
    ]
    assert serious(77) == ["precision.fp16-overflow", "lr.schedule-broken"]
    assert serious(40) == serious(3) == ["precision.fp16-overflow"]


def test_structure_outranks_a_curve_however_sure_that_is() -> None:
    diagnosis = judged(claimed("lr.too-high", "curve", 0.99), claimed("optim.parameters-missing", "wiring", 0.6))
    assert order(diagnosis) == ["optim.parameters-missing", "lr.too-high"]


def test_kinds_of_evidence_rank_from_a_crash_down_to_a_remark() -> None:
    kinds: list[tuple[str, Kind]] = [
        ("lr.too-low", "remark"),
        ("lr.too-high", "curve"),
        ("init.too-large", "dynamics"),
        ("optim.epsilon", "value"),
        ("loss.broadcast", "wiring"),
        ("data.label-out-of-range", "crash"),
    ]
    assert order(judged(*(claimed(code, kind) for code, kind in kinds))) == [code for code, _ in reversed(kinds)]


def test_among_equals_the_surer_one_comes_first() -> None:
    diagnosis = judged(claimed("init.too-large", "dynamics", 0.7), claimed("model.dead-units", "dynamics", 0.9))
    assert order(diagnosis) == ["model.dead-units", "init.too-large"]


def test_a_cause_outranks_its_consequence_even_one_with_harder_evidence() -> None:
    cause = claimed("lr.too-high", "curve", 0.7, explains=("model.*",))
    diagnosis = judged(claimed("model.dead-units", "wiring", 0.95), cause)
    assert order(diagnosis) == ["lr.too-high", "model.dead-units"]
    consequence = diagnosis.findings[1]
    assert consequence.severity == "info"
    assert consequence.confidence == pytest.approx(0.475)


def test_two_causes_that_explain_each_other_do_not_both_vanish() -> None:
    diagnosis = judged(
        claimed("init.too-large", "dynamics", explains=("lr.*",)), claimed("lr.too-high", "curve", explains=("init.*",))
    )
    assert [finding.severity for finding in diagnosis.findings] == ["error", "info"]
    assert diagnosis.verdict == "broken"


def test_a_remark_explains_nothing() -> None:
    remark = claimed("optim.frozen-parameters", "wiring", severity="info", explains=("lr.*",))
    diagnosis = judged(remark, claimed("lr.too-low", "curve"))
    assert order(diagnosis) == ["lr.too-low", "optim.frozen-parameters"]
    assert diagnosis.findings[0].severity == "error"


def test_an_error_comes_before_a_warning_of_any_kind() -> None:
    diagnosis = judged(claimed("model.train-mode-eval", "wiring", 0.99, "warning"), claimed("lr.too-low", "curve", 0.5))
    assert order(diagnosis) == ["lr.too-low", "model.train-mode-eval"]


@pytest.mark.parametrize(
    ("severities", "verdict"),
    [
        ((), "healthy"),
        (("info", "info"), "healthy"),
        (("info", "warning"), "unstable"),
        (("warning", "error"), "broken"),
    ],
)
def test_the_verdict_is_that_of_the_worst_finding_and_remarks_never_raise_it(
    severities: tuple[Severity, ...], verdict: str
) -> None:
    codes = ("repro.unseeded", "model.train-mode-eval")
    found = [claimed(code, "wiring", severity=severity) for code, severity in zip(codes, severities, strict=False)]
    assert judged(*found).verdict == verdict


def test_no_finding_is_certain_and_places_are_named_once() -> None:
    claim = Claim(1.0, "Sure.", where=("train.py:3", "", "train.py:3", "model.0"), fixes=("Do this.",))
    rule = Rule("optim.no-update", "wiring", lambda run: claim)
    (finding,) = Diagnosis(*_judge(recorded(), [(rule, claim)])).findings
    assert finding.confidence == 0.99
    assert finding.where == ("train.py:3", "model.0")
    assert finding.fixes == ("Do this.", *CATALOGUE["optim.no-update"].fixes)


def test_every_rule_names_a_cause_of_the_catalogue_and_explains_only_such() -> None:
    for rule in RULES:
        assert rule.code in CATALOGUE
        for pattern in rule.explains:
            covered = [code for code in CATALOGUE if code == pattern or code.startswith(pattern.rstrip("*"))]
            assert covered, f"{rule.code} explains {pattern}, which is no cause"
            assert pattern in CATALOGUE or pattern.endswith(".*")


def test_no_cause_explains_itself() -> None:
    assert not [rule.code for rule in RULES if rule.code in rule.explains]


# Facts that are not as expected


@pytest.mark.parametrize(
    "facts",
    [{}, {"steps": 0}, {"schema": 1, "steps": 3, "optimizers": []}, {"steps": 5, "sampled_steps": [{"step": 0}]}],
)
def test_facts_with_next_to_nothing_in_them_cannot_be_judged(facts: dict[str, Any]) -> None:
    diagnosis = diagnose(RunFacts.from_json(facts))
    assert diagnosis.verdict == "unknown"
    assert diagnosis.summary.endswith(".")


def fails(run: RecordedRun) -> Claim | None:
    raise KeyError("norm")


def test_a_rule_that_fails_does_not_cost_the_others_and_is_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(STRICT)
    monkeypatch.setattr("surefoot.diagnose.rules.RULES", (Rule("lr.too-high", "curve", fails), *RULES))
    diagnosis = diagnose(facts_of(falling(40), seeds={"numpy": [0]}))
    assert "repro.unseeded" in order(diagnosis)
    assert diagnosis.verdict == "unknown"
    assert "The rule for lr.too-high failed (KeyError: 'norm')" in diagnosis.summary
    assert [record.getMessage() for record in caplog.records] == ["the rule for lr.too-high failed (KeyError: 'norm')"]


def test_a_rule_that_fails_does_not_hide_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRICT)
    found = Rule("lr.too-low", "curve", lambda run: Claim(0.9, "Too low."))
    monkeypatch.setattr("surefoot.diagnose.rules.RULES", (Rule("lr.too-high", "curve", fails), found))
    assert diagnose(facts_of()).verdict == "broken"


@pytest.mark.parametrize("strict", [True, False])
def test_every_test_runs_strictly(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    monkeypatch.setattr("surefoot.diagnose.rules.RULES", (Rule("lr.too-high", "curve", fails),))
    with pytest.raises(KeyError, match="norm"):
        diagnose(facts_of(), strict=strict)


def test_a_missing_folder_a_missing_file_and_a_damaged_one_are_distinguished(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no facts\.json"):
        load(tmp_path)
    (tmp_path / "facts.json").write_text("{}")
    with pytest.raises(UsageError, match=r"has no run\.json"):
        load(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        load(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "facts.json").write_text('{"steps": 3, "optimizers": [{"number": 0, "type": "SGD", "steps": "many"}]}')
    with pytest.raises(UsageError, match=r"damaged: facts\.json: optimizers\[0\]\.steps: expected a whole number, got"):
        load(tmp_path)


def test_a_run_that_was_killed_and_the_log_of_a_stabilizer_are_distinguished(tmp_path: Any) -> None:
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "run.json").write_text('{"script": "train.py", "guard": true}')
    assert diagnose(*load(tmp_path)).summary == "No training step was seen."
    (tmp_path / "run.json").write_text('{"script": "train.py", "guard": false, "exit_code": null}')
    with pytest.raises(UsageError, match=r"not recorded to its end .*killed.* no diagnosis\. `surefoot report") as told:
        load(tmp_path)
    assert "stabilizer" not in str(told.value)


def test_of_several_ranks_the_first_that_left_facts_is_read(tmp_path: Any) -> None:
    for rank in (0, 1):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        (folder / "facts.json").write_text(json.dumps({"steps": rank + 7}))
        (folder / "run.json").write_text("{}")
    assert load(tmp_path)[0].steps == 7
    (tmp_path / "rank0" / "facts.json").unlink()
    (tmp_path / "rank0" / "telemetry").mkdir()  # it was aborted
    assert load(tmp_path)[0].steps == 8


@pytest.mark.parametrize(
    ("cause", "consequence"),
    [
        ("data.degenerate-batch", "data.split-mismatch"),
        ("data.degenerate-batch", "lr.too-high"),
        ("loss.bounded-output", "data.unscaled-target"),
        ("lr.schedule-broken", "loss.sum-reduction"),
        ("data.nonfinite-input", "loss.sum-reduction"),
    ],
)
def test_a_consequence_beside_its_cause_is_only_mentioned(cause: str, consequence: str) -> None:
    rules = {code: [rule for rule in RULES if rule.code == code] for code in (cause, consequence)}
    strongest = max(rules[cause], key=lambda rule: covers(rule.explains, consequence))
    found = _judge(recorded(), [(strongest, Claim(0.9, "This.")), (rules[consequence][0], Claim(0.9, "That."))])[2]
    assert [(each.cause, each.severity) for each in found] == [(cause, "error"), (consequence, "info")]
