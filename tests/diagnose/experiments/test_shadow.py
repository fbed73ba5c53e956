"""A shadow reads like the folder it stands for, and what is done to it is not done to the folder."""

import os
import shutil

from surefoot.diagnose.experiments import shadow


def a_project(root):
    (root / "src").mkdir(parents=True)
    (root / "src" / "net.py").write_text("x = 1")
    (root / "train.py").write_text("import src.net")
    (root / "big.bin").write_bytes(b"0" * (shadow.COPIED_BYTES + 1))
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("ref")
    (root / "runs" / "bisect-1").mkdir(parents=True)
    (root / "link.py").symlink_to("train.py")
    return root


def test_small_files_are_copied_and_large_ones_are_links(tmp_path):
    real, made = a_project(tmp_path / "real"), tmp_path / "scratch" / "work"
    shadow.make(real, made, leave_out=real / "runs" / "bisect-1")
    assert (made / "src" / "net.py").read_text() == "x = 1"
    assert not (made / "src").is_symlink()
    assert not (made / "train.py").is_symlink()
    assert (made / "big.bin").is_symlink()
    assert (made / ".git").is_symlink()
    assert (made / "link.py").read_text() == "import src.net"
    assert os.listdir(made / "runs") == []


def test_what_is_removed_or_written_in_the_shadow_stays_there(tmp_path):
    real, made = a_project(tmp_path / "real"), tmp_path / "work"
    shadow.make(real, made, leave_out=real / "none")
    (made / "train.py").write_text("")
    (made / "big.bin").unlink()
    shutil.rmtree(made / "src")
    assert (real / "train.py").read_text() == "import src.net"
    assert (real / "big.bin").exists()
    assert (real / "src" / "net.py").exists()


def test_a_huge_folder_costs_no_more_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(shadow, "MOST_ENTRIES", 20)
    for i in range(30):
        (tmp_path / "real" / f"d{i:02}" / "deep").mkdir(parents=True)
        (tmp_path / "real" / f"d{i:02}" / "deep" / "file").write_text(str(i))
    shadow.make(tmp_path / "real", tmp_path / "work", leave_out=tmp_path / "none")
    assert (tmp_path / "work" / "d29" / "deep" / "file").read_text() == "29"
    assert (tmp_path / "work" / "d29").is_symlink()
    assert (tmp_path / "work" / "d00" / "deep").is_symlink()
