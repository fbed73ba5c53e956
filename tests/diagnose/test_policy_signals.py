"""Causes that are named from what a trainer has logged about its policy."""

from __future__ import annotations

from typing import Any

import pytest

import surefoot as sf
from recorded import facts_of
from surefoot.diagnose.engine import diagnose, diagnose_folder
from surefoot.record.messages import StepRow

STEPS = 40
EQUAL = {"frac_reward_zero_std": [1.0] * STEPS, "reward": [1.0] * STEPS, "reward_std": [0.0] * STEPS}


def rising(start: float, end: float, count: int = STEPS) -> list[float]:
    return [start + (end - start) * step / (count - 1) for step in range(count)]


def causes(folder: Any, signals: dict[str, list[float]]) -> dict[str, str]:
    """What a run whose log has these signals is diagnosed with."""
    with sf.RunLog(folder) as log:
        for step in range(STEPS):
            given = {name: values[step] for name, values in signals.items()}
            log.take(StepRow(step, float(step), loss=1.0 / (step + 1), grad_norm=1.0, lr=1e-3, signals=given))
    return {finding.cause: finding.severity for finding in diagnose_folder(folder).findings}


HEALTHY = {"reward": rising(0.1, 0.9), "reward_std": [0.3] * STEPS, "entropy": rising(2.0, 1.2)}
HEALTHY |= {"kl": rising(0.0, 0.08), "frac_reward_zero_std": rising(0.1, 0.5)}
COLLAPSED = [2.0, 1.5, 0.6, 0.1] + [0.01] * (STEPS - 4)
BAD_REWARD = {"reward": [0.2] * STEPS, "reward_std": [0.3] * STEPS}


@pytest.mark.parametrize(
    ("signals", "cause"),
    [
        (EQUAL, "rl.zero-advantage"),
        ({"reward": [1.0] * STEPS, "reward_std": [0.0] * STEPS}, "rl.zero-advantage"),
        (BAD_REWARD | {"entropy": COLLAPSED}, "rl.entropy-collapse"),
        (BAD_REWARD | {"kl": rising(0.001, 4.0)}, "rl.kl-blowup"),
        (BAD_REWARD | {"sampling_importance_sampling_ratio_max": [2.0, 30.0, 15.0, 40.0] * 10}, "rl.ratio-explosion"),
    ],
    ids=["equal-groups", "equal-rewards", "entropy", "kl", "ratio"],
)
def test_a_fault_of_the_policy_is_named_from_its_log(tmp_path, signals, cause):
    assert next(iter(causes(tmp_path, signals).items())) == (cause, "error")


@pytest.mark.parametrize(
    "signals",
    [
        HEALTHY,
        HEALTHY | {"entropy": COLLAPSED},  # it solves the task
        HEALTHY | {"kl": rising(0.001, 4.0)},
        {"entropy": COLLAPSED},  # a language model that learns from text
        {"objective_kl": rising(0.0, 12.0), "reward": [0.2] * STEPS},  # a sum over each sequence
        {"frac_reward_zero_std": [1.0] * 20 + [0.2] * 20, "reward": rising(0.0, 1.0)},
    ],
    ids=["healthy", "solved-certain", "solved-far", "text", "sequence", "half"],
)
def test_a_policy_that_learns_is_not_blamed(tmp_path, signals):
    assert not [cause for cause, severity in causes(tmp_path, signals).items() if severity != "info"]


def test_the_operations_that_were_watched_come_first():
    signal = {"step": 3, "kind": "equal_groups", "name": "frac_reward_zero_std", "value": 1.0}
    facts = facts_of(policy_signals=[signal | {"step": step} for step in range(10)])
    assert "frac_reward_zero_std" in diagnose(facts).findings[0].summary
    assert facts == type(facts).from_json(facts.to_json())
