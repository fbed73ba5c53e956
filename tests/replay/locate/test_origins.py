"""From a bad outcome back to where it began."""

import torch

from surefoot.replay.locate.call import make_call
from surefoot.replay.locate.describe import Counts
from surefoot.replay.locate.frames import Scene
from surefoot.replay.locate.memory_writes import MemoryWrite
from surefoot.replay.locate.origins import inputs_of, is_log_of_mask, leads_to, notes_on, origins, path, unsure


def write(index, op="aten.mul.Tensor", nan=1, **more):
    return MemoryWrite(index, op, "forward", Counts(nan=nan, negative_inf=1 - min(nan, 1)), 1, **more)


def test_the_earliest_operation_without_bad_inputs_is_the_origin():
    first = write(1)
    second = write(5, parents=(first,), input_nan=True)
    end = write(9, parents=(second,), input_nan=True)
    assert origins([end], meant_too=False) == [first]
    assert path(first, [end]) == [first, second, end]
    assert leads_to(first, [end])
    assert not leads_to(end, [first])


def test_an_operation_that_makes_more_of_it_is_one_too():
    first = write(1)
    born = write(4, parents=(first,), born=True)
    assert origins([born], meant_too=False) == [first, born]


def test_a_mask_is_no_origin_unless_nothing_else_is():
    mask = write(2, nan=0, meant=True)
    softmax = write(3, "aten._softmax.default", parents=(mask,))
    assert origins([softmax], meant_too=False) == [softmax]
    assert unsure([softmax])
    travels = write(3, nan=0, parents=(mask,))
    assert origins([travels], meant_too=False) == []
    assert origins([travels], meant_too=True) == [mask]


def test_a_tensor_of_minus_infinity_counts_as_a_mask_if_a_softmax_choked_on_it():
    tensor = write(-1, nan=0, mask_like=True)
    choked = write(3, "aten._softmax.default", parents=(tensor,))
    assert origins([choked], meant_too=False) == [choked]
    other = write(3, "aten.mul.Tensor", parents=(tensor,))
    assert origins([other], meant_too=False) == [tensor]


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
