"""What memory that runs out is put down to, from the notes of the allocator's counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.diagnose.engine import diagnose
from surefoot.record.facts import CrashFacts, HeldMemory, RunFacts

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Finding

GIB = 2.0**30
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 0 is free."


def found(held: list[float], device: str = "cuda:0") -> Finding:
    notes = [
        HeldMemory(step=step, device=device, allocated=size * GIB, peak=size * GIB + GIB)
        for step, size in enumerate(held)
    ]
    crash = CrashFacts(type="OutOfMemoryError", message=MESSAGE, site="train.py:12")
    facts = RunFacts(
        steps=len(held), crash=crash, held_memory=[HeldMemory(step=0, device="cuda:1", allocated=1.0, peak=1.0), *notes]
    )
    assert RunFacts.from_json(facts.to_json()) == facts
    first, *_ = diagnose(facts, strict=True).findings
    assert first.cause == "device.out-of-memory"
    assert "train.py:12" in first.summary
    assert "20.0 MiB" in first.summary
    return first


def test_memory_that_grew_with_every_step_is_named_with_its_beginning() -> None:
    finding = found([1.0, 2.0, *[3.0] * 10, *[3.0 + 0.5 * step for step in range(1, 20)]])
    assert "grew from 3.00 GiB at step 11 to 12.50 GiB at step 30, by 0.50 GiB per step" in finding.summary


def test_memory_that_did_not_grow_is_not_blamed() -> None:
    assert (
        "did not grow (3.00 GiB at step 41); within a step the most so far was 4.00 GiB"
        in found([1.0, 2.0, *[3.0] * 40]).summary
    )
    varying = [3.0 + 0.9 * ((7 * step) % 5) for step in range(40)]  # batches of different lengths
    assert "did not grow" in found(varying).summary
    assert "did not grow" in found([1.0, 2.0, 3.0]).summary  # gradients and moments are allocated at the first steps


def test_a_first_step_that_does_not_fit_is_called_that() -> None:
    crash = CrashFacts(type="OutOfMemoryError", message=MESSAGE, site="train.py:12")
    finding = diagnose(RunFacts(crash=crash), strict=True).findings[0]
    assert "No step was completed" in finding.summary
