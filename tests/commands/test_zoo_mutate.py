"""`surefoot zoo mutate` from end to end, with one script and one operator, and its refusals."""

import json

import pytest

ONE = ("zoo", "mutate", "--operators", "drop-zero-grad", "--parents", "diabetes_small_net", "--seeds", "1")


def test_a_planted_fault_is_run_scored_recorded_and_diagnosed_again(command, tmp_path, starts_forks):
    file, folder = tmp_path / "runs.jsonl", tmp_path / "kept"
    first = command(*ONE, "--jobs", "1", "--json", file, "--keep", folder)
    assert first.code == 0
    assert "tuning: 1 faulty mutant, 1 run\n" in first.out
    assert "true cause first            100.0 % (20.7 to 100.0)" in first.out
    assert "in 0 of 1 run of healthy parents" in first.out
    healthy, faulty = sorted(map(json.loads, file.read_text().splitlines()), key=lambda run: run["operator"])
    assert (healthy["operator"], healthy["exit_code"]) == ("", 0)
    assert healthy["losses"]["comparable"]
    assert healthy["losses"]["end"] < healthy["losses"]["start"]
    assert faulty["findings"][0]["cause"] == "optim.missing-zero-grad"
    again = command(*ONE, "--json", file)
    assert (again.code, again.out) == (0, first.out)
    assert len(file.read_text().splitlines()) == 2  # nothing was run a second time
    kept = command(*ONE, "--from", folder)
    assert (kept.code, kept.out) == (0, first.out)
    for source in folder.rglob("mutant.py"):
        source.write_text("another text")
    assert "no run of the chosen mutants" in command(*ONE, "--from", folder).error


def test_mutants_are_written_as_scripts_that_differ_from_the_parent_in_one_line(command, tmp_path):
    assert command(*ONE, "--write", tmp_path).code == 0
    parent = (tmp_path / "healthy" / "diabetes_small_net.py").read_text().splitlines()
    mutant = (tmp_path / "drop-zero-grad" / "diabetes_small_net.py").read_text().splitlines()
    changed = [(a.strip(), b.strip()) for a, b in zip(parent, mutant, strict=True) if a != b]
    assert changed == [("opt.zero_grad()", "pass")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--half", "both"], "--half must be tuning or testing; got 'both'"),
        (["--operators", "drop-stepp"], "no operator of the tuning half is called 'drop-stepp'. There are: "),
        (["--parents", "nobody"], "no healthy script of the tuning half is called 'nobody'. There are: "),
        (["--from", ".", "--keep", "x"], "--from cannot be combined with --keep or --json"),
        (["--from", "no-such-folder"], "there is no folder no-such-folder"),
        (
            ["--operators", "drop-clip", "--parents", "diabetes_small_net"],
            "no mutant: drop-clip on diabetes_small_net: the script has no `clip_grad_norm_` statement",
        ),
    ],
)
def test_wrong_use_is_one_line_with_the_way_out(command, arguments, words):
    answer = command("zoo", "mutate", *arguments)
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.error.splitlines()
    assert words in line
