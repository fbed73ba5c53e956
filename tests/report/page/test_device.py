"""Charts of the machine over the steps."""

import pyarrow as pa

from surefoot.report.page.device import device_charts

SCALARS = pa.table({"step": [0, 1, 2, 3], "time": [100.0, 110.0, 120.0, 130.0]})


def test_a_reading_gets_the_step_that_was_running_and_of_several_the_largest():
    readings = pa.table({"time": [100.0, 111.0, 112.0, 129.0], "source": ["cuda:0"] * 4, "power": [1.0, 5.0, 3.0, 2.0]})
    (chart,) = device_charts(readings, SCALARS)
    (series,) = chart["series"]
    assert (chart["id"], chart["unit"], series["part"]) == ("power", "W", "cuda:0")
    assert (series["x"], series["y"]) == ([0, 1, 3], [1, 5, 2])


def test_errors_and_throttling_are_shown_only_if_there_were_any():
    columns = {"time": [100.0, 130.0], "source": ["cuda:0"] * 2, "temperature": [60.0, 61.0]}
    quiet = device_charts(pa.table({**columns, "throttle": [0.0, 0.0], "ecc_corrected": [0.0, 0.0]}), SCALARS)
    loud = device_charts(pa.table({**columns, "throttle": [0.0, 4.0], "ecc_corrected": [0.0, 0.0]}), SCALARS)
    assert [chart["id"] for chart in quiet] == ["temperature"]
    assert [chart["id"] for chart in loud] == ["temperature", "throttle"]


def test_without_the_times_of_steps_a_reading_lies_at_its_own_step():
    readings = pa.table({"time": [1.0, 2.0], "step": [5, None], "source": ["host"] * 2, "host_used": [1.0, 2.0]})
    (chart,) = device_charts(readings, pa.table({}))
    assert chart["series"][0]["x"] == [0, 5]


def test_no_readings_no_charts():
    assert device_charts(pa.table({}), SCALARS) == []
