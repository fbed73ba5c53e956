"""Counts in messages."""

import pytest

from surefoot.core.wording import capital, count_of


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 dropouts"), (1, "1 dropout"), (2, "2 dropouts"), (12_000, "12,000 dropouts")]
)
def test_a_count_is_singular_for_one_alone(number, text):
    assert count_of(number, "dropout") == text


@pytest.mark.parametrize(
    ("words", "text"), [("the loss of PPO", "The loss of PPO"), ("", ""), ("`a` fails", "`a` fails")]
)
def test_a_sentence_begins_with_a_capital_and_keeps_the_others(words, text):
    assert capital(words) == text
