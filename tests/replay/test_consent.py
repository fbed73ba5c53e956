"""Only what the user named is run, and nothing that came with the incident."""

import io
import sys

import pytest

from surefoot.errors import UsageError
from surefoot.replay.consent import asking, files_of, import_path, order_for, received


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A working directory of the user's and a run folder that came from elsewhere."""
    work, run = tmp_path / "work", tmp_path / "received"
    folder = run / "incidents" / "7"
    folder.mkdir(parents=True)
    work.mkdir()
    (work / "train.py").write_text("print('mine')\n")
    (run / "evil.py").write_text("print('theirs')\n")
    monkeypatch.chdir(work)
    return work, run, folder


def recorded(**run):
    return {"run": run}


def test_a_script_that_was_named_is_run_with_its_arguments(places):
    order = order_for(places[2], recorded(), "train.py", ("--lr", "1"), None)
    assert (order.script, order.arguments) == ("train.py", ("--lr", "1"))


def test_nothing_of_the_received_folder_is_run(places):
    work, run, folder = places
    assert received(folder) == run.resolve()
    with pytest.raises(UsageError, match="nothing in it is run"):
        order_for(folder, recorded(), str(run / "evil.py"), (), None)
    (work / "link.py").symlink_to(run / "evil.py")
    with pytest.raises(UsageError, match="nothing in it is run"):
        order_for(folder, recorded(), "link.py", (), None)
    with pytest.raises(UsageError, match="nothing in it is run"):
        order_for(folder, recorded(), None, (), f"{run / 'evil.py'}:build")


def test_the_working_directory_must_be_ones_own(places, monkeypatch):
    monkeypatch.chdir(places[1])
    with pytest.raises(UsageError, match="the working directory"):
        order_for(places[2], recorded(), "evil.py", (), None)


def test_one_way_to_name_it_and_it_must_exist(places):
    with pytest.raises(UsageError, match="use only one of"):
        order_for(places[2], recorded(), "train.py", (), "train.py:build")
    with pytest.raises(UsageError, match="no script"):
        order_for(places[2], recorded(), "missing.py", (), None)


def test_the_import_path_loses_what_was_received(places, monkeypatch):
    work, run, _ = places
    monkeypatch.setenv("PYTHONPATH", f"{run}:{work}")
    assert import_path(run.resolve()) == [str(work)]


def test_files_of_a_module_are_found_without_running_it(places, monkeypatch):
    work = places[0]
    (work / "package").mkdir()
    (work / "package" / "__init__.py").write_text("raise RuntimeError('run')\n")
    (work / "package" / "__main__.py").write_text("raise RuntimeError('run')\n")
    found = [path.name for path in files_of("package")]
    assert found == ["__init__.py", "__main__.py"]
    assert files_of("no_such_module_here") == []


def test_nobody_is_asked_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert asking() is None


def test_what_the_incident_names_is_run_only_if_the_user_agrees(places):
    folder, asked = places[2], []
    facts = {"script": {"path": "train.py", "arguments": ["--lr", "a b"]}}
    order = order_for(folder, facts, None, (), None, ask=lambda words: asked.append(words) or True)
    assert (order.script, order.arguments) == ("train.py", ("--lr", "a b"))
    assert "SHA-256" in asked[0]
    assert "--lr 'a b'" in asked[0]
    with pytest.raises(UsageError, match="nothing was run"):
        order_for(folder, facts, None, (), None, ask=lambda words: False)
    with pytest.raises(UsageError, match="--lr 'a b'"):
        order_for(folder, facts, None, (), None)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({}, "names no script"),
        ({"path": "gone.py"}, "does not exist here"),
        ({"path": "train.py", "arguments": ["x" * 5_000]}, "too long to be shown"),
        ({"path": "train.py", "redacted": True}, "was redacted"),
        ({"module": "no_such_module_here"}, "no module"),
    ],
)
def test_what_cannot_be_agreed_to_is_refused(places, script, message):
    with pytest.raises(UsageError, match=message):
        order_for(places[2], {"script": script}, None, (), None, ask=lambda words: True)
