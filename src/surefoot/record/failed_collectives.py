"""The event of a collective of several ranks (NCCL, gloo) that failed.

Not covered: a process that NCCL's watchdog aborts, in which no Python code runs any more.
"""

from __future__ import annotations

import time

from surefoot.record.messages import Event

COLLECTIVE_FAILED = "dist.collective-failed"
"""The cause of the event."""
_KINDS = frozenset({"DistBackendError", "DistNetworkError"})
COLLECTIVE_WORDS = (
    "NCCL error",
    "NCCL timeout",
    "NCCL communicator was aborted",
    "/gloo/",
    "collective operation timeout",
)
"""Parts of the messages of errors of collectives."""
_LONGEST = 400


def failed_collective(error: BaseException | None) -> BaseException | None:
    """The error of a collective among an error and its causes; `None` if there is none.

    >>> failed_collective(RuntimeError("NCCL error in: ProcessGroupNCCL.cpp")) is not None
    True
    """
    for _ in range(20):
        if error is None:
            return None
        kinds = {kind.__name__ for kind in type(error).__mro__}
        text = str(error) if isinstance(error, RuntimeError) else ""
        if kinds & _KINDS or any(part in text for part in COLLECTIVE_WORDS):
            return error
        error = error.__cause__ or error.__context__
    return None


def collective_event(error: BaseException, step: int | None) -> Event:
    """The event for a collective that raised an error."""
    kind, words = type(error).__name__, " ".join(str(error).split())[:_LONGEST]
    evidence = {"error": kind}
    return Event(
        "alarm",
        step,
        f"a collective failed: {kind}: {words}",
        time.time(),
        "error",
        COLLECTIVE_FAILED,
        evidence=evidence,
    )
