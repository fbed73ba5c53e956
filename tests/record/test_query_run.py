"""The example that asks a run questions with DuckDB finds what was put there."""

import runpy
from pathlib import Path

import pytest

from quiet_log import QuietLog
from surefoot import load_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "query_run.py"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("duckdb")
    return runpy.run_path(str(EXAMPLE))


def test_the_answers_name_the_step_and_the_layer_that_exploded(example, tmp_path):
    example["write_a_run"](tmp_path)
    largest, tenths, layers, events = (answer.rows for answer in example["ask"](load_run(tmp_path)).values())
    assert largest[0][0] == 1200
    assert largest[0][3] > 0.9
    assert [tenth for tenth, *_ in tenths] == list(range(1, 11))
    assert sum(steps for *_, steps, _ in tenths) == 2000
    assert layers[0][0] == "head.weight"
    assert layers[0][1] > 20
    assert ("spike", "spike", 1, 1200) in events


def test_a_run_without_rows_has_answers_too(example, tmp_path):
    QuietLog(tmp_path).close()
    assert all(answer.rows == [] for answer in example["ask"](load_run(tmp_path)).values())


def test_it_prints_its_answers(example, capsys):
    example["main"]([])
    printed = capsys.readouterr().out
    assert "head.weight" in printed
    assert "median_loss" in printed
