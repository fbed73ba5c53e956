"""Each operator changes what it says, nothing else, and leaves alone a script without a place for it."""

import ast
import difflib
from pathlib import Path

import pytest
from parent import OTHER, TEXT

from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.zoo import HALVES, Specimen
from surefoot.zoo.mutation import mutants, mutate, parent_scripts
from surefoot.zoo.mutation.operators import OPERATORS
from surefoot.zoo.mutation.source import Script

PARENT = Specimen("tuning", "healthy", Path("parent.py"))
EMPTY = "import torch\n\nprint(torch.ones(3))\n"
BY_NAME = {operator.name: operator for operator in OPERATORS}


def expected():
    """The lines that each operator removes and adds, as they were read and found right."""
    text = Path(__file__).with_name("expected.diff").read_text(encoding="utf-8")
    parts = [part.splitlines() for part in f"\n{text}".split("\n== ")[1:]]
    return {name: lines for name, *lines in parts}


def changed_lines(before, after):
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_mutant_differs_in_the_meant_place_alone(name):
    operator, text = BY_NAME[name], OTHER.get(name, TEXT)
    for strength in operator.strengths or (None,):
        mutant = mutate(PARENT, Script(text), operator, strength)
        ast.parse(mutant.text)
        if strength in (None, operator.strengths[0] if operator.strengths else None):
            assert changed_lines(text, mutant.text) == expected()[name]


@pytest.mark.parametrize("name", BY_NAME)
def test_an_operator_that_finds_nothing_to_change_makes_no_mutant(name):
    operator = BY_NAME[name]
    assert mutate(PARENT, Script(EMPTY), operator, (operator.strengths or (None,))[0]) is None
    assert operator.needs


def test_what_has_no_place_for_an_operator_is_named(tmp_path):
    script = tmp_path / "empty.py"
    script.write_text(EMPTY)
    operator = BY_NAME["drop-zero-grad"]
    found, without = mutants(operator.half, [operator], [Specimen(operator.half, "healthy", script)])
    assert found == []
    assert without == ["drop-zero-grad on empty: the script has no `zero_grad()` in a loop"]


@pytest.mark.parametrize("name", BY_NAME)
def test_an_operator_states_true_causes_unless_it_is_harmless(name):
    operator = BY_NAME[name]
    assert set(operator.causes) <= set(CATALOGUE)
    assert (operator.causes == ()) is (operator.proof == "harmless")


def test_each_half_has_operators_and_scripts_that_the_other_has_not():
    for half, other in (HALVES, HALVES[::-1]):
        mine = {operator.name for operator in OPERATORS if operator.half == half}
        assert len(mine) >= 20
        assert not mine & {operator.name for operator in OPERATORS if operator.half == other}
        assert not {s.path for s in parent_scripts(half)} & {s.path for s in parent_scripts(other)}


def test_the_first_mutants_are_the_same_sample_every_time():
    scripts = parent_scripts("tuning")[:6]
    first, _ = mutants("tuning", OPERATORS, scripts)
    second, _ = mutants("tuning", reversed(OPERATORS), reversed(scripts))
    assert [(m.label, m.parent) for m in first] == [(m.label, m.parent) for m in second]
    assert len({mutant.operator for mutant in first[:20]}) > 5


def test_the_docs_have_a_row_for_each_operator_with_its_causes_and_half():
    text = (Path(__file__).parents[3] / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    held = {row[0].strip("`"): (row[2], row[5]) for row in rows if len(row) == 6}
    told = {o.name: (", ".join(f"`{code}`" for code in o.causes) or "none", o.half) for o in OPERATORS}
    assert held == told
