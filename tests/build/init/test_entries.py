"""Which parameters a model has, and which of them `only` and `skip` leave in."""

import pytest
from torch import nn

from surefoot.build.init.entries import entries_of, refuse_lazy, selected


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        self.embedding = nn.Embedding(6, 4)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_is_one_entry_with_every_name_and_belongs_to_the_embedding():
    model = Tied()
    (entry,) = entries_of(model)
    assert set(entry.names) == {"head.weight", "embedding.weight"}
    assert entry.module is model.embedding
    assert entry.tied_embedding


def test_only_and_skip_take_parameters_modules_and_patterns():
    entries = entries_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert selected(entries, None, ()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert selected(entries, "1", "1.bias") == {"1.weight"}
    assert selected(entries, ["*.weight"], ["0"]) == {"1.weight"}


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"`skip` has 'hed'.*'0.weight'"):
        selected(entries_of(nn.Sequential(nn.Linear(2, 2))), None, "hed")


def test_a_lazy_parameter_is_named():
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias have no shape yet"):
        refuse_lazy(nn.Sequential(nn.LazyLinear(3)))
