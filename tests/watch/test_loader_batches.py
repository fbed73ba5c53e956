"""The batches of data loaders: what is recorded of each, and that one on a device is read later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from surefoot.watch import deferred
from surefoot.watch.context import LoaderRecord
from surefoot.watch.patches.data import _loader_record, _record_batch
from surefoot.watch.watcher import Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.record.facts import DrawnBatch

ROWS = torch.arange(24.0).reshape(6, 4)
BATCHES = {
    "labels": (ROWS, torch.tensor([0, 2, 2, 1, 0, 2])),
    "targets": (ROWS, ROWS.sum(1)),
    "rows alone": (ROWS,),
}


def recorded(*batches: tuple[Tensor, ...]) -> list[DrawnBatch]:
    watcher = Watcher()
    loader: Any = LoaderRecord(lambda: None, 0, 6, "RandomSampler", True, 0, 6, 1, "train.py:3")
    for batch in batches:
        _record_batch(watcher, loader, batch)
    return watcher.calls.batches


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_on_a_device_has_the_facts_of_one_on_the_cpu_once_they_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (known,) = recorded(BATCHES[name])
    monkeypatch.setattr(deferred, "READ_AT_ONCE", set())  # as on a device, where reading a number waits
    (waiting,) = recorded(BATCHES[name])
    assert isinstance(waiting.fingerprint, deferred.Deferred)
    measured = [waiting.labels, waiting.target_mean, waiting.target_std]
    assert all(value is None or isinstance(value, deferred.Deferred) for value in measured)
    assert deferred.read_each([waiting]) == [known]


def test_labels_and_targets_are_summarized() -> None:
    with_labels, with_targets = recorded(BATCHES["labels"], BATCHES["targets"])
    assert with_labels.labels == {"0": 2, "1": 1, "2": 3}
    assert with_targets.target_mean == pytest.approx(float(ROWS.sum(1).mean()))
    assert with_targets.target_std == pytest.approx(float(ROWS.sum(1).std(correction=0)))


def test_equal_batches_share_a_fingerprint_and_other_labels_change_it() -> None:
    same, again, other = recorded(
        BATCHES["labels"],
        tuple(tensor.clone() for tensor in BATCHES["labels"]),
        (ROWS, torch.tensor([0, 2, 2, 1, 0, 1])),
    )
    assert same.fingerprint == again.fingerprint != other.fingerprint


class Unsized(Dataset[int]):
    """A data set whose length is defined and raises."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        raise TypeError("object of type 'Unsized' has no len()")


def test_a_loader_over_a_data_set_whose_length_raises_has_no_number_of_rows() -> None:
    record = _loader_record(Watcher(), DataLoader(Unsized(), batch_size=2, sampler=[0, 1]))
    assert (record.rows, record.batches, record.batch_size) == (None, None, 2)
