"""How far weights have moved, and whether that is unusual."""

import pytest
import torch

from surefoot.keep.snapshots import SnapshotRing
from trained import Run


def steady(first, end):
    """Gradients of the same size all along."""
    return 1.0


def damaged(run, value=30.0):
    with torch.no_grad():
        run.model[2].bias += value


def test_weights_that_train_on_have_not_moved_unusually_and_damaged_ones_have():
    run = Run()
    ring = SnapshotRing(run.state, every_steps=10, keep=2, device_bytes=None)
    for step in (10, 20):
        run.train(10)
        ring.take(step)
    run.train(15)
    ring.note_trouble(35, before=30)
    assert not ring.movement.was_unusual(steady)
    ring.settle()
    damaged(run)
    ring.note_trouble(35, before=30)
    assert ring.movement.was_unusual(steady)


def test_what_happens_after_the_trouble_began_is_not_counted():
    """A harder task has larger gradients, and they move the weights further."""
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (10, 20):
        run.train(10)
        ring.take(step)
    run.train(5)
    ring.note_trouble(25, before=20)
    damaged(run)
    ring.note_trouble(26, before=20)
    assert not ring.movement.was_unusual(steady)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_have_moved(value):
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    for step in (1, 2):
        run.train(1)
        ring.take(step)
    damaged(run, value)
    ring.note_trouble(3, before=2)
    assert ring.movement.was_unusual(steady)


def test_without_two_states_nothing_shows_that_the_weights_have_moved_unusually():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    assert not ring.movement.was_unusual(steady)
    ring.take(1)
    run.train(1)
    ring.note_trouble(2, before=2)
    assert not ring.movement.was_unusual(steady)


def test_a_state_taken_after_the_damage_does_not_hide_it():
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (10, 20, 30):
        run.train(10)
        if step == 30:
            damaged(run)
        ring.take(step)
    run.train(1)
    ring.note_trouble(31, before=26)
    assert ring.movement.was_unusual(steady)


def test_where_nothing_has_moved_yet_a_first_small_move_is_no_damage():
    """As before the first reward of a policy."""
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (10, 20):
        ring.take(step)
    with torch.no_grad():
        run.model[2].bias += 1e-3
    ring.note_trouble(25, before=20)
    assert not ring.movement.was_unusual(steady)


def test_what_is_usual_is_known_when_a_return_has_left_one_state():
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (0, 10, 20):
        ring.take(step)
        run.train(10)
    ring.return_to(15, 0, keep_present=False)
    assert ring.steps == [10]
    run.train(5)
    ring.note_trouble(15, before=12)
    assert not ring.movement.was_unusual(steady)


def test_gradients_that_have_grown_explain_a_longer_way():
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (10, 20):
        run.train(10)
        ring.take(step)
    run.optimizer.param_groups[0]["lr"] *= 6
    run.train(10)
    ring.note_trouble(30, before=20)
    assert ring.movement.was_unusual(steady)
    assert not ring.movement.was_unusual(lambda first, end: 8.0 if end > 20 else 1.0)


def test_of_a_model_that_was_rebuilt_since_nothing_is_known():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    for step in (1, 2):
        run.train(1)
        ring.take(step)
    damaged(run)
    ring.note_trouble(3, before=2)
    run.model[2] = torch.nn.Linear(8, 1)
    assert [ring.movement.was_unusual(steady, if_unknown) for if_unknown in (False, True)] == [False, True]
