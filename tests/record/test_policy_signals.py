"""The names that trainers log numbers about a policy under, and what each one says."""

from __future__ import annotations

import pytest

from surefoot.record.policy_signals import kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kl", "kl"),
        ("policy/approxkl_avg", "kl"),
        ("objective/kl", "sequence_kl"),
        ("entropy", "entropy"),
        ("entropy_coef", None),
        ("reward", "reward"),
        ("reward_std", "reward_std"),
        ("rewards/margins", None),
        ("frac_reward_zero_std", "equal_groups"),
        ("clip_ratio/high_mean", "clip_fraction"),
        ("clip_ratio_high_mean", "clip_fraction"),
        ("completions/clipped_ratio", None),
        ("sampling/importance_sampling_ratio/max", "ratio"),
        ("val/ratio", "ratio"),
        ("loss", None),
    ],
)
def test_a_name_says_what_the_number_is_about(name, kind):
    assert kind_of(name) == kind
