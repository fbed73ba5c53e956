"""A copy reads like the folder it stands for, and what is done to it is not done to the folder."""

import os
import shutil
import socket
import sqlite3
import subprocess
import time

import pytest

from patience import HANG_SECONDS
from surefoot.errors import UsageError
from surefoot.experiments import processes as children
from surefoot.experiments import sandbox as confine
from surefoot.experiments import scratch_folder


@pytest.fixture
def real(tmp_path):
    root = tmp_path / "home" / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "net.py").write_text("x = 1")
    (root / "train.py").write_text("import src.net")
    (root / "big.bin").write_bytes(b"0" * 5_000_000)
    (root / "runs" / "bisect-1").mkdir(parents=True)
    (root / "link.py").symlink_to("train.py")
    (tmp_path / "home" / "data").mkdir()
    (tmp_path / "home" / "data" / "rows.csv").write_text("1,2")
    return root


def test_every_file_is_a_copy_however_large(real, tmp_path):
    made = scratch_folder.make(real, tmp_path / "scratch", leave_out=real / "runs" / "bisect-1")
    assert (made / "src" / "net.py").read_text() == "x = 1"
    assert not [path for path in made.rglob("*") if path.is_symlink() and path.name != "link.py"]
    assert (made / "big.bin").stat().st_ino != (real / "big.bin").stat().st_ino
    assert (made / "link.py").read_text() == "import src.net"
    assert os.listdir(made / "runs") == []


