"""Tensors in a script: each literal makes the tensor again, bit for bit."""

import math

import pytest
import torch

from surefoot.errors import UsageError
from surefoot.replay.export.script import (
    MOST_VALUES,
    README,
    SCRIPT,
    TENSORS,
    clear,
    fails_alone,
    literal,
    stored,
    usable,
)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 3), "torch.zeros(2, 3)"),
        (torch.ones(3, dtype=torch.float64), "torch.ones(3, dtype=torch.float64)"),
        (torch.full((4,), 0.1), "torch.full((4,), 0.1)"),
        (torch.tensor([0.1, -0.0]), "torch.tensor([0.1, -0.0])"),
        (torch.tensor([math.inf, math.nan]), 'torch.tensor([float("inf"), float("nan")])'),
        (torch.tensor([[1, 2]]), "torch.tensor([[1, 2]])"),
        (torch.tensor([True, False]), "torch.tensor([True, False])"),
        (torch.tensor(2.5, dtype=torch.float16), "torch.tensor(2.5, dtype=torch.float16)"),
    ],
)
def test_the_shortest_expression_that_is_exact(tensor, text):
    assert literal(tensor) == text
    again = eval(text, {"torch": torch})
    assert again.dtype == tensor.dtype
    assert torch.equal(again.nan_to_num(7), tensor.nan_to_num(7))


def test_many_values_and_complex_ones_belong_into_a_file():
    assert literal(torch.randn(MOST_VALUES + 1)) is None
    assert literal(torch.tensor([1j])) is None


def test_a_file_holds_plain_tensors_and_the_script_restores_them():
    tensors = {"x": torch.randn(2, 3).T, "z": torch.tensor([1 + 2j])}
    kept, words = stored(tensors)
    assert kept["x"].is_contiguous()
    assert not kept["z"].is_complex()
    for name, text in words.items():
        assert torch.equal(eval(text, {"torch": torch, "tensors": kept}), tensors[name])


def test_a_new_an_empty_and_an_old_reproduction_may_be_used(tmp_path):
    new = tmp_path / "new"
    assert usable(new) == new
    assert usable(tmp_path) == tmp_path
    (tmp_path / SCRIPT).write_text("")
    assert usable(tmp_path) == tmp_path


def test_other_files_are_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="contains other files"):
        usable(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        usable(tmp_path / "notes.txt")
    for name in (SCRIPT, TENSORS, README):
        (tmp_path / name).write_text("")
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("lines", "alone", "words"),
    [
        ("import sys\nsys.exit('reproduced: 1 NaN')", True, "reproduced: 1 NaN"),
        ("import sys\nsys.exit('reproduced: 1 NaN, recorded were 2')", False, "reproduced: 1 NaN, recorded were 2"),
        ("print('not reproduced')", False, "not reproduced"),
        ("import surefoot", False, "ImportError: a reproduction must not need surefoot"),
    ],
)
def test_the_script_is_run_alone(tmp_path, lines, alone, words):
    (tmp_path / SCRIPT).write_text(lines)
    assert fails_alone(tmp_path) == (alone, words)
