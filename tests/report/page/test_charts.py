"""Line charts as data."""

import math

import pyarrow as pa
import pytest

from surefoot.report.page.charts import one_series, scalar_charts


def table(steps=20, **columns):
    return pa.table({"step": list(range(steps)), "part": [""] * steps, **columns})


def test_one_chart_per_recorded_number_in_reading_order_and_signals_last():
    losses = [1.0 / (i + 1) for i in range(20)]
    charts = scalar_charts(table(lr=losses, loss=losses, **{"signal.kl": losses}), [])
    assert [chart["id"] for chart in charts] == ["loss", "lr", "signal.kl"]
    assert charts[2]["title"] == "kl"
    assert [series["role"] for series in charts[0]["series"]] == ["raw", "smooth"]
    assert not any("constant" in series for chart in charts for series in chart["series"])


def test_a_value_that_never_changes_is_a_sentence_and_no_scaling_is_not_shown():
    charts = scalar_charts(table(lr=[0.1] * 20, loss_scale=[1.0] * 20, nonfinite=[0.0] * 20), [])
    assert [(chart["id"], chart["flat"]) for chart in charts] == [("lr", pytest.approx(0.1))]


def test_a_constant_loss_is_still_a_chart():
    (chart,) = scalar_charts(table(loss=[2.0] * 20), [])
    assert "flat" not in chart


def test_what_clipping_left_is_drawn_at_the_clipped_steps():
    norms, factors = [4.0 + (i % 3) for i in range(20)], [0.5 if i == 7 else 1.0 for i in range(20)]
    (chart,) = scalar_charts(table(grad_norm=norms, clip_factor=factors), [])
    clipped = chart["series"][-1]
    assert (clipped["role"], clipped["x"], clipped["y"]) == ("clipped", [7], [2.5])
    assert "Dots: after clipping" in chart["caption"]


def test_each_part_has_its_own_series_and_nan_is_a_word():
    mixed = pa.table({"step": [0, 0, 1, 1], "part": ["g", "d", "g", "d"], "loss": [1.0, 2.0, math.nan, 3.0]})
    (chart,) = scalar_charts(mixed, [])
    assert [(series["part"], series["y"]) for series in chart["series"]] == [("g", [1, "nan"]), ("d", [2, 3])]


def test_an_empty_table_has_no_charts():
    assert scalar_charts(pa.table({}), []) == []


def test_a_long_series_is_thinned_and_keeps_the_steps_of_events():
    import numpy as np

    steps = np.arange(100_000)
    series = one_series("loss", "", "raw", steps, np.ones(100_000), [54_321])
    assert len(series["x"]) < 10_000
    assert 54_321 in series["x"]


@pytest.mark.parametrize(
    ("losses", "is_log"),
    [
        ([10.0 ** (-i / 5) for i in range(20)], True),
        ([1.0] * 17 + [1e3, 1e6, 1e9], True),
        ([2.0 / (i + 1) for i in range(20)], False),
        ([-(10.0 ** (-i / 5)) for i in range(20)], False),
        ([math.nan] * 20, False),
    ],
)
def test_a_loss_that_changes_by_decades_has_a_logarithmic_scale(losses, is_log):
    (chart,) = scalar_charts(table(loss=losses), [])
    assert chart["log"] is is_log