def test_links_pipes_holes_and_twins_of_a_file_are_what_they_were(real, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("far")
    (real / "far").symlink_to(tmp_path / "elsewhere" / "file")
    (real / "folder").symlink_to(tmp_path / "elsewhere")
    (real / "absolute.py").symlink_to(real / "train.py")
    (real / "itself").symlink_to(".")
    (real / "dangling").symlink_to(tmp_path / "nowhere")
    os.link(real / "train.py", real / "twin.py")
    os.mkfifo(real / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(real)  # the name of a socket may not be long
        listening.bind("socket")
    with open(real / "sparse", "wb") as file:
        file.seek(1 << 40)
        file.write(b"end")
    made = scratch_folder.make(real, tmp_path / "scratch", leave_out=real / "none")
    for name in ("link.py", "absolute.py", "twin.py", "far"):
        (made / name).write_text("changed")
    assert (made / "train.py").read_text() == "changed"
    assert (real / "train.py").read_text() == "import src.net"
    assert (tmp_path / "elsewhere" / "file").read_text() == "far"
    assert (made / "folder" / "file").read_text() == "far"
    assert os.path.realpath(made / "itself") == os.path.realpath(made)
    assert not {"pipe", "socket", "dangling"} & set(os.listdir(made))
    assert (made / "sparse").stat().st_size == (1 << 40) + 3
    assert (made / "sparse").stat().st_blocks < 1000
    with open(made / "sparse", "rb") as file:
        file.seek(1 << 40)
        assert file.read() == b"end"


def test_what_lies_beside_the_working_directory_is_found(real, tmp_path):
    made = scratch_folder.make(real, tmp_path / "scratch", leave_out=real / "none")
    assert (made / ".." / "data" / "rows.csv").read_text() == "1,2"
    assert os.path.exists(os.path.join(made, "..", "..", "home"))


def test_what_is_removed_or_written_in_the_shadow_stays_there(real, tmp_path):
    made = scratch_folder.make(real, tmp_path / "scratch", leave_out=real / "none")
    (made / "train.py").write_text("")
    (made / "big.bin").unlink()
    shutil.rmtree(made / "src")
    assert (real / "train.py").read_text() == "import src.net"
    assert (real / "big.bin").exists()
    assert (real / "src" / "net.py").exists()


@pytest.mark.parametrize(("limit", "value"), [("MOST_COPIED_BYTES", 20_000), ("MOST_ENTRIES", 20)])
def test_too_much_is_refused_by_name_and_can_be_shared(real, tmp_path, monkeypatch, limit, value):
    monkeypatch.setattr(scratch_folder, limit, value)
    (real / "big.bin").unlink()
    for i in range(30):
        (real / "data" / f"d{i:02}").mkdir(parents=True)
        (real / "data" / f"d{i:02}" / "file").write_text("0" * 1000)
    (real / ".venv" / "lib").mkdir(parents=True)
    (real / ".venv" / "pyvenv.cfg").write_text("home = /usr")
    (real / ".venv" / "lib" / "torch.so").write_bytes(b"0" * 50_000)
    with pytest.raises(UsageError, match=r"The largest: data \(.*61 entries\).*--share data"):
        scratch_folder.make(real, tmp_path / "scratch", leave_out=real / "none")
    share = scratch_folder.shared(["data"], real)
    made = scratch_folder.make(real, tmp_path / "again", leave_out=real / "none", share=share)
    assert (made / "data").is_symlink()
    assert sum(len(files) for _, _, files in os.walk(made / "data")) == 30
    assert (made / ".venv").is_symlink()
    assert not (made / "train.py").is_symlink()


@pytest.mark.parametrize(("given", "said"), [("nowhere", "does not exist"), ("..", "not inside"), (".", "not inside")])
def test_what_cannot_be_shared_is_refused(real, given, said):
    with pytest.raises(UsageError, match=said):
        scratch_folder.shared([given], real)


WRITES = """
import mmap, os, sqlite3, subprocess, sys
elsewhere = sys.argv[1]
with sqlite3.connect("study.db") as database:
    database.executemany("insert into rows values (?)", [(i,) for i in range(51)])
database.close()
with open("big.bin", "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    mapped[:4] = b"0000"
    mapped.close()
subprocess.run(["sh", "-c", "echo more >> big.bin; echo more >> notes.txt; rm src/net.py"])
if "--outside" in sys.argv:
    subprocess.run(["sh", "-c", f"echo more >> {elsewhere}/file; rm {elsewhere}/other; touch {elsewhere}/new"])
    try:
        with sqlite3.connect(f"{elsewhere}/study.db") as database:
            database.execute("insert into rows values (1)")
    except sqlite3.OperationalError:
        pass
with open("done", "w") as file:
    file.write("done")
os.replace("done", os.environ["DONE"])
"""


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_nobody_can_change_a_file_of_the_users(real, tmp_path, monkeypatch, where):
    """A real run, without torch: sqlite, a memory map and another process write, to files large and small."""
    if where == "outside" and not can_confine():
        pytest.skip("this kernel cannot confine a process")
    for folder in (real, tmp_path / "home" / "data"):
        with sqlite3.connect(folder / "study.db") as database:
            database.execute("create table rows (n)")
            database.execute("create table padding (b blob)")
            database.execute("insert into padding values (zeroblob(6000000))")
        database.close()
    (tmp_path / "home" / "data" / "file").write_text("precious")
    (tmp_path / "home" / "data" / "other").write_text("precious")
    (real / "notes.txt").write_text("precious")
    (real / "write.py").write_text(WRITES)
    before = contents(tmp_path / "home")
    monkeypatch.setenv("DONE", str(tmp_path / "out" / "done"))
    arguments = (str(tmp_path / "home" / "data"), f"--{where}")
    subject = children.Subject("write.py", arguments, folder=real)
    with children.Children(subject, tmp_path / "out", threads=1) as runs:
        child = runs.start("baseline", {})
        runs.wait(until=time.monotonic() + HANG_SECONDS)
    assert (tmp_path / "out" / "done").read_text() == "done", (child.folder / children.OUTPUT).read_text()
    assert contents(tmp_path / "home") == before


def can_confine():
    """Asked of a process of its own: what is confined stays so."""
    command = [*confine.confined([]), "/bin/sh", "-c", ": > /dev/null"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0


def test_a_working_directory_at_the_top_has_a_shadow_too(tmp_path, monkeypatch):
    top = tmp_path.__class__(tmp_path.anchor)
    monkeypatch.setattr(scratch_folder, "_entries", lambda folder: [])
    assert scratch_folder.make(top, tmp_path / "scratch", leave_out=tmp_path).is_dir()


def test_a_shadow_inside_the_working_directory_does_not_hold_itself(real):
    made = scratch_folder.make(real, real / "surefoot-replay-1" / "shadow", leave_out=real / "none")
    assert (made / "train.py").exists()
    assert not (made / "surefoot-replay-1").exists()
