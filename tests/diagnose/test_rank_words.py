"""How ranks and tensors are named in findings."""

import pytest

from ranked import MadeRank, apart, write_ranks
from surefoot.diagnose.rank_comparison import RankComparison
from surefoot.diagnose.rank_words import differing_tensors, first_of, name_ranks, odd_ranks, with_gradients


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([1], "rank 1"),
        ([1, 3], "ranks 1 and 3"),
        ([0, 1, 3, 5], "ranks 0, 1, 3 and 5"),
        (list(range(15)), "ranks 0, 1, 2 and 12 more"),
    ],
)
def test_many_ranks_are_counted_and_few_are_named(numbers, words):
    assert name_ranks(numbers) == words


def test_the_odd_rank_and_its_first_tensor_are_named(tmp_path):
    (optimizer,) = (
        ranks := RankComparison(write_ranks(tmp_path, MadeRank(0), MadeRank(1, looks=apart(5, 1))))
    ).optimizers
    look = optimizer.looks[5]
    assert odd_ranks(look.parameters) == {"rank": 1, "ranks": [1], "compared_with_rank": 0}
    names = differing_tensors(ranks, optimizer, look, "parameters")
    assert first_of(names, optimizer) == "`2.weight`"
    assert first_of(["0.weight", "0.bias"], optimizer) == "`0.weight` and 1 more of 3 parameters"


def test_records_of_another_backward_or_without_gradients_are_not_compared(tmp_path):
    looks = {3: {"backwards": 40}, 5: {"has_gradients": False}}
    (optimizer,) = RankComparison(write_ranks(tmp_path, MadeRank(0), MadeRank(1, looks=looks))).optimizers
    assert [look.step for look in with_gradients(optimizer)] == [0, 1, 2, 8, 12]
