"""No object of the script's lives longer because it is watched."""

import shutil
from pathlib import Path

from running import both


def test_every_object_dies_at_the_line_it_dies_at_without_us(tmp_path):
    shutil.copy(Path(__file__).with_name("lifetimes.py"), tmp_path / "script.py")
    plain, watched = both(tmp_path, "script.py")
    assert "alive []" in plain.stdout
    assert "stopped watching" not in watched.stderr
