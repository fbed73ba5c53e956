"""Edits by position: everything else of a text stays, byte for byte."""

import pytest

from surefoot.zoo.mutation.source import Edit, Script


def test_positions_are_right_behind_letters_of_several_bytes():
    script = Script('"""Größe."""\ntitle = "Ω"; optimizer.step()  # später\n')
    (call,) = script.calls("step")
    statement = script.statement(call)
    assert script.words(statement) == "optimizer.step()"
    assert script.edited([script.drop(statement)]) == '"""Größe."""\ntitle = "Ω"; pass  # später\n'


def test_a_statement_is_added_at_the_same_depth():
    script = Script("for x in y:\n\tstep()  # comment\n")
    (call,) = script.calls("step")
    statement = script.statement(call)
    assert script.edited([script.before(statement, "a()")]) == "for x in y:\n\ta()\n\tstep()  # comment\n"
    assert script.edited([script.after(statement, "a()")]) == "for x in y:\n\tstep()\n\ta()  # comment\n"


def test_a_statement_is_added_between_others_of_its_line():
    script = Script("for x in y: first(); step()\n")
    (call,) = script.calls("step")
    statement = script.statement(call)
    assert script.edited([script.before(statement, "a()")]) == "for x in y: first(); a(); step()\n"
    assert script.edited([script.after(statement, "a()")]) == "for x in y: first(); step(); a()\n"


def test_edits_that_overlap_are_refused():
    with pytest.raises(ValueError, match="overlap at byte 1"):
        Script("abc").edited([Edit(0, 2, "x"), Edit(1, 3, "y")])
