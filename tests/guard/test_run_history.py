import numpy as np

import surefoot as sf
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
