"""Rewrite the golden files: `python tests/goldens/write.py [NAME ...]`, then review `git diff tests/goldens`.

Without names every text of the current version is written. Files of an earlier version of a format (`v1/`) are evidence
and are never rewritten; `--version FOLDER [FORMAT ...]` writes those of the current version into a new folder, such as
`v2`: of the formats that have changed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).parents[1])  # as the tests import it

from goldens.golden import FOLDER  # noqa: E402
from goldens.texts import TEXTS  # noqa: E402
from goldens.version_files import MAKERS, pack  # noqa: E402


def write_texts(names: list[str]) -> None:
    """Write the texts with these names, or all."""
    unknown = [name for name in names if name not in TEXTS]
    if unknown:
        sys.exit(f"no golden {', '.join(unknown)}; there are: {', '.join(TEXTS)}")
    for name in names or [each for each in TEXTS if not each.startswith("v1/")]:
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            path.write_text(TEXTS[name](Path(scratch)), encoding="utf-8")
        print(name)


def write_version(name: str, archives: list[str]) -> None:
    """Write files as they are now, of these formats or of all, into a folder that does not have them yet."""
    there = [archive for archive in archives or MAKERS if (FOLDER / name / f"{archive}.tar.xz").exists()]
    if there:
        sys.exit(f"{name} has {', '.join(there)} already, and files of a version are not rewritten; give a new name.")
    (FOLDER / name).mkdir(exist_ok=True)
    for archive, make in MAKERS.items():
        if archives and archive not in archives:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            make(Path(scratch))
            pack(Path(scratch), FOLDER / name / f"{archive}.tar.xz")
        print(f"{name}/{archive}.tar.xz")


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the tests
    if sys.argv[1:2] == ["--version"] and len(sys.argv) >= 3:
        write_version(sys.argv[2], sys.argv[3:])
    else:
        write_texts(sys.argv[1:])
