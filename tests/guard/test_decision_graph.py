"""Which rules a CUDA graph may decide. What it decides is tested in `tests/gpu/test_guarded_step_on_cuda.py`."""

import pytest

import surefoot as sf
from part_arguments import made
from surefoot.detect import step_rules
from surefoot.guard.decision_graph import _rule_is_ours

STEP_RULES = [name for name in sf.__all__ if getattr(getattr(sf, name), "__module__", "") == step_rules.__name__]


@pytest.mark.parametrize("name", STEP_RULES)
def test_every_exported_step_rule_is_recorded(name):
    assert _rule_is_ours(made(name))
    assert _rule_is_ours(sf.sustained(made(name), 2))


def test_limits_are_recorded():
    assert _rule_is_ours(step_rules.Limit("grad_ratio", 2.0))


@pytest.mark.parametrize(
    "rule",
    [
        sf.Explosion(signal="cost"),
        sf.Spike(("loss", "cost")),
        sf.Setback(signal="cost"),
        sf.LostProgress(signal="cost"),
        sf.any_of(sf.NonFinite(), sf.Explosion(signal="cost")),
        sf.Plateau(),
    ],
)
def test_a_rule_that_needs_more_than_a_recording_has_is_not_recorded(rule):
    assert not _rule_is_ours(rule)
