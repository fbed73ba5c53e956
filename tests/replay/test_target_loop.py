"""The loop around a target. Whole runs of it are in `test_experiments.py`."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from captured import capture, incidents_in
from replayed import target
from surefoot.errors import UsageError
from surefoot.record.incidents.reading import read_incident
from surefoot.replay.changed_data import ChangedData
from surefoot.replay.target import TargetStep
from surefoot.replay.target_loop import _steps, main

if TYPE_CHECKING:
    from pathlib import Path


def test_it_is_of_no_use_outside_of_an_experiment() -> None:
    with pytest.raises(UsageError, match="only run by"):
        main(target("mlp"))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> TargetStep:
    folder: Path = tmp_path_factory.mktemp("captured")
    capture(folder, "mlp", step=2, accumulate=2)
    return TargetStep(target("mlp"), read_incident(incidents_in(folder)[0]))


def held(step: TargetStep, change: str | None) -> Any:
    run: Any = SimpleNamespace(order={"change": change}, acted=0, patience=None)
    data = ChangedData(run, step._incident)
    data.install(None)
    return SimpleNamespace(data=data, incident=step._incident, experiment=run)


def test_the_captured_microbatches_come_first_then_the_targets_own(step: TargetStep) -> None:
    with torch.random.fork_rng():
        first, second = islice(_steps(step, held(step, None)), 2)
    captured = [step.batch(each) for each in step.microbatches]
    assert [torch.equal(a[0], b[0]) for a, b in zip(first, captured, strict=True)] == [True, True]
    assert len(second) == step.accumulate  # its loader is empty: the captured batch again
    assert torch.equal(second[0][0], captured[0][0])


def test_with_other_batches_the_targets_own_come_first(step: TargetStep) -> None:
    own = (torch.full((6, 16), 9.0), torch.zeros(6, dtype=torch.long))
    step.loader = [own]
    with torch.random.fork_rng():
        first = next(_steps(step, held(step, "other-batches")))
    step.loader = ()
    assert all(torch.equal(batch[0], own[0]) for batch in first)


def test_another_seed_draws_other_numbers_for_the_captured_batch(step: TargetStep) -> None:
    def drawn(change: str | None) -> list[float]:
        next(_steps(step, held(step, change)))
        return torch.rand(2).tolist()

    with torch.random.fork_rng():
        assert drawn(None) == drawn(None) != drawn("other-seed")
