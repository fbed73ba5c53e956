"""A shadow reads like the folder it stands for, and what is done to it is not done to the folder."""

import os
import shutil

import pytest

from surefoot.diagnose.experiments import shadow


@pytest.fixture
def real(tmp_path):
    root = tmp_path / "home" / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "net.py").write_text("x = 1")
    (root / "train.py").write_text("import src.net")
    (root / "big.bin").write_bytes(b"0" * (shadow.COPIED_BYTES + 1))
    (root / "runs" / "bisect-1").mkdir(parents=True)
    (root / "link.py").symlink_to("train.py")
    (tmp_path / "home" / "data").mkdir()
    (tmp_path / "home" / "data" / "rows.csv").write_text("1,2")
    return root


def test_small_files_are_copied_and_large_ones_are_links(real, tmp_path):
    made = shadow.make(real, tmp_path / "scratch", leave_out=real / "runs" / "bisect-1")
    assert (made / "src" / "net.py").read_text() == "x = 1"
    assert not (made / "src").is_symlink()
    assert not (made / "train.py").is_symlink()
    assert (made / "big.bin").is_symlink()
    assert (made / "link.py").read_text() == "import src.net"
    assert os.listdir(made / "runs") == []


def test_what_lies_beside_the_working_directory_is_found(real, tmp_path):
    made = shadow.make(real, tmp_path / "scratch", leave_out=real / "none")
    assert (made / ".." / "data" / "rows.csv").read_text() == "1,2"
    assert os.path.exists(os.path.join(made, "..", "..", "home"))


def test_what_is_removed_or_written_in_the_shadow_stays_there(real, tmp_path):
    made = shadow.make(real, tmp_path / "scratch", leave_out=real / "none")
    (made / "train.py").write_text("")
    (made / "big.bin").unlink()
    shutil.rmtree(made / "src")
    assert (real / "train.py").read_text() == "import src.net"
    assert (real / "big.bin").exists()
    assert (real / "src" / "net.py").exists()


def test_a_folder_of_much_data_is_one_link_and_one_of_many_results_takes_new_ones(real, tmp_path, monkeypatch):
    monkeypatch.setattr(shadow, "MOST_ENTRIES", 20)
    for folder in ("images", "runs"):
        for i in range(30):
            (real / folder / f"d{i:02}").mkdir(parents=True)
            (real / folder / f"d{i:02}" / "file").write_text(str(i))
    made = shadow.make(real, tmp_path / "scratch", leave_out=real / "none")
    assert (made / "images").is_symlink()
    assert sum(len(files) for _, _, files in os.walk(made / "images")) == 30
    assert not (made / "runs").is_symlink()
    assert (made / "runs" / "d29" / "file").read_text() == "29"


def test_a_working_directory_at_the_top_has_a_shadow_too(tmp_path, monkeypatch):
    top = tmp_path.__class__(tmp_path.anchor)
    monkeypatch.setattr(shadow, "_entries", lambda folder: [])
    assert shadow.make(top, tmp_path / "scratch", leave_out=tmp_path).is_dir()


def test_a_shadow_inside_the_working_directory_does_not_hold_itself(real):
    made = shadow.make(real, real / "surefoot-replay-1" / "shadow", leave_out=real / "none")
    assert (made / "train.py").exists()
    assert not (made / "surefoot-replay-1").exists()
