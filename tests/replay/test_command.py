"""What `replay` refuses before anything is run, and which files of an incident it copies."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from captured import capture, incidents_in
from surefoot.errors import UsageError
from surefoot.replay.command import _link, replay

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_that_is_no_incident_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not an incident"):
        replay(tmp_path, script="train.py")


def test_a_run_folder_is_answered_with_its_first_incident(tmp_path: Path) -> None:
    capture(tmp_path, "mlp", step=(2, 4))
    first = incidents_in(tmp_path)[0]
    with pytest.raises(UsageError, match=f"pass one of its incidents: .*{first.name}"):
        replay(tmp_path)
    with pytest.raises(UsageError, match=r"there is no script 'nowhere\.py'"):
        replay(first, script="nowhere.py")
    with pytest.raises(UsageError, match="use only one of --script, --module and --target"):
        replay(first, script="a.py", target="b:c")


def test_pipes_of_an_incident_are_not_copied(tmp_path: Path) -> None:
    source = tmp_path / "incident"
    source.mkdir()
    (source / "incident.json").write_text("{}")
    os.mkfifo(source / "pipe")
    shutil.copytree(source, tmp_path / "kept", symlinks=True, copy_function=_link)
    assert [each.name for each in (tmp_path / "kept").iterdir()] == ["incident.json"]
    assert os.path.samefile(source / "incident.json", tmp_path / "kept" / "incident.json")
