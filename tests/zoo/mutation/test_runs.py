"""The file of results: what is read back, what is run again, what is refused."""

import json

import pytest

from surefoot.errors import UsageError
from surefoot.zoo import Specimen
from surefoot.zoo.mutation import Mutant, parent_scripts
from surefoot.zoo.mutation.operators import OPERATORS
from surefoot.zoo.mutation.runs import Limits, MutantRun, NamedFinding, needed, read_lines, run_all


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


def test_only_what_is_compared_with_its_parent_is_run_with_every_seed():
    by_name = {operator.name: operator for operator in OPERATORS}
    parent = parent_scripts("tuning")[0]
    counts = {
        name: needed(Mutant(parent, by_name.get(name), None, ""), [100, 101, 102])
        for name in ("healthy", "drop-zero-grad", "raise-lr", "drop-last")
    }
    three = [100, 101, 102]
    assert counts == {"healthy": three, "drop-zero-grad": [100], "raise-lr": three, "drop-last": three}


def scripts(folder, **texts):
    """Healthy scripts with these names and texts."""
    return [
        Mutant(Specimen("tuning", "healthy", folder / f"{name}.py"), None, None, text) for name, text in texts.items()
    ]


def test_when_the_time_is_over_the_results_so_far_remain(tmp_path, starts_forks):
    chosen = scripts(tmp_path, first="import torch\n", second="import torch\n", slow="import time\ntime.sleep(600)\n")
    seen = []
    found = run_all(chosen, [100], 1, Limits(all_s=0.1), tmp_path / "kept", seen.append)
    assert found == seen
    assert [(run.parent, run.verdict, run.exit_code) for run in found] in ([], [("first", "unknown", 0)])


def test_a_script_that_takes_too_long_is_ended_and_the_others_go_on(tmp_path, starts_forks):
    chosen = scripts(tmp_path, slow="import time\ntime.sleep(600)\n", quick="import time\ntime.sleep(0.5)\n")
    found = run_all(chosen, [100], 1, Limits(each_s=10.0))
    assert [run.trouble for run in found] == ["still running after 10 s", ""]
    assert found[1].verdict == "unknown"
    assert found[1].seconds >= 0.5
