"""One pass over a loader: begun as `iter(loader)` would, and taken up again after the last batch handed out."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from surefoot.core.random_state import read_streams
from surefoot.errors import UsageError
from surefoot.keep.position.passes import begin, resume

DATA = TensorDataset(torch.arange(12.0))


def values(batches):
    return [batch[0].tolist() if isinstance(batch, list) else batch for batch in batches]


def draw(current, iterator, count):
    found = []
    for _ in range(count):
        found.append(next(iterator))
        current.count_batch()
    return values(found)


@pytest.mark.parametrize(
    "loader",
    [DataLoader(DATA, batch_size=2, shuffle=True), [10, 20, 30, 40, 50, 60]],
    ids=["map", "list"],
)
def test_a_pass_continues_with_the_batch_after_the_last_one(loader):
    torch.manual_seed(3)
    current, iterator = begin(loader, 0)
    draw(current, iterator, 2)
    saved = current.state_dict(None)
    rest = values(iterator)
    torch.manual_seed(99)
    again, resumed = resume(loader, saved)
    assert values(resumed) == rest
    assert (again.number, again.count) == (0, 2)


def test_beginning_a_pass_draws_what_the_loader_itself_would():
    loader = DataLoader(DATA, batch_size=3, shuffle=True)
    torch.manual_seed(5)
    plainly = values(loader)
    after = read_streams()["torch"]
    torch.manual_seed(5)
    _, iterator = begin(loader, 0)
    assert values(iterator) == plainly
    assert torch.equal(read_streams()["torch"], after)


def test_a_batch_that_raised_counts_once_the_loop_continues_after_it():
    current, iterator = begin([1, 2, 3], 0)
    draw(current, iterator, 1)
    current.failed += 1
    assert current.state_dict(None)["count"] == 1
    current.count_batch()
    assert current.state_dict(None)["count"] == 3


def test_a_loader_with_fewer_batches_than_the_position_is_refused():
    current, iterator = begin([1, 2, 3], 0)
    draw(current, iterator, 3)
    with pytest.raises(
        UsageError, match="the saved position is after batch 3 of the pass, but the loader ends after 1"
    ):
        resume([1], current.state_dict(None))


def test_what_cannot_begin_in_the_middle_is_consumed_and_that_is_logged(caplog):
    current, iterator = begin((value for value in range(5)), 0)
    draw(current, iterator, 2)
    _, resumed = resume((value for value in range(5)), current.state_dict(None))
    assert list(resumed) == [2, 3, 4]
    assert "re-reading 2 batches, because a generator cannot start in the middle" in caplog.text


def test_a_sequence_is_continued_without_a_message(caplog):
    current, iterator = begin(range(5), 0)
    draw(current, iterator, 2)
    _, resumed = resume(range(5), current.state_dict(None))
    assert list(resumed) == [2, 3, 4]
    assert not caplog.text
