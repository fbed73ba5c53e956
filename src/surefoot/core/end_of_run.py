"""The diagnosis at the end of a run that a program records from inside, as a trainer's callback does.

The diagnosis belongs to a layer above those that record runs. So the package `surefoot` sets `conclude` when it is
imported.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

conclude: Callable[[Path], tuple[str, str]] | None = None
"""Diagnoses the run in a folder and writes `findings.json` there; returns the verdict, and the text for the user."""
