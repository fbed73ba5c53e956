"""`surefoot explain`: the catalogue in the terminal."""

import sys
from typing import get_args

import pytest

import patience
from surefoot.commands.explain import VERDICTS
from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.findings import Outlook


def flat(text):
    return " ".join(text.split())


def test_without_a_code_every_cause_is_listed_under_its_family(command):
    result = command("explain")
    assert (result.code, result.error) == (0, "")
    lines = [line.split() for line in result.out.splitlines() if line.split()]
    assert {line[0] for line in lines} >= set(CATALOGUE) | {"data", "loss", "hw"}
    assert all(cause.title in flat(result.out) for cause in CATALOGUE.values())


@pytest.mark.parametrize("code", ["loss.softmax-before-cross-entropy", "lr.too-high", "optim.detached-graph"])
def test_a_code_is_explained_in_full(command, code):
    result, cause = command("explain", code), CATALOGUE[code]
    assert (result.code, result.error) == (0, "")
    for text in (cause.title, cause.symptom, cause.evidence, *cause.fixes, *cause.look_alikes):
        assert flat(text) in flat(result.out)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_verdict_is_explained_with_the_next_steps(command, verdict):
    result, (meaning, *steps) = command("explain", verdict), VERDICTS[verdict]
    assert (result.code, result.error) == (0, "")
    assert steps
    for text in (f"{verdict}: {meaning}", *(f"{number}. {step}" for number, step in enumerate(steps, 1))):
        assert flat(text) in flat(result.out)


def test_every_verdict_can_be_explained():
    assert list(VERDICTS) == list(get_args(Outlook))


def test_the_lines_of_a_fix_are_indented_below_its_first_line(command, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setenv("COLUMNS", "60")
    lines = command("explain", "loss.undefined-op").out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  3. "))
    assert all(line.startswith("     ") and len(line) <= 60 for line in lines[start + 1 : start + 3])


def test_an_unknown_code_gets_one_line_with_the_nearest_codes_and_the_way_out(command):
    result = command("explain", "lr.to-high")
    assert result.code == 2
    assert result.out == ""
    (line,) = result.error.splitlines()
    assert "'lr.to-high'" in line
    assert "lr.too-high" in line
    assert "surefoot explain" in line


def test_nonsense_is_refused_without_a_guess(command):
    result = command("explain", "qqqqzzzz")
    assert result.code == 2
    assert "did you mean" not in result.error
    assert len(result.error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "lr.too-high"), (["lr.too-high"], "learning rate"), (["nothing-like-it"], "no cause")]
)
def test_explaining_does_not_import_torch(arguments, said):
    code = "import sys; from typer.testing import CliRunner; from surefoot.cli import app; "
    code += f"ended = CliRunner().invoke(app, {['explain', *arguments]!r}); print(ended.output, ended.exception); "
    code += "assert 'torch' not in sys.modules"
    assert said in patience.run([sys.executable, "-c", code], check=True).stdout


def test_a_shell_completes_commands_and_codes(command, monkeypatch):
    def completed(line, word):
        monkeypatch.setenv("_SUREFOOT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(word))
        return command().out.split()

    assert completed("surefoot re", 1) == ["report", "replay"]
    assert completed("surefoot explain lr.", 2) == [code for code in CATALOGUE if code.startswith("lr.")]
