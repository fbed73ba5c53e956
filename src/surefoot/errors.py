"""The exceptions that surefoot raises, in one tree.

::

    SurefootError
    ├── SettingError      (also a ValueError)    a setting that cannot work, found at construction
    ├── UsageError        (also a RuntimeError)  calls in an order, or on objects, that cannot work
    ├── CheckpointError   (also a RuntimeError)  a checkpoint that cannot be written or used; names the fault
    ├── FolderInUse       (also a RuntimeError)  another process writes into the folder; names it
    ├── RankFailed        (also a RuntimeError)  another rank failed, so this one cannot continue either
    └── TrainingHalted    (also a RuntimeError)  every attempt to continue is used up; contains the incident

A message contains what was passed, what was expected, and how to fix it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `surefoot run` needs this file before the script, when nothing may be imported
if TYPE_CHECKING:
    from collections.abc import Iterator

    from surefoot.types import Incident


class SurefootError(Exception):
    """The base class of all exceptions that surefoot raises on purpose."""


class SettingError(SurefootError, ValueError):
    """A setting with an invalid value."""


class UsageError(SurefootError, RuntimeError):
    """A call at the wrong time, or on the wrong object."""


class CheckpointError(SurefootError, RuntimeError):
    """A checkpoint that cannot be written, or cannot be used: damaged, incomplete, or of another run."""


class FolderInUse(SurefootError, RuntimeError):
    """Another process is writing into the folder of a run."""


class RankFailed(SurefootError, RuntimeError):
    """Another rank failed; the reason is in its own output."""


class TrainingHalted(SurefootError, RuntimeError):
    """The run was stopped because every attempt to continue is used up."""

    def __init__(self, message: str, incident: Incident) -> None:
        super().__init__(message)
        self.incident = incident
        """The incident of the step that used up the last attempt."""


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def require(condition: bool, message: str) -> None:
    """Raise `SettingError` with `message` unless `condition` holds."""
    if not condition:
        raise SettingError(message)
