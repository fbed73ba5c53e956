"""Readings of a run's data that several rules share."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from recorded import falling, look, moves, run
from surefoot.diagnose.data_summary import (
    at_chance,
    chance,
    entropy,
    label_batches,
    main_line,
    stream,
    training_loader,
    weights_moved,
    where_of,
)


def batches(count: int, **more: Any) -> dict[str, Any]:
    return {"notes": [{"step": i, "backward": i, "line": 0, "labels": {"0": 3, "1": 1}, **more} for i in range(count)]}


def classified(step: int, value: float = 0.69, **more: Any) -> dict[str, Any]:
    note = {"op": "cross_entropy", "grad": True, "site": "train.py:9", "reduction": "mean", "value": value}
    return look(step, notes={"losses": [note | {"labels": {"0": 16, "1": 16}} | more]}, roots=[{"value": value}])


def test_entropy_is_that_of_the_counts() -> None:
    assert entropy({"0": 5, "1": 5}) == pytest.approx(math.log(2))
    assert entropy(Counter()) == 0.0


def test_the_main_line_is_the_one_that_calls_backward_most() -> None:
    notes = [{"step": i, "line": 1 if i % 3 else 0} for i in range(9)]
    held = run(stream={"notes": notes})
    assert len(stream(held)) == 9
    assert {note.line for note in main_line(held)} == {1}
    assert main_line(run()) == []


def test_labels_come_from_the_loss_or_else_from_the_loader() -> None:
    assert label_batches(run(stream=batches(12)))[0] == Counter({"0": 3, "1": 1})
    drawn = [{"loader": 2, "grad": True, "labels": {"7": 4}} for _ in range(5)]
    held = run(loaders=[{"number": 2}], batches=drawn)
    assert label_batches(held) == [Counter({"7": 4})] * 5


def test_labels_that_the_loss_ignores_are_not_counted() -> None:
    masked = batches(12, labels={"-100": 28, "3": 2, "4": 2})
    looks = [classified(step, labels={"3": 2, "4": 2}, ignore_index=-100) for step in range(4)]
    held = run(stream=masked, sampled_steps=looks)
    assert label_batches(held)[0] == Counter({"3": 2, "4": 2})
    found = chance(held)
    assert found is not None
    assert found.level == pytest.approx(math.log(2))


def test_the_training_loader_is_drawn_from_with_gradients() -> None:
    drawn = [{"loader": 0, "grad": False}] * 5 + [{"loader": 1, "grad": True}]
    held = training_loader(run(loaders=[{"number": 0}, {"number": 1}], batches=drawn))
    assert held is not None
    assert held.number == 1
    assert training_loader(run()) is None


def test_chance_is_the_entropy_of_labels_and_the_variance_of_targets() -> None:
    found = chance(run(sampled_steps=[classified(step) for step in range(4)]))
    assert found is not None
    assert (found.kind, found.level) == ("classes", pytest.approx(math.log(2)))
    target = {"mean": 0.0, "std": 2.0}
    note = {"op": "mse_loss", "grad": True, "reduction": "mean", "value": 4.0, "target": target}
    found = chance(run(sampled_steps=[look(step, notes={"losses": [note]}) for step in range(4)]))
    assert found is not None
    assert (found.kind, found.level) == ("variance", pytest.approx(4.0))


def test_chance_is_not_known_where_more_is_minimised() -> None:
    looks = [classified(step) for step in range(4)]
    looks[2]["roots"][0]["value"] = 5.0
    assert chance(run(sampled_steps=looks)) is None


def test_a_loss_far_below_chance_is_not_at_chance() -> None:
    looks = [classified(step) for step in range(4)]
    assert at_chance(run([0.69] * 40, sampled_steps=looks)) is not None
    assert at_chance(run(falling(), sampled_steps=looks)) is None


def test_the_way_of_the_weights_is_ratio_times_steps() -> None:
    assert weights_moved(run(sampled_steps=[look(0, steps=moves(0.01))])) == pytest.approx(1.0)
    assert weights_moved(run()) == 0.0


def test_places_that_are_not_known_are_left_out() -> None:
    assert where_of("a", None, "", "b") == ("a", "b")
