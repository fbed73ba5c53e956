"""Counts in messages."""

import pytest

from surefoot.core.wording import count_of


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 dropouts"), (1, "1 dropout"), (2, "2 dropouts"), (12_000, "12,000 dropouts")]
)
def test_a_count_is_singular_for_one_alone(number, text):
    assert count_of(number, "dropout") == text
