"""A run folder may come from a stranger: nothing is written through a link in it, by any command."""

from __future__ import annotations

import ast
import os
import resource
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

import surefoot as sf
from surefoot.core.files import OwnedFile, append_all, make_subfolder, new_file, write_file
from surefoot.core.redaction import Redactor
from surefoot.diagnose.engine import load
from surefoot.errors import UsageError
from surefoot.experiments import processes as children
from surefoot.record.incidents.bundle import IncidentKeeper, write_incident
from surefoot.record.run_folder import write_json
from surefoot.report.page.html import write_report

ROOT = Path(sf.__file__).parent


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder."""
    folder = tmp_path / "run"
    with sf.RunLog(folder) as log:
        log.event("checkpoint", 0, "the first")
    write_json(folder / "run.json", {"schema": 1, "script": "train.py"})
    return folder


@pytest.mark.parametrize("name", ["report.html", "report.html.part"])
def test_a_report_is_not_written_through_a_link(run: Path, precious: Path, name: str) -> None:
    (run / name).symlink_to(precious)
    page = write_report(run)
    assert precious.read_text() == "precious"
    assert not page.is_symlink()
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["run.json", "run.json.part", "findings.json", "facts.json.part"])
def test_json_is_not_written_through_a_link(run: Path, precious: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(precious)
    write_json(run / name.removesuffix(".part"), {"x": 1})
    assert precious.read_text() == "precious"
    assert (run / name.removesuffix(".part")).read_text() == '{"x":1}'


def test_a_file_is_replaced_whole_and_nothing_is_left_over(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    os.link(_made(tmp_path / "twin", "old"), path)
    write_file(path, "new \udc80")
    assert path.read_text() == "new ?"
    assert (tmp_path / "twin").read_text() == "old"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_file(tmp_path / "folder", "x")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.txt", "folder", "twin"]


def _made(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_new_file_and_a_subfolder_are_no_links(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "not there")
    for name in ("link", "dangling"):
        with pytest.raises(FileExistsError):
            new_file(tmp_path / name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="a link"):
        make_subfolder(tmp_path / "linked")
    make_subfolder(tmp_path / "elsewhere")
    make_subfolder(tmp_path / "deep" / "er")
    assert (tmp_path / "deep" / "er").is_dir()


def test_a_run_log_does_not_append_through_a_link(tmp_path: Path, precious: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").symlink_to(precious)
    with sf.RunLog(folder) as log:
        log.event("checkpoint", 0, "the first")
    assert precious.read_text() == "precious"


def test_a_run_log_does_not_write_into_a_linked_folder_nor_wait_for_a_pipe(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "telemetry").symlink_to(elsewhere)
    with sf.RunLog(folder) as log:
        log.event("checkpoint", 0, "the first")
    assert list(elsewhere.iterdir()) == []
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "events.jsonl")
    with sf.RunLog(tmp_path / "piped") as log:
        log.event("checkpoint", 0, "the first")
        assert not log.flush(30.0)


def test_an_incident_is_not_written_into_a_linked_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "incidents").symlink_to(elsewhere)
    keeper = IncidentKeeper(tmp_path)
    with pytest.raises(NotADirectoryError):
        write_incident(keeper.place(1), {"step": 1}, {}, keeper, Redactor())
    assert list(elsewhere.iterdir()) == []


def test_a_bisection_does_not_write_into_a_linked_folder_of_its_results(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "facts.json").write_text("precious")
    (tmp_path / "out" / "baseline").symlink_to(tmp_path / "elsewhere")
    subject = children.Subject("train.py", folder=tmp_path / "work")
    with children.Children(subject, tmp_path / "out", threads=1) as runs, pytest.raises(UsageError, match="--out"):
        runs.start("baseline", {})
    assert (tmp_path / "elsewhere" / "facts.json").read_text() == "precious"


@pytest.mark.parametrize("name", ["run.json", "facts.json", "findings.json", "events.jsonl", "bisect.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(run: Path, name: str) -> None:
    write_json(run / "facts.json", {"schema": 1, "steps": 0})
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    signal.alarm(120)  # to end a hang
    try:
        assert write_report(run).is_file()
        with pytest.raises(UsageError, match="damaged") if name in ("run.json", "facts.json") else nullcontext():
            load(run)
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "\xff", "{"])
def test_facts_that_are_none_are_refused_in_one_line(run: Path, text: str) -> None:
    (run / "facts.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="damaged"):
        load(run)


# ---- no other writers -----------------------------------------------------------------------------------------------

WRITERS = {
    "core/files.py": "this is the one",
    "core/folder_lock.py": "a lock file of its own; follows no link",
    "record/events.py": "appends to events.jsonl; refuses links",
    "record/thinning.py": "renames a new file of telemetry over an old one",
    "keep/checkpoint/tensor_file.py": "new files in a new folder",
    "keep/checkpoint/folders.py": "makes and renames new folders",
    "keep/checkpoint/manifest.py": "reads, and refuses links",
    "build/standardize.py": "a file that the user names",
    "build/find_lr.py": "a file that the user names",
    "record/sinks/tensorboard.py": "a folder that the user names, for another program",
    "experiments/scratch_folder.py": "a scratch folder",
    "experiments/processes.py": "the output of its own runs, in a new file",
    "experiments/sandbox.py": "opens folders to name them",
    "replay/processes.py": "a scratch folder",
    "replay/worker.py": "a scratch folder",
    "replay/command.py": "a scratch folder, and back what a script has removed",
    "experiments/changes/guard.py": "a scratch folder",
    "zoo/demo/train.py": "a script of the user's",
    "zoo/score.py": "a scratch folder",
    "zoo/fork_server.py": "the output of its own runs, in a scratch folder",
    "commands/zoo.py": "a file that the user names",
    "commands/zoo_mutate.py": "a file and a folder that the user names",
    "zoo/mutation/runs.py": "a script in a scratch folder",
    "keep/checkpoint/exchange.py": "a new file that the user names, never over another one",
    "keep/checkpoint/listing.py": "renames folders of its own",
    "record/heartbeat.py": "writes its own new file again and again; refuses links",
    "record/rank_file.py": "appends to rank.jsonl; refuses links",
    "zoo/rank_runs.py": "the output of its own runs, in a scratch folder",
}
"""Files of the package that open files for writing by themselves, and why they may."""
_METHODS = {"write_text", "write_bytes", "symlink_to", "hardlink_to", "touch", "rename", "save_file"}
_FUNCTIONS = {"os.open", "os.replace", "os.rename", "os.truncate", "os.link", "os.symlink"}


def writes_in(source: str) -> list[int]:
    """The lines of a file that write to the disk by themselves."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _writes(call)]


