"""Rewrite the golden files: `python tests/goldens/write.py [NAME ...]`, then review `git diff tests/goldens`.

Without names every text is written. Files of an earlier version of a format (`v1/`) are evidence and are never
rewritten; `--version FOLDER` writes those of the current version into a new folder, such as `v2`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # as the tests import it

from goldens.golden import FOLDER  # noqa: E402
from goldens.texts import TEXTS  # noqa: E402


def main(names: list[str]) -> None:
    """Write the texts with these names, or all."""
    unknown = [name for name in names if name not in TEXTS]
    if unknown:
        sys.exit(f"no golden {', '.join(unknown)}; there are: {', '.join(TEXTS)}")
    for name in names or TEXTS:
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            path.write_text(TEXTS[name](Path(scratch)), encoding="utf-8")
        print(path.relative_to(FOLDER))


if __name__ == "__main__":
    main(sys.argv[1:])
