"""Spikes of the loss that come with a batch."""

from __future__ import annotations

from typing import Any

from recorded import falling, optimizer, run
from surefoot.diagnose.rules import bad_batch


def spike(backward: int) -> dict[str, Any]:
    base = {"event": "spike", "step": backward - 1, "backward": backward, "value": 900.0, "level": 0.5}
    return base | {"data": []}


def sized(outliers: dict[int, float]) -> dict[str, Any]:
    held = [
        {"step": i, "backward": i + 1, "line": 0, "x": i % 25, "y": i % 25, "y_largest": outliers.get(i, 2.0 + i % 3)}
        for i in range(100)
    ]
    return {"notes": held, "rows": {}}


def test_a_spike_with_an_outlying_target_is_a_bad_batch() -> None:
    claim = bad_batch.bad_batch(run(events=[spike(31), spike(71)], stream=sized({30: 900.0, 70: 900.0})))
    assert claim is not None
    assert claim.step == 30


def test_a_bad_batch_that_leaves_little_to_learn_is_only_mentioned() -> None:
    for end, severity in ((0.5, "error"), (0.1, "info")):
        held = run(falling(end=end), events=[spike(31), spike(71)], stream=sized({30: 900.0, 70: 900.0}))
        claim = bad_batch.bad_batch(held)
        assert claim is not None
        assert claim.severity == severity


def test_spikes_with_ordinary_data_in_ever_other_batches_are_not_the_datas() -> None:
    assert bad_batch.bad_batch(run(events=[spike(31), spike(63), spike(85)], stream=sized({}))) is None


def test_a_batch_that_spikes_whenever_it_comes_is_bad() -> None:
    claim = bad_batch.bad_batch(run(events=[spike(31), spike(56), spike(81)], stream=sized({})))
    assert claim is not None
    assert claim.evidence["batch_came_at"] == [30, 55, 80]


def with_rows(outliers: dict[int, float], gradient: float, end: float = 0.5) -> Any:
    norms = [gradient if step in outliers else 1.0 for step in range(100)]
    held = optimizer(falling(end=end))
    held["series"] |= {"grad_norm": norms}
    notes = [{"step": i, "backward": i + 1, "line": 0, "x_largest": outliers.get(i, 2.0 + i % 3)} for i in range(100)]
    return run(falling(end=end), optimizers=[held], stream={"notes": notes, "rows": {}})


def test_rows_far_beyond_all_others_are_named_by_their_first_gradient_without_a_spike_of_the_loss() -> None:
    claim = bad_batch.bad_batch(with_rows({8: 900.0, 60: 900.0}, gradient=50.0))
    assert claim is not None
    assert (claim.step, claim.severity) == (8, "warning")
    assert bad_batch.bad_batch(with_rows({8: 900.0, 60: 900.0}, gradient=2.0)) is None
    assert bad_batch.bad_batch(with_rows({8: 900.0, 60: 900.0}, gradient=50.0, end=0.01)) is None
    assert bad_batch.bad_batch(with_rows({8: 30.0, 60: 30.0}, gradient=50.0)) is None