def _writes(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    last = name.rsplit(".", 1)[-1]
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if last == "open" and name != "os.open":
        return any(set(text) & set("wax+") and len(text) <= 3 for text in texts)
    if last == "replace" and name != "os.replace":  # of a path, not of a text or a dataclass
        return len(call.args) == 1 and not call.keywords and not texts
    return name in _FUNCTIONS or last in _METHODS or name.startswith("shutil.copy")


def test_nothing_else_in_the_package_writes_files_by_itself() -> None:
    scripts = ("zoo/tuning", "zoo/testing", "zoo/healthy", "zoo/field", "zoo/ranks")
    strangers = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name in WRITERS or name.startswith(scripts):
            continue
        if lines := writes_in(path.read_text(encoding="utf-8")):
            strangers[name] = lines
    assert strangers == {}, "use `surefoot.core.files.write_file`, or say in WRITERS why not"


@pytest.mark.parametrize(
    "line",
    [
        "path.write_text(text)",
        "(folder / 'x.json').write_bytes(b'')",
        "open(path, 'w')",
        "path.open('ab')",
        "open(path, mode='x')",
        "os.replace(a, b)",
        "part.replace(path)",
        "shutil.copyfile(a, b)",
        "os.open(path, flags)",
        "save_file(tensors, path)",
    ],
)
def test_a_writer_would_be_found(line: str) -> None:
    assert writes_in(line)
    assert not writes_in("open(path).read(); open(path, 'rb'); text.replace('a', 'b'); replace(batch, x=1)")


# ---- files that stay open -------------------------------------------------------------------------------------------


def test_a_file_whose_descriptor_belongs_to_another_file_is_neither_used_nor_closed(tmp_path: Path) -> None:
    own = OwnedFile(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    number = own.number
    os.close(number)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == number, "the lowest free descriptor is used again"
    with pytest.raises(OSError, match="closed by other code"):
        own.number  # noqa: B018
    assert not own.is_at(tmp_path / "own")
    own.close()
    assert os.write(other, b"still open") == 10
    os.close(other)


def test_a_file_is_at_its_path_until_it_is_replaced(tmp_path: Path) -> None:
    own = OwnedFile(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    assert own.is_at(tmp_path / "own")
    write_file(tmp_path / "own", "another")
    assert not own.is_at(tmp_path / "own")
    own.close()


def test_what_cannot_be_appended_whole_is_removed_again(tmp_path: Path) -> None:
    file = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    append_all(file, b"first\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, hard))  # room for three more bytes
    try:
        with pytest.raises(OSError, match="too large"):
            append_all(file, b"second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(file)
    assert (tmp_path / "log").read_bytes() == b"first\n"
