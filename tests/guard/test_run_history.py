import numpy as np

import surefoot as sf
from surefoot.decide.raised_rate import StepRates
from surefoot.guard.run_history import Budgets, RunHistory
from surefoot.types import StepRecord


def account(losses):
    budgets = Budgets(None, None, None, weights_broken=lambda: False, agreed=lambda flag: flag)
    history = RunHistory(sf.StabilityChecker(), budgets, first_of=lambda counts: "")
    for i, loss in enumerate(losses):
        history.account(StepRecord(sf.Signals(i, float(loss), 1.0, 0.0), skipped=False))
    return [(incident.kind, incident.severity) for incident in history.incidents]


def test_a_remark_that_becomes_a_warning_is_reported_again():
    quiet = 1.0 + 0.01 * np.random.default_rng(0).normal(size=150)
    rising = np.exp(np.arange(80) / 12)
    found = [severity for kind, severity in account([*quiet, *rising]) if kind == "loss_stability"]
    assert found[:2] == ["info", "warning"]


def test_an_alarm_that_lasts_is_reported_once():
    quiet = 1.0 + 0.01 * np.random.default_rng(0).normal(size=150)
    found = account([*quiet, *[2.0] * 20])
    assert [kind for kind, _ in found].count("loss_stability") == 1


def decided(escalation, refused):
    budgets = Budgets(escalation, None, None, weights_broken=lambda: False, agreed=lambda flag: flag)
    history = RunHistory(sf.StabilityChecker(), budgets, first_of=lambda counts: "")
    records = [
        StepRecord(sf.Signals(i, 1.0, 1.0, 0.0), skipped=skip, reasons=("explosion",) * skip)
        for i, skip in enumerate(refused)
    ]
    return [history.account(record).action for record in records], history


def test_a_run_that_still_applies_steps_is_never_halted():
    actions, history = decided(sf.Escalation(), [True, True, False] * 400)
    assert "halt" not in actions
    assert actions.count("back_off") == sf.Escalation().cuts
    assert all(incident.action != "halt" for incident in history.incidents)


def test_a_run_that_applies_no_step_any_more_halts_once_its_budgets_are_used_up():
    escalation = sf.Escalation(skips=3, cuts=1)
    assert decided(escalation, [False, *[True] * 8])[0] == ["none", *["skip"] * 3, "back_off", *["skip"] * 3, "halt"]
    assert decided(sf.Escalation(skips=2_000), [True] * 9_000)[0][-1] == "halt"


def test_after_a_resume_a_refused_gradient_is_compared_with_those_before_it():
    _, before = decided(None, [False] * 40)
    _, after = decided(None, [])
    after.load_state_dict(before.state_dict())
    after.account(StepRecord(sf.Signals(40, 1.0, 70.0, 0.0), skipped=True, reasons=("explosion",)))
    assert "70 times its recent median" in after.incidents[-1].summary


def test_the_rates_and_their_limit_are_saved_with_the_budgets():
    budgets, loaded = (
        Budgets(None, sf.TrainingRecovery(), None, weights_broken=lambda: False, agreed=lambda flag: flag)
        for _ in range(2)
    )
    for step in range(101):
        budgets.rates.before_step(step, StepRates(0.1 if step == 100 else 0.001, 0.0, (1.0,)))
    budgets.rates.returned()
    loaded.load_state_dict(budgets.state_dict(), same_escalation=True, same_recovery=True)
    assert loaded.rates.state == budgets.rates.state
    assert loaded.rates.limit == 0.001


def refused_then(norm, recovery=True, **following):
    """What is reported of a refused step, when it was reported, and the incidents."""
    budgets = Budgets(
        None, sf.TrainingRecovery() if recovery else None, None, weights_broken=lambda: False, agreed=lambda flag: flag
    )
    reported = []
    history = RunHistory(sf.StabilityChecker(), budgets, first_of=lambda counts: "", on_event=reported.append)
    for step in range(40):
        history.account(StepRecord(sf.Signals(step, 1.0, 1.0, 0.0), skipped=False))
    history.account(StepRecord(sf.Signals(40, 9.0, 80.0, 0.0), skipped=True, reasons=("spike",)))
    at_once = len(reported)
    history.account(StepRecord(sf.Signals(41, 9.0, norm, 0.0), **{"skipped": False, **following}))
    history.settle()
    assert history.counts["alarms"] == sum(each.severity != "info" for each in history.incidents)
    assert list(history.incidents) == reported
    return at_once, [(each.step, each.severity, each.action) for each in reported]


def test_the_first_step_of_a_new_level_is_skipped_without_an_alarm():
    assert refused_then(70.0) == (0, [(40, "info", "skip")])


def test_a_bad_batch_is_an_alarm_when_the_next_step_shows_it():
    assert refused_then(1.5) == (0, [(40, "error", "skip")])


def test_a_second_refused_step_makes_the_first_an_alarm():
    found = refused_then(70.0, skipped=True, reasons=("explosion",))
    assert found == (0, [(40, "error", "skip"), (41, "error", "skip")])


def test_without_recovery_a_refused_step_is_an_alarm_at_once_because_the_weights_may_be_damaged():
    assert refused_then(70.0, recovery=False) == (1, [(40, "error", "skip")])


def test_a_warning_is_logged_when_the_next_step_shows_that_it_is_one(caplog):
    refused_then(70.0)
    assert caplog.messages == []
    refused_then(1.5)
    assert [message.split(":")[1].strip() for message in caplog.messages] == ["step 40"]
