"""Layer-by-time maps as data."""

import base64
import math

import numpy as np
import pyarrow as pa

from surefoot.record.rank_table import RankTable
from surefoot.report.page.maps import MISSING, NONE, NONFINITE, ZERO, layer_maps, rank_maps, time_columns


def cells_of(a_map):
    values = np.frombuffer(base64.b64decode(a_map["cells"]), dtype="<u2")
    return values.reshape(len(a_map["rows"]), len(a_map["columns"])).tolist()


def test_zero_nan_missing_and_no_gradient_have_codes_of_their_own():
    table = pa.table(
        {
            "step": [0, 0, 0, 1, 1, 1],
            "layer": ["a", "b", "c", "a", "b", "c"],
            "grad_norm": [1.0, 0.0, 3.0, 100.0, math.nan, None],
            "param_norm": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        }
    )
    (found,) = layer_maps(table)
    cells = cells_of(found)
    assert (found["rows"], found["columns"], found["low"], found["high"]) == (["a", "b", "c"], [0, 1], 0.0, 2.0)
    assert cells[0] == [0, 65_000]
    assert cells[1] == [ZERO, NONFINITE]
    assert cells[2][1] == NONE


def test_a_layer_that_was_not_measured_at_a_step_is_missing_there():
    table = pa.table({"step": [0, 1, 1], "layer": ["a", "a", "b"], "dead_share": [0.0, 1.0, 0.5]})
    (found,) = layer_maps(table)
    assert cells_of(found) == [[0, 65_000], [MISSING, 32_500]]


def test_a_bias_that_moves_away_from_zero_is_no_trouble():
    table = pa.table({"step": [0, 1], "layer": ["b", "b"], "update_ratio": [math.inf, 0.1], "param_norm": [0.0, 1.0]})
    (found,) = layer_maps(table)
    assert found["columns"] == [1]
    assert NONFINITE not in cells_of(found)[0]


def test_layers_of_the_same_name_in_two_parts_are_two_rows():
    table = pa.table({"step": [0, 0], "part": ["g", "d"], "layer": ["fc", "fc"], "grad_norm": [1.0, 2.0]})
    assert layer_maps(table)[0]["rows"] == ["g · fc", "d · fc"]


def test_many_steps_share_columns_and_a_column_begins_at_its_first_step():
    starts, columns = time_columns(np.arange(10_000), most=10)
    assert starts.tolist() == list(range(0, 10_000, 1_000))
    assert columns[[0, 999, 1_000, 9_999]].tolist() == [0, 0, 1, 9]


def test_activations_have_maps_and_a_mean_below_zero_has_a_place_in_its_own():
    columns = {"activation_mean": [-2.0, 2.0], "activation_std": [1.0, 1.0], "saturated_share": [0.5, None]}
    found = {each["id"]: each for each in layer_maps(pa.table({"step": [0, 1], "layer": ["a", "b"], **columns}))}
    assert set(found) == {"activation_mean", "activation_std", "saturated_share"}
    assert found["activation_mean"]["rows"] == ["a", "b"]
    cells = cells_of(found["activation_mean"])
    assert cells[0][0] == cells[1][1] < NONFINITE
    assert found["saturated_share"]["rows"] == ["a"]


def test_no_rows_no_maps():
    assert layer_maps(pa.table({})) == []


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
