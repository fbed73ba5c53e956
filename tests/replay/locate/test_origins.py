"""From a bad outcome back to where it began."""

from surefoot.replay.locate.describe import Counts
from surefoot.replay.locate.memory_writes import MemoryWrite
from surefoot.replay.locate.origins import leads_to, origins, path, unsure


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
