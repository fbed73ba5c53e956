"""Data loaders: worker processes that die. torch's error shows how, which separates the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from surefoot.diagnose.rule import Claim, Rule
from surefoot.keep.dead_workers import WORKER_DIED, worker_death

if TYPE_CHECKING:
    from surefoot.diagnose.run import RecordedRun


class _Meaning(NamedTuple):
    """The reason that a signal indicates, and what to do about it."""

    why: str
    fix: str


_SIGNALS = {
    "Killed": _Meaning(
        "The kernel sends this signal when memory runs out, and a container or a scheduler at its memory limit",
        "Lower `num_workers` or `prefetch_factor` by half, and look for what grows in the data set: each worker has "
        "a copy of every Python object that it touches.",
    ),
    "Bus error": _Meaning(
        "Batches go to the main process through shared memory, and this error means that it is full",
        "Give the container more shared memory (`docker run --shm-size=8g`, or `--ipc=host`).",
    ),
    "Segmentation fault": _Meaning(
        "Compiled code in the data set or its libraries (decoders, tokenizers, HDF5) accessed invalid memory",
        "Run with `num_workers=0` and `python -X faulthandler`: the traceback names the call.",
    ),
    "Terminated": _Meaning(
        "Another process asked it to end: a scheduler that preempts the job, or a script that ends its children",
        "Look at the scheduler's log for the time of the error.",
    ),
}


def worker_died(run: RecordedRun) -> Claim | None:
    """The script ended because a worker of a data loader did."""
    crash = run.facts.crash
    death = worker_death(crash.message) if crash is not None else None
    if crash is None or death is None:
        return None
    known = _SIGNALS.get(death.signal)
    why = f" {known.why}." if known is not None else ""
    loaders = [
        f"{each.workers} workers, batch size {each.batch_size} ({each.site})"
        for each in run.facts.loaders
        if each.workers
    ]
    whose = f" Loaders with workers: {'; '.join(loaders[:3])}." if loaders else ""
    return Claim(
        0.95,
        f"After {run.steps:,} steps {death.how}, and torch ended the script at {crash.site or 'no line of its own'}."
        f"{why}{whose}",
        where=(crash.site or "",),
        evidence={
            "message": crash.message[:300],
            "pids": list(death.pids),
            "signal": death.signal,
            "exit_code": death.exit_code,
        },
        fixes=() if known is None else (known.fix,),
    )


RULES = (Rule(WORKER_DIED, "crash", worker_died),)
