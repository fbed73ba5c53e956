"""Loops that update their parameters without an optimizer."""

from recorded import parameter, run
from surefoot.diagnose.by_hand import moves_by_hand, trained_models, updates_by_hand


def moved(number, moves, **more):
    return parameter(number, optimizers=()) | {"moved_alone": 1, "in_graph": 1, "moves": moves} | more


def test_a_loop_without_an_optimizer_whose_parameters_move_updates_by_hand():
    assert updates_by_hand(run(optimizers=[], parameters=[moved(0, [0.1])]))
    assert not updates_by_hand(run(optimizers=[], parameters=[moved(0, [0.1], in_graph=0)]))
    assert not updates_by_hand(run(parameters=[moved(0, [0.1])])), "it has an optimizer"


def test_its_models_count_as_trained():
    still = parameter(1, model="other", optimizers=())
    assert trained_models(run(optimizers=[], parameters=[moved(0, [0.1]), still])) == {"model"}


def test_the_size_of_a_step_is_the_median_of_the_matrices_and_steps_of_zero_are_left_out():
    held = run(
        optimizers=[],
        parameters=[moved(0, [0.1, 0.0, 0.3]), moved(1, [0.3, 0.0]), moved(2, [9.0, 9.0, 9.0], shape=[8])],
    )
    assert moves_by_hand(held.parameters.values()) == [0.2, 0.3]
