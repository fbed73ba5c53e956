"""The file of results: what is read back, what is run again, what is refused."""

import json

import pytest

from surefoot.errors import UsageError
from surefoot.zoo.mutation.runs import MutantRun, NamedFinding, read_lines


def test_a_line_that_was_cut_off_is_run_again_and_any_other_is_refused(tmp_path):
    run = MutantRun("tuning", "net", "drop-step", 0.5, 100, "text", findings=(NamedFinding("a", "warning", 0.5),))
    path = tmp_path / "runs.jsonl"
    path.write_text(run.as_line() + "\n" + run.as_line()[:40])
    assert read_lines(path) == [run]
    path.write_text("{\n" + run.as_line() + "\n")
    with pytest.raises(UsageError, match=r"line 1 of .* is not JSON"):
        read_lines(path)
    path.write_text(json.dumps({**json.loads(run.as_line()), "schema": 9}) + "\n")
    with pytest.raises(UsageError, match="is of schema 9"):
        read_lines(path)
    assert read_lines(tmp_path / "none.jsonl") == []
