"""Calls as a person would write them."""

import pytest
import torch
import torch.nn.functional as F

from recorded_calls import captured
from surefoot.replay.export.call_text import NotWritable, spell, title, value

X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1])


def text(step):
    ran = captured(step).calls[-1]
    names = {}
    return spell(ran, lambda key: names.setdefault(key, "xyz"[len(names)]))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda: F.cross_entropy(X, Y), "F.cross_entropy(x, y)"),
        (lambda: F.cross_entropy(X, Y, reduction="sum"), "F.cross_entropy(x, y, reduction='sum')"),
        (lambda: torch.log(X), "torch.log(x)"),
        (lambda: X - 1, "x - 1"),
        (lambda: 1 / X, "1 / x"),
        (lambda: X**-2.0, "x ** (-2.0)"),
        (lambda: -X, "-x"),
        (lambda: X[0, 1:], "x[0, 1:]"),
        (lambda: X[..., None], "x[..., None]"),
        (lambda: X.T, "x.T"),
        (lambda: X.sum(dim=[0, 1]), "x.sum(dim=[0, 1])"),
    ],
)
def test_a_call_is_spelled(step, words):
    assert text(step) == words


def test_a_title_for_a_sentence():
    assert title(captured(lambda: 1 / X).calls[-1]) == "torch.div"
    assert title(captured(lambda: X[0]).calls[-1]) == "indexing"
    assert title(captured(lambda: F.relu(X)).calls[-1]) in ("F.relu", "torch.relu")


def test_numbers_that_have_no_literal():
    assert value(float("inf"), str) == 'float("inf")'
    assert value((1,), str) == "(1,)"
    assert value({"a": [None, torch.float16]}, str) == "{'a': [None, torch.float16]}"
    with pytest.raises(NotWritable, match="argument of type object"):
        value(object(), str)
