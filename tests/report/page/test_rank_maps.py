"""Maps of ranks have a row per rank, and only numbers that there are."""

import numpy as np

from surefoot.record.rank_table import RankTable
from surefoot.report.page.rank_maps import rank_maps


def table(count, columns=3):
    nothing = np.full(columns, np.nan)
    return RankTable(
        starts=list(range(columns)),
        ranks=list(range(count)),
        step_seconds=[np.full(columns, 0.1 * (rank + 1)) for rank in range(count)],
        grad_norm=[np.array([1.0, np.inf, 2.0]) for _ in range(count)],
        memory=[nothing for _ in range(count)],
        last_steps=[columns] * count,
    )


def test_there_is_a_row_per_rank_and_no_map_of_what_nobody_measured():
    maps = rank_maps(table(4))
    assert [each["id"] for each in maps] == ["rank_step_seconds", "rank_grad_norm"]
    assert all(each["rows"] == ["rank 0", "rank 1", "rank 2", "rank 3"] for each in maps)
    assert all(each["columns"] == [0, 1, 2] for each in maps)


def test_a_run_of_one_process_has_none():
    assert rank_maps(None) == []
    assert rank_maps(table(1)) == []
