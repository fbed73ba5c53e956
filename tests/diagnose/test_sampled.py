"""The sampled steps of a run, taken together."""

from __future__ import annotations

from recorded import look, moves, parameter, run


def test_the_calls_of_all_steps_are_in_order_and_carry_their_step() -> None:
    losses = [{"op": "mse_loss", "grad": True}, {"op": "mse_loss", "grad": False}]
    held = run(sampled_steps=[look(step, notes={"losses": losses}) for step in (0, 5)]).sampled
    assert [call.step for call in held.calls.losses] == [0, 0, 5, 5]
    assert [call.step for call in held.training_losses()] == [0, 5]
    assert held.training_losses("cross_entropy") == []


def test_the_ratio_of_a_step_is_the_median_over_its_matrices() -> None:
    bias = parameter(1) | {"shape": [8]}
    rows = [{"id": 0, "grad": 1.0, "ratio": 0.1}, {"id": 1, "grad": 1.0, "ratio": 9.0}]
    looks = [look(0, steps=[{"optimizer": 0, "rows": rows}]), look(4, steps=moves(0.3))]
    held = run(sampled_steps=looks, parameters=[parameter(0), bias]).sampled
    assert held.update_ratios() == [0.1, 0.3]
    assert held.update_ratios(before=4) == [0.1]


def test_matrices_that_begin_at_zero_count_only_if_there_are_no_others() -> None:
    adapter = parameter(1) | {"first": {"norm": 0.0}}
    rows = [{"id": 0, "grad": 1.0, "ratio": 0.1}, {"id": 1, "grad": 1.0, "ratio": 9.0}]
    looks = [look(0, steps=[{"optimizer": 0, "rows": rows}]), look(4, steps=[{"optimizer": 0, "rows": rows[1:]}])]
    assert run(sampled_steps=looks, parameters=[parameter(0), adapter]).sampled.update_ratios() == [0.1, 9.0]


def test_a_ratio_that_is_not_finite_or_without_a_gradient_does_not_count() -> None:
    rows = [{"id": 0, "grad": 1.0, "ratio": "inf"}, {"id": 0, "grad": 0.0, "ratio": 0.5}, {"id": 0, "ratio": None}]
    assert run(sampled_steps=[look(0, steps=[{"optimizer": 0, "rows": rows}])]).sampled.update_ratios() == []


def test_updates_are_asked_for_by_optimizer_and_by_a_part_of_the_steps() -> None:
    steps = [{"optimizer": 0, "lr": [0.1]}, {"optimizer": 1, "lr": [0.2]}]
    held = run(sampled_steps=[look(step, steps=steps) for step in range(4)]).sampled
    assert [update.lr for update in held.optimizer_updates(1, first=1, last=3)] == [[0.2], [0.2]]


def test_model_calls_with_gradients_are_distinguished_from_those_without() -> None:
    passes = [{"model": "a", "grad": True}, {"model": "b", "grad": False}]
    held = run(sampled_steps=[look(0, passes=passes)]).sampled
    assert [call.model for call in held.model_calls] == ["a", "b"]
    assert [call.model for call in held.trained_model_calls] == ["a"]
