"""The diagnosis of a run that has just ended in this process: what `surefoot run` says, for a trainer's callback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.diagnose.engine import diagnose_folder
from surefoot.diagnose.terminal import as_text
from surefoot.record.run_folder import write_json

if TYPE_CHECKING:
    from pathlib import Path


def conclude(folder: Path) -> tuple[str, str]:
    """Diagnose the run and write `findings.json`; returns the verdict, and what to tell the user."""
    diagnosis = diagnose_folder(folder)
    write_json(folder / "findings.json", diagnosis.as_json())
    return diagnosis.verdict, as_text(diagnosis, str(folder)).strip()
