"""Which batch and which random numbers the captured step is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from surefoot.record.incidents.reading import StoredIncident
from surefoot.record.incidents.values import decode, encode
from surefoot.replay.changed_data import ChangedData, seed_otherwise
from surefoot.replay.first_step import FirstStep


@dataclass
class Run:
    """The part of an experiment that the change of data uses."""

    order: dict[str, Any]
    acted: int = 0
    patience: int | None = None
    ended: list[str] = field(default_factory=list)

    def end(self, why: str) -> None:
        self.ended.append(why)


def incident(batch: Any = None) -> StoredIncident:
    drawn = [] if batch is None else [encode(batch, str, [])]
    calls = [encode(((torch.zeros(2),), {}), str, [])]
    one = {"drawn": drawn, "given": None, "calls": calls, "streams": None, "weights": []}
    prints = {"losses": [[{"value": "nan"}]], "gradients": {}}
    state = {"models": [{}], "window": {"start": None, "microbatches": [one]}}
    return StoredIncident(Path(), {"fingerprints": prints}, state)


def test_a_change_of_the_update_is_left_to_others() -> None:
    run = Run({"change": "clip"})
    assert not ChangedData(run, incident(torch.arange(4))).install(None)
    assert run.acted == 0


def test_another_seed_does_not_apply_where_the_data_come_from_it() -> None:
    run, captured = Run({"change": "other-seed"}), incident()
    data = ChangedData(run, captured)
    assert data.install(FirstStep(captured))
    assert data.why_not == "the script makes its data from the same random numbers"
    assert (run.acted, run.patience) == (0, 0)


def test_a_single_row_is_not_searched() -> None:
    run, captured = Run({"change": "tiny-batch"}), incident(torch.zeros(1, 3))
    data = ChangedData(run, captured)
    assert data.install(FirstStep(captured))
    assert data.why_not == "the batch has a single row"
    assert data.rows is not None
    assert data.rows.found.of == 1


def test_rows_are_searched_by_the_batches_that_the_loop_draws() -> None:
    run, captured = Run({"change": "tiny-batch"}), incident(torch.arange(8))
    data, first_step = ChangedData(run, captured), FirstStep(captured)
    assert data.install(first_step)
    (plain,) = captured.state["window"]["microbatches"][0]["drawn"]
    assert data.search is not None
    for _ in range(40):
        first_step.drawing(None)
        if run.ended:
            break
        data.search.note_backward(1.0, finite_gradients=5 not in decode(first_step.choose(plain)).tolist())
    assert run.ended == ["rows"]
    assert (data.search.found.single, run.acted) == ([5], 1)


def test_other_batches_keep_the_loops_own_data() -> None:
    run = Run({"change": "other-batches"})
    data = ChangedData(run, incident(torch.arange(4)))
    assert data.install(None)
    assert data.others is not None
    assert not set(data.others.of(torch.arange(2, 8)).tolist()) & {0, 1, 2, 3}


def test_each_draw_has_random_numbers_of_its_own() -> None:
    def numbers(draw: int) -> list[float]:
        seed_otherwise(draw)
        return torch.rand(3).tolist()

    with torch.random.fork_rng():
        assert numbers(1) == numbers(1) != numbers(2)
