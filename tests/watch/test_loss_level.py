"""A loss is a spike by the level of its own line, and what stays becomes the level."""

import sys

import torch

from surefoot.watch.loss_level import MOST_SPIKES, LossLevels, data_under

NOISE = [1.0, 1.1, 0.9, 1.05, 0.95]


def levelled(levels, frame=None, count=20):
    assert not any(levels.is_spike(NOISE[i % 5], frame) for i in range(count))


def test_no_loss_is_a_spike_before_there_is_a_level():
    levels = LossLevels()
    assert not any(levels.is_spike(value, None) for value in [1.0] * 18 + [1e9])
    assert levels.spikes == 0


def test_a_loss_far_out_is_a_spike_and_does_not_raise_the_level_it_is_judged_by():
    levels = LossLevels()
    levelled(levels)
    middle = sorted(NOISE)[2]
    assert [levels.is_spike(50.0, None) for _ in range(5)] == [True] * 5
    assert levels.middle() == middle
    assert levels.spikes == 5
    assert not levels.is_spike(1.2, None)  # no further out than the noise


def test_a_level_of_zero_or_below_is_no_reason_to_see_spikes():
    levels = LossLevels()
    assert not any(levels.is_spike(0.0, None) for _ in range(30))
    negative = LossLevels()
    assert not any(negative.is_spike(-100.0 + NOISE[i % 5], None) for i in range(40))
    assert negative.is_spike(0.0, None)


def test_where_the_loss_hardly_varies_a_spike_is_half_as_high_again():
    levels = LossLevels()
    assert not any(levels.is_spike(1.0, None) for _ in range(20))
    assert [levels.is_spike(value, None) for value in (1.4, 1.6)] == [False, True]


def test_each_line_has_a_level_of_its_own():
    levels, here = LossLevels(), sys._getframe()
    levelled(levels, here)
    assert not levels.is_spike(50.0, None)  # another line, of which nothing is known yet
    levelled(levels, here, 1)


def test_the_level_follows_a_slow_change_and_the_beginning_stays_known():
    levels = LossLevels()
    levelled(levels)
    for i in range(400):
        assert not levels.is_spike(1.0 + 0.01 * i + 0.1 * (i % 3), None)
    assert levels.middle() > 4
    assert levels.began() == 1.0


def test_after_many_spikes_the_rest_is_the_level():
    levels = LossLevels()
    levelled(levels)
    found = [levels.is_spike(1e3, None) for _ in range(MOST_SPIKES + 60)]
    assert found == [True] * MOST_SPIKES + [False] * 60
    assert levels.middle() == 1e3


def test_the_row_that_is_largest_is_found_in_the_data_under_a_loss():
    x = torch.ones(8, 3)
    x[5] = 40.0
    weight = torch.ones(3, 1, requires_grad=True)
    (held,) = data_under((x @ weight).mean())
    assert (held.op, held.shape, held.worst_row, held.row_ratio) == ("Mm", [8, 3], 5, 40.0)


def test_weights_and_integers_under_a_loss_are_no_data():
    table = torch.nn.Embedding(4, 2)
    loss = (table(torch.tensor([1, 2])) * table.weight[:2]).sum()
    assert data_under(loss) == []
