"""Every golden that is text, by the name of its file, and what makes it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from goldens.interface import help_text, public_names
from goldens.reports import RUNS, report_data
from goldens.version_files import version_1_texts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS: dict[str, Callable[[Path], str]] = {
    "help.txt": lambda scratch: help_text(),
    "public_names.txt": lambda scratch: public_names(),
    **{f"reports/{name}.json": partial(report_data, name) for name in RUNS},
    **dict(version_1_texts()),
}
"""Each is given an empty folder."""
