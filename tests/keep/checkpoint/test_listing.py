"""Which steps of a folder are whole, which is the best, and which may be deleted."""

import shutil

import torch

from surefoot.keep.checkpoint.listing import (
    by_metric,
    complete_steps,
    last_number,
    list_checkpoints,
    part_name,
    rank_of,
    to_discard,
)
from surefoot.keep.checkpoint.storage import write


def save(folder, step, number, *, rank=0, world_size=1, aside=False, finite=True, quiet=True, metric=None):
    tree = {"w": torch.tensor([1.0 if finite else torch.nan])}
    facts = {"quiet": quiet, "metric": metric, "metric_given": True, "rank": rank, "world_size": world_size}
    write(folder / part_name(step, rank, aside), tree, {**facts, "number": number}, step=step)


def steps(listings):
    return [each.step for each in listings]


def test_names_of_parts_say_their_rank():
    assert [part_name(7, 0), part_name(7, 3), part_name(7, 3, aside=True)] == [
        "step-00000007",
        "step-00000007.rank-3",
        "step-00000007.evidence.rank-3",
    ]
    assert [rank_of(name) for name in ("step-00000007", "step-00000007.rank-3", "step-7", "notes")] == [
        0,
        3,
        None,
        None,
    ]


def test_newest_means_saved_last_and_not_the_highest_step(tmp_path):
    save(tmp_path, 30, number=1)
    save(tmp_path, 20, number=2)  # after a rollback
    assert steps(list_checkpoints(tmp_path)) == [30, 20]
    assert steps(complete_steps(list_checkpoints(tmp_path))) == [20, 30]
    assert last_number(tmp_path) == 2
    assert last_number(tmp_path / "missing") == 0


def test_a_step_is_whole_when_the_parts_of_all_ranks_are_there(tmp_path):
    save(tmp_path, 1, number=1, rank=0, world_size=2)
    (listing,) = list_checkpoints(tmp_path)
    assert listing.missing == [1]
    assert "the part of rank 1 is missing" in listing.fault
    save(tmp_path, 1, number=1, rank=1, world_size=2)
    assert list_checkpoints(tmp_path)[0].whole


def test_a_part_that_was_renamed_is_a_fault(tmp_path):
    save(tmp_path, 1, number=1)
    shutil.move(tmp_path / part_name(1, 0), tmp_path / part_name(2, 0))
    assert "has been renamed" in list_checkpoints(tmp_path)[0].fault


def test_the_best_is_the_good_one_with_the_lowest_metric(tmp_path):
    save(tmp_path, 1, number=1, metric=2.0)
    save(tmp_path, 2, number=2, metric=1.0)
    save(tmp_path, 3, number=3, metric=0.5, quiet=False)
    save(tmp_path, 4, number=4, metric=0.1, finite=False)
    assert steps(by_metric(complete_steps(list_checkpoints(tmp_path)))) == [2, 1]


def test_the_last_good_ones_the_best_and_the_last_evidence_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, number=step, metric=float(abs(step - 2)))
    for step in (6, 7):
        save(tmp_path, step, number=step, finite=False)
    gone = to_discard(list_checkpoints(tmp_path), 0, 1, keep_last=2, keep_evidence=1)
    assert sorted(path.name for path in gone) == [part_name(step, 0) for step in (1, 3, 6)]


def test_a_finite_one_stays_where_none_is_good(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, number=step, quiet=False)
    gone = to_discard(list_checkpoints(tmp_path), 0, 1, keep_last=1, keep_evidence=0)
    assert sorted(path.name for path in gone) == [part_name(1, 0), part_name(2, 0)]
