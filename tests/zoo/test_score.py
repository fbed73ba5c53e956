"""The scoreboard counts what it says it counts, and a kept run is scored again without running."""

import json

import pytest
from small_zoo import SCRIPT, a_zoo

import forked
import patience
from surefoot.core.console import result_console
from surefoot.errors import UsageError
from surefoot.zoo import find, specimens
from surefoot.zoo.score import Result, as_json, folder_of, recorded, run_all, show, summary


def run(truth, named, half="testing", alarms=()):
    return Result(half, truth, "script", 100, named=list(named), alarms=list(alarms))


def test_names_and_messages_are_printed_as_they_are(capsys):
    results = [
        Result("testing", "lr.too-high", "net", 100, trouble="no [bold]loss[/bold] :smile:"),
        Result("testing", "healthy", "net", 100, alarms=["layers[0]:warning:"], exit_code=1),
        Result("testing", "healthy", "net", 100, unjudged="a:100:b", unwatched={"probe[/]": ":x:"}),
    ]
    show(results, result_console(plain_width=200))
    printed = capsys.readouterr().out.splitlines()
    name = "  testing/lr.too-high/net:100"
    assert f"{name}: no [bold]loss[/bold] :smile:" in printed
    assert f"{name} -> no [bold]loss[/bold] :smile:" in printed
    assert "  testing/healthy/net:100: layers[0]:warning:" in printed
    assert "  testing/healthy/net:100: exit code 1" in printed
    assert "  testing/healthy/net:100: a:100:b" in printed
    assert "  testing/healthy/net:100: probe[/] (:x:)" in printed


def test_top_one_and_top_three_are_shares_of_the_faulty_runs():
    figures = summary(
        [
            run("lr.too-high", ["lr.too-high"]),
            run("lr.too-high", ["init.too-large", "x", "lr.too-high"]),
            run("lr.too-low", ["a", "b", "c", "lr.too-low"]),
            run("lr.too-low", []),
            run("healthy", [], alarms=["warning lr.too-high"]),
            run("healthy", ["remark"]),
        ]
    )
    assert (figures["top1"], figures["top3"], figures["false_alarms"]) == (0.25, 0.5, 1)
    assert figures["codes"]["lr.too-high"]["instead"] == {"init.too-large": 1}
    assert {"truth": "lr.too-low", "named": "(nothing)", "runs": 1} in figures["confusions"]


def test_runs_that_were_not_judged_are_named_and_not_counted_as_free_of_false_alarms(capsys):
    results = [
        Result("testing", "healthy", "alarmed", 100, alarms=["warning lr.too-high"]),
        Result("testing", "healthy", "quiet", 100),
        Result("testing", "healthy", "short", 101, unjudged="too few steps"),
        Result("testing", "healthy", "killed", 102, trouble="left no facts"),
    ]
    show(results, result_console(plain_width=200))
    line = "2 of 4 healthy runs judged, 1 with a false alarm; not judged: short:101, killed:102"
    assert line in capsys.readouterr().out
    assert summary(results)["unjudged"] == 2


def test_a_real_run_is_kept_and_scored_again_without_running(tmp_path, starts_forks):
    scripts = a_zoo(tmp_path / "zoo", testing__healthy__line=SCRIPT, tuning__healthy__crash="raise SystemExit(3)")
    done = []
    results = run_all(scripts, [100], 1, keep=tmp_path / "kept", timeout_s=patience.HANG_SECONDS, done=done.append)
    assert [result.name for result in results] == ["testing/healthy/line:100", "tuning/healthy/crash:100"]
    assert len(done) == 2
    assert [result.exit_code for result in results] == [0, 3]
    assert not any(result.trouble or result.unwatched for result in results)
    again = list(recorded(tmp_path / "kept"))
    assert [vars(result) for result in again] == [vars(result) for result in results]
    assert [result.half for result in recorded(tmp_path / "kept", half="tuning")] == ["tuning"]
    assert json.loads(as_json(results))["halves"]["testing"]["healthy"] == 1


def test_a_script_that_never_ends_is_given_up_and_listed(tmp_path, starts_forks):
    scripts = a_zoo(tmp_path / "zoo", testing__lr_too__loop="import time\ntime.sleep(600)")
    (result,) = run_all(scripts, [100], 1, keep=tmp_path / "kept", timeout_s=5)
    assert "still running after 5 s" in result.trouble
    assert not result.among(3)
    assert folder_of(tmp_path / "kept", scripts[0], 100).is_dir()
    (again,) = recorded(tmp_path / "kept")
    assert "no facts.json" in again.trouble


def test_a_part_of_a_name_is_enough_if_only_one_script_has_it(tmp_path):
    a_zoo(tmp_path, testing__healthy__line="", tuning__healthy__line_two="", tuning__lr_too__curve="")
    assert find("curve", tmp_path).truth == "lr.too"
    assert find("line", tmp_path).half == "testing"
    assert len(specimens("tuning", "line", tmp_path)) == 1
    with pytest.raises(UsageError, match="fits 2 zoo scripts"):
        find("healthy", tmp_path)
    with pytest.raises(UsageError, match="`surefoot zoo list`"):
        find("nothing", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zoo"], "`surefoot zoo` needs one of list, run, score"),
        (["zoo", "score", "--half", "third"], "--half must be tuning, testing, both or ranks; got 'third'"),
        (["zoo", "score", "--seeds", "1,x"], "--seeds must be integers"),
        (["zoo", "score", "--from", "nowhere"], "there is no folder nowhere"),
        (["zoo", "run", "no-such-script"], "no zoo script is called"),
        (["diagnose", "nowhere"], "no run folder at nowhere"),
        (["diagnose"], "none found below runs/. Pass the folder of a run."),
        (["nonsense"], "No such command 'nonsense'"),
        (["run"], "no script given"),
        (["run", "--nonsense", "x.py"], "unknown option --nonsense; options of the script come after the script"),
        (["run", "--gard", "x.py"], "unknown option --gard; did you mean --guard?"),
        (["run", "--out"], "--out needs a folder"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_two(tmp_path, arguments, words):
    result = forked.run(["-m", "surefoot", *arguments], cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
