"""How far the loops over epochs are: finished epochs are not entered again after a restart."""

from surefoot.keep.position.epochs import EpochLoops


def test_a_loop_begins_at_its_first_epoch_and_counts():
    loops = EpochLoops()
    assert loops.enter(next_pass=0) == (0, 0)
    loops.epoch_over(next_pass=1)
    loops.epoch_over(next_pass=2)
    assert loops.done == 2
    assert loops.nested
    loops.leave(next_pass=2, finished=True)
    assert not loops.nested


def test_a_loop_under_way_continues_with_the_epoch_it_was_in():
    loops = EpochLoops()
    loops.enter(0)
    loops.epoch_over(3)
    resumed = EpochLoops(loops.state_dict())
    assert resumed.enter(0) == (1, 3)


def test_a_finished_loop_is_not_entered_again_and_the_next_one_is():
    loops = EpochLoops()
    loops.enter(0)
    loops.epoch_over(2)
    loops.leave(2, finished=True)
    resumed = EpochLoops(loops.state_dict())
    assert resumed.enter(0) is None
    assert resumed.end_of_last_entered() == 2
    assert resumed.enter(2) == (0, 2)


def test_a_loop_that_was_broken_out_of_ends_when_something_new_begins():
    loops = EpochLoops()
    loops.enter(0)
    loops.epoch_over(1)
    loops.leave(1, finished=False)
    assert loops.state_dict()["under_way"]  # the program may be ending
    loops.settle()
    assert not loops.state_dict()["under_way"]
    assert EpochLoops(loops.state_dict()).enter(0) is None
