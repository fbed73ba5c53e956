"""The reason of a bad value, where its inputs show it."""

import torch

from surefoot.replay.locate.call import make_call
from surefoot.replay.locate.describe import Counts
from surefoot.replay.locate.evidence import inputs_of, is_log_of_mask, notes_on
from surefoot.replay.locate.frames import Scene
from surefoot.replay.locate.memory_writes import MemoryWrite

SCENE = Scene(None, None, False, False, False)
aten = torch.ops.aten


def call(func, *args, **kwargs):
    return make_call(func, 0, SCENE, None, args, kwargs), [func(*args, **kwargs)]


def test_rows_that_are_masked_as_a_whole_are_listed():
    scores = torch.zeros(3, 2)
    scores[1] = -torch.inf
    made, results = call(aten._softmax.default, scores, 1, False)
    (note,) = notes_on(made, results, None)
    assert note.startswith("1 row of ")
    assert note.endswith("all -Inf: 1")


def test_the_end_of_half_precision_is_named():
    made, results = call(
        aten.mul.Tensor, torch.tensor([6e4], dtype=torch.float16), torch.tensor([2.0], dtype=torch.float16)
    )
    assert "float16 ends at 65,504" in notes_on(made, results, None)


def test_the_first_value_is_shown_with_its_inputs():
    made, results = call(aten.div.Tensor, torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    assert notes_on(made, results, None)[-1].startswith("first at [1] of ")
    assert [each.shape for each in inputs_of(made)] == [(2,), (2,)]


def test_an_empty_input_is_named():
    made, results = call(aten.mean.default, torch.ones(0))
    assert any(note.endswith("is empty") for note in notes_on(made, results, None))


def test_a_logarithm_of_zeros_and_ones_is_a_mask():
    record = MemoryWrite(0, "aten.log.default", "forward", Counts(negative_inf=1), 2)
    assert is_log_of_mask(call(aten.log.default, torch.tensor([0.0, 1.0]))[0], record)
    assert not is_log_of_mask(call(aten.log.default, torch.tensor([0.0, 0.5]))[0], record)
