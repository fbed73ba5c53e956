"""The captured step takes the place of the first step that a loop makes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F

from captured import MODELS, ROWS, capture, incidents_in
from surefoot.errors import UsageError
from surefoot.record.incidents.reading import StoredIncident, read_incident
from surefoot.record.incidents.step_capture import StepCapture
from surefoot.replay.first_step import FirstStep, LiveObjects

if TYPE_CHECKING:
    from pathlib import Path

OWN = (torch.zeros(ROWS, 16), torch.zeros(ROWS, dtype=torch.long))


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> StoredIncident:
    folder: Path = tmp_path_factory.mktemp("captured")
    capture(folder, "mlp", step=2, accumulate=2)
    return read_incident(incidents_in(folder)[0])


def begun(incident: StoredIncident) -> tuple[FirstStep, LiveObjects]:
    """A first step, and the fresh model that will play it."""
    net = MODELS["mlp"]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    notes = StepCapture([net], torch.device("cpu"), step=0)
    objects = LiveObjects([net], optimizer, None, notes, lambda: 0, lambda: None)
    first_step = FirstStep(incident)
    first_step.find_objects = lambda: objects
    return first_step, objects


def test_the_first_batch_is_the_captured_one_from_the_captured_weights(incident: StoredIncident) -> None:
    first_step, objects = begun(incident)
    x, y = first_step.loader_drew(OWN)
    assert not torch.equal(x, OWN[0])
    assert first_step.ready
    saved = incident.state["models"][0]
    assert all(torch.equal(value, saved[name]) for name, value in objects.models[0].state_dict().items())
    F.cross_entropy(objects.models[0](x), y).backward()
    assert set(objects.gradients()) == set(incident.facts["fingerprints"]["gradients"])


def test_batches_for_evaluation_stay_the_loops_own(incident: StoredIncident) -> None:
    first_step, objects = begun(incident)
    with torch.no_grad():
        assert first_step.loader_drew(OWN) is OWN
    objects.models[0].eval()
    assert first_step.loader_drew(OWN) is OWN
    assert not first_step.ready


def test_every_microbatch_is_fed_once_and_the_step_can_be_repeated(incident: StoredIncident) -> None:
    first_step, _ = begun(incident)
    first = first_step.loader_drew(OWN)
    assert first_step.loader_drew(OWN) is OWN  # this microbatch took one batch
    assert not first_step.is_last
    first_step.next_microbatch()
    second = first_step.loader_drew(OWN)
    assert first_step.is_last
    assert not torch.equal(first[0], second[0])
    first_step.play_again(0)
    assert torch.equal(first_step.loader_drew(OWN)[0], first[0])


def test_a_finished_step_feeds_nothing_more(incident: StoredIncident) -> None:
    first_step, _ = begun(incident)
    ended: list[bool] = []
    first_step.over = lambda: ended.append(True)
    first_step.finish()
    assert ended == [True]
    assert first_step.loader_drew(OWN) is OWN


def test_an_incident_without_its_batches_cannot_be_replayed(incident: StoredIncident) -> None:
    without = {name: part for name, part in incident.state.items() if name != "window"}
    with pytest.raises(UsageError, match="lacks window"):
        FirstStep(replace(incident, state=without))
    with pytest.raises(UsageError, match="neither batch nor inputs"):
        FirstStep(replace(incident, state=without | {"window": {"start": None, "microbatches": []}}))
