"""The ranks of a run side by side, read one after the other."""

from __future__ import annotations

import math

import numpy as np

import surefoot as sf
from surefoot.record.messages import DeviceRow, StepRow
from surefoot.record.rank_file import rank_folders
from surefoot.record.rank_table import read_rank_table


def write_rank(top, rank, steps, seconds=0.5, norm=lambda step: 1.0, memory=None):
    with sf.RunLog(top / f"rank{rank}", device_seconds=None) as log:
        for step in range(steps):
            log.take(StepRow(step, 1e9 + seconds * step, loss=1.0, grad_norm=norm(step)))
            if memory is not None and step % 10 == 0:
                log.take(DeviceRow(1e9 + seconds * step, "cuda:0", step, {"allocated": memory}))


def test_each_rank_has_its_step_time_gradient_norm_and_memory(tmp_path):
    write_rank(tmp_path, 0, 400, 0.5, memory=1e9)
    write_rank(tmp_path, 1, 400, 2.0, norm=lambda step: 7.0 if step == 250 else 1.0)
    table = read_rank_table(rank_folders(tmp_path), most_columns=40)
    assert (table.ranks, len(table.starts), table.starts[0]) == ([0, 1], 40, 0)
    assert np.allclose(table.step_seconds[0], 0.5)
    assert np.allclose(table.step_seconds[1], 2.0)
    assert table.grad_norm[1][25] == 7.0
    assert table.grad_norm[1].sum() == 46.0
    assert table.memory[0][0] == 1e9
    assert np.isnan(table.memory[1]).all()


def test_between_two_readings_a_rank_has_the_memory_of_the_earlier_one(tmp_path):
    write_rank(tmp_path, 0, 400)
    with sf.RunLog(tmp_path / "rank1", device_seconds=None) as log:
        for step in range(400):
            log.take(StepRow(step, 1e9 + step, loss=1.0, grad_norm=1.0))
            if step in (100, 300):
                log.take(DeviceRow(1e9 + step, "cuda:0", step, {"allocated": 1e6 * step}))
    memory = read_rank_table(rank_folders(tmp_path), most_columns=4).memory[1]
    assert np.array_equal(memory, [math.nan, 1e8, 1e8, 3e8], equal_nan=True)


def test_a_rank_that_is_behind_or_ahead_has_the_columns_of_the_first(tmp_path):
    for rank, steps in ((0, 100), (1, 30), (2, 300)):
        write_rank(tmp_path, rank, steps)
    table = read_rank_table(rank_folders(tmp_path), most_columns=10)
    assert table.last_steps == [99, 29, 299]
    assert [int(np.isfinite(row).sum()) for row in table.grad_norm] == [10, 3, 10]


def test_a_gradient_that_is_not_finite_is_infinite_in_its_column_and_one_that_is_missing_is_not(tmp_path):
    odd = {15: None, 55: math.inf, 75: math.nan}
    write_rank(tmp_path, 0, 100, norm=lambda step: odd.get(step, 1.0))
    (row,) = read_rank_table(rank_folders(tmp_path), most_columns=10).grad_norm
    assert np.flatnonzero(np.isinf(row)).tolist() == [5, 7]


def test_ranks_without_a_log_are_left_out(tmp_path):
    (tmp_path / "rank0").mkdir()
    write_rank(tmp_path, 1, 20)
    assert read_rank_table(rank_folders(tmp_path)).ranks == [1]
    assert read_rank_table([]).ranks == []
