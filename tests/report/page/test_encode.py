import json

import numpy as np

from surefoot.report.page.encode import embedded, numbers, packed

HOSTILE = ["</script><script>alert(1)</script>", "<!--", "]]>", "a&lt;b", "\u2028\u2029", "\ud800", "{{script}}"]


def test_nothing_in_the_data_can_end_its_element():
    text = embedded({"names": HOSTILE, "<b>": 1})
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()
    assert json.loads(text)["names"] == HOSTILE


def test_what_is_not_finite_travels_as_a_word():
    assert json.loads(embedded({"loss": float("nan"), "more": [float("inf"), -float("inf"), 1.5]})) == {
        "loss": "nan",
        "more": ["inf", "-inf", 1.5],
    }


def test_columns_keep_six_digits_and_words_for_what_is_not_finite():
    assert numbers(np.array([1.0, 0.123456789, 3e-7, np.nan, -np.inf])) == [1, 0.123457, 3e-7, "nan", "-inf"]


def test_packed_bytes_are_little_endian():
    assert packed(np.array([1, 256], dtype=">u2")) == packed(np.array([1, 256], dtype="<u2")) == "AQAAAQ=="
