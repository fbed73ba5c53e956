"""What a rule must be: every rule of the package, found from its module."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from recorded import run
from surefoot.diagnose.rule import Kind, Rule
from surefoot.diagnose.rules import RULES
from surefoot.diagnose.run import RecordedRun
from surefoot.record.facts import RunFacts

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}-{rule.find.__name__}")


def test_strong_evidence_comes_first() -> None:
    kinds = [get_args(Kind).index(rule.kind) for rule in RULES]
    assert kinds == sorted(kinds)
    assert len(RULES) > 60


@rules
def test_a_rule_says_what_it_looks_for(rule: Rule) -> None:
    assert (inspect.getdoc(rule.find) or "").endswith(".")


@rules
def test_a_rule_claims_nothing_without_facts(rule: Rule) -> None:
    assert rule.find(RecordedRun(RunFacts())) is None
    assert rule.find(RecordedRun(RunFacts(steps=100, backwards=100))) is None


@rules
def test_a_rule_claims_nothing_of_a_run_that_learns(rule: Rule) -> None:
    assert rule.find(run()) is None


def test_rules_for_steps_alone_are_few_and_chosen() -> None:
    assert {rule.code for rule in RULES if rule.from_steps} == {
        "dist.collective-failed",  # an event of the log, like the next
        "dist.replicas-diverged",
        "lr.schedule-broken",
        "precision.fp16-overflow",
        "precision.scaler-stuck",
        "rl.entropy-collapse",  # these four, from what the trainer of a policy has logged
        "rl.kl-blowup",
        "rl.ratio-explosion",
        "rl.zero-advantage",
    }
