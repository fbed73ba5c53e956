"""Histograms over time as data."""

import base64

import pyarrow as pa

from surefoot.record.bins import COUNT, ZERO
from surefoot.report.page.histograms import layer_histograms


def table(rows):
    """Rows of (step, layer, part, bins with their counts, NaN)."""
    counts = [[dict(bins).get(i, 0) for i in range(COUNT)] for _, _, _, bins, _ in rows]
    return pa.table(
        {
            "step": [row[0] for row in rows],
            "kind": ["weight"] * len(rows),
            "layer": [row[1] for row in rows],
            "part": [row[2] for row in rows],
            "counts": pa.array(counts, pa.list_(pa.int64(), COUNT)),
            "nan": [row[4] for row in rows],
            "positive_inf": [0] * len(rows),
            "negative_inf": [0] * len(rows),
        }
    )


def test_each_column_holds_shares_in_255_parts():
    found = layer_histograms(table([(0, "fc", "", {ZERO: 1}, 0), (5, "fc", "", {ZERO: 1, ZERO + 3: 1}, 0)]))
    (item,) = found["items"]
    cells = base64.b64decode(item["cells"])
    rows = [cells[i * 2 : i * 2 + 2] for i in range(item["bins"])]
    assert (found["layers"], item["columns"], item["odd"]) == (["fc"], [0, 5], None)
    assert len(found["edges"]["weight"]) == item["bins"] + 1
    assert sorted(row[0] for row in rows)[-1] == 255
    assert sorted(row[1] for row in rows)[-2:] == [128, 128]


def test_nan_is_counted_beside_the_cells():
    found = layer_histograms(table([(0, "fc", "", {ZERO: 1}, 7)]))
    assert found["items"][0]["odd"] == {"nan": [7], "positive_inf": [0], "negative_inf": [0]}


def test_layers_of_the_same_name_in_two_parts_are_distinguished():
    rows = [(0, "fc", "generator", {ZERO: 1}, 0), (0, "fc", "", {ZERO: 1}, 0), (0, "own", "", {ZERO: 1}, 0)]
    assert set(layer_histograms(table(rows))["layers"]) == {"generator · fc", "main · fc", "own"}


def test_nothing_recorded_and_bins_of_another_version_are_no_section():
    assert layer_histograms(pa.table({})) is None
    assert layer_histograms(table([(0, "fc", "", {ZERO: 1}, 0)]).set_column(4, "counts", [[[1, 2, 3]]])) is None
