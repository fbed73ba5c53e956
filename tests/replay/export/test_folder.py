"""A folder becomes a reproduction only if nothing else is in it."""

import pytest

from surefoot.errors import UsageError
from surefoot.replay.export.folder import README, SCRIPT, TENSORS, clear, usable


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
