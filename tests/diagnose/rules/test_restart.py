"""Restarts and seeds, from recorded facts."""

from __future__ import annotations

from typing import Any

from recorded import falling, optimizer, parameter, run
from surefoot.diagnose.rules import restart

LOADED = "train.py:40"


def events(*after: str, holds: tuple[str, ...] = ("model", "optimizer"), step: int = 60) -> list[dict[str, Any]]:
    read = {"event": "file-loaded", "step": step, "backward": step, "site": LOADED, "holds": list(holds)}
    return [
        {"event": "saved", "step": step, "site": "train.py:39", "holds": list(holds)},
        read,
        *({"event": name, "step": step, "site": LOADED} for name in ("model-loaded", *after)),
    ]


def twice(happened: list[dict[str, Any]], second_rate: float = 0.01, **facts: Any) -> Any:
    optimizers = [
        optimizer(falling(60), 0),
        optimizer(falling(60), 1, created_at_step=60, settings=[{"lr": second_rate}]),
    ]
    parameters = [parameter(0, "model", (0,)), parameter(1, "model#1", (1,))]
    return run(falling(60), optimizers=optimizers, parameters=parameters, events=happened, **facts)


def test_a_saved_optimizer_that_is_never_loaded_is_missing() -> None:
    claim = restart.state_missing(twice(events()))
    assert claim is not None
    assert claim.evidence["not_loaded"] == ["optimizer"]
    assert claim.where[0] == LOADED


def test_a_full_restart_is_fine() -> None:
    assert restart.state_missing(twice(events("optimizer-loaded"))) is None


def test_a_schedule_that_goes_on_after_the_restart_is_fine_and_one_that_begins_anew_is_not() -> None:
    for rate, begins_anew in ((0.004, False), (0.01, True)):
        held = twice(events("optimizer-loaded"), schedulers=[{"type": "ExponentialLR"}])
        held.optimizers[0].series.lr[:] = [0.01] * 30 + [0.007] * 30
        held.optimizers[1].series.lr[:] = [rate] * 60
        assert (restart.state_missing(held) is not None) == begins_anew


def test_a_checkpoint_of_the_model_alone_loses_the_moments() -> None:
    assert restart.state_missing(twice(events(holds=("model", "progress")))) is not None


def test_fine_tuning_with_other_settings_is_no_restart() -> None:
    assert restart.state_missing(twice(events(holds=("model",)), second_rate=0.001)) is None


def test_reading_the_best_weights_at_the_end_is_no_restart() -> None:
    held = run(falling(60), events=events(holds=("model",), step=60))
    assert restart.state_missing(held) is None


def noted(prints: list[int]) -> dict[str, Any]:
    return {"notes": [{"step": i, "backward": i + 1, "line": 0, "x": p, "y": p} for i, p in enumerate(prints)]}


def test_batches_of_an_epoch_that_had_not_ended_are_replayed() -> None:
    seen = [*range(60), *range(100)]
    claim = restart.data_replayed(twice(events("optimizer-loaded"), stream=noted(seen)))
    assert claim is not None
    assert claim.evidence["replayed"] == 60


def test_one_more_epoch_in_a_fixed_order_is_no_replay() -> None:
    seen = [*range(20)] * 6
    assert restart.data_replayed(twice(events("optimizer-loaded"), stream=noted(seen))) is None
    once = [*range(60), *range(60), *range(60)]
    assert restart.data_replayed(twice(events("optimizer-loaded"), stream=noted(once))) is None


def test_a_restart_that_goes_on_where_it_stopped_is_fine() -> None:
    assert restart.data_replayed(twice(events("optimizer-loaded"), stream=noted([*range(120)]))) is None


def test_a_run_without_a_seed_is_remarked_on() -> None:
    claim = restart.unseeded(run(seeds={"numpy": [0]}))
    assert claim is not None
    assert claim.severity == "info"
    assert restart.unseeded(run(seeds={"torch": [0]})) is None
