"""A folder becomes a reproduction only if nothing else is in it, and if its script fails without surefoot."""

import pytest

from surefoot.errors import UsageError
from surefoot.replay.export.folder import README, SCRIPT, TENSORS, clear, fails_alone, usable


def test_a_new_an_empty_and_an_old_reproduction_may_be_used(tmp_path):
    new = tmp_path / "new"
    assert usable(new) == new
    assert usable(tmp_path) == tmp_path
    (tmp_path / SCRIPT).write_text("")
    assert usable(tmp_path) == tmp_path


def test_other_files_are_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="contains other files"):
        usable(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        usable(tmp_path / "notes.txt")
    for name in (SCRIPT, TENSORS, README):
        (tmp_path / name).write_text("")
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("lines", "alone", "words"),
    [
        ("import sys\nsys.exit('reproduced: 1 NaN')", True, "reproduced: 1 NaN"),
        ("import sys\nsys.exit('reproduced: 1 NaN, recorded were 2')", False, "reproduced: 1 NaN, recorded were 2"),
        ("print('not reproduced')", False, "not reproduced"),
        ("import surefoot", False, "ImportError: a reproduction must not need surefoot"),
    ],
)
def test_the_script_is_run_alone(tmp_path, lines, alone, words):
    (tmp_path / SCRIPT).write_text(lines)
    assert fails_alone(tmp_path) == (alone, words)
