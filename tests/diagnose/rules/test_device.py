"""What memory that runs out is put down to, from the notes of the allocator's counters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from surefoot.diagnose.engine import diagnose
from surefoot.record.facts import STEPS_ONLY, CrashFacts, HeldMemory, IncidentEvent, ModuleMemory, RunFacts

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
        "did not grow (3.00 GiB at step 41); the peak within a step was 4.00 GiB"
        in found([1.0, 2.0, *[3.0] * 40]).summary
    )
    varying = [3.0 + 0.9 * ((7 * step) % 5) for step in range(40)]  # batches of different lengths
    assert "did not grow" in found(varying).summary
    assert "did not grow" in found([1.0, 2.0, 3.0]).summary  # gradients and moments are allocated at the first steps


def test_a_first_step_that_does_not_fit_is_called_that() -> None:
    crash = CrashFacts(type="OutOfMemoryError", message=MESSAGE, site="train.py:12")
    finding = diagnose(RunFacts(crash=crash), strict=True).findings[0]
    assert "No step was completed" in finding.summary


def noted(step: int, device: str = "cuda:0", **held: float) -> list[ModuleMemory]:
    return [
        ModuleMemory(step=step, device=device, module=name, held=size * GIB, peak=size * GIB + 8 * GIB)
        for name, size in held.items()
    ]


def test_the_three_modules_that_left_most_held_in_the_last_sampled_step_are_named() -> None:
    crash = CrashFacts(type="OutOfMemoryError", message=MESSAGE, site="train.py:12")
    modules = [
        *noted(0, attention=0.5, head=1.5, tokens=0.2),
        *noted(7, head=1.5, attention=3.0, tokens=0.2, norm=0.1),
        *noted(7, device="cuda:1", other=9.0),
    ]
    held = [HeldMemory(step=step, device="cuda:0", allocated=3 * GIB, peak=4 * GIB) for step in range(8)]
    facts = RunFacts(steps=8, crash=crash, held_memory=held, module_memory=modules)
    assert RunFacts.from_json(facts.to_json()) == facts
    finding = diagnose(facts, strict=True).findings[0]
    assert (
        "In step 7, the last sampled step, the calls of these modules left the most memory allocated: `attention` "
        "3.00 GiB (0.50 GiB in step 0), `head` 1.50 GiB, `tokens` 0.20 GiB; up to 11.00 GiB were in use while "
        "`attention` ran."
    ) in finding.summary
    assert [name for name, *_ in finding.evidence["modules"]] == ["attention", "head", "tokens"]


def test_the_modules_of_a_first_step_that_does_not_fit_are_named_too() -> None:
    crash = CrashFacts(type="OutOfMemoryError", message=MESSAGE, site="train.py:12")
    summary = diagnose(RunFacts(crash=crash, module_memory=noted(0, head=60.0)), strict=True).findings[0].summary
    assert "No step was completed" in summary
    assert "`head` 60.00 GiB" in summary


NCCL = "NCCL error in: NCCLUtils.cpp:94, {}, NCCL version 2.27.5\n{}\nLast error:\n{}"
COLLECTIVES = {
    "duplicate": (
        NCCL.format("invalid usage (run with NCCL_DEBUG=WARN for details)",
                    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
                    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"),
        "`ncclInvalidUsage` (`Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000`): two ranks use",
    ),
    "memory": (
        NCCL.format("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.",
                    "Cuda failure 2 'out of memory'"),
        "`ncclUnhandledCudaError` (`Cuda failure 2 'out of memory'`): the device had no memory left",
    ),
    "timeout": (
        "NCCL communicator was aborted on rank 3.  Original reason for failure was: [Rank 3] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 600081 milliseconds.",
        "not every rank made this call in time",
    ),
    "unknown": ("NCCL error in: utils.cpp:94, internal error", "`NCCL error in: utils.cpp:94, internal error`."),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_failed_collective_is_named_with_its_kind_its_reason_and_what_that_means(kind: str) -> None:
    message, words = COLLECTIVES[kind]
    crash = CrashFacts(type="DistBackendError", message=message, site="train.py:12")
    found = diagnose(RunFacts(steps=30, crash=crash), strict=True).findings
    assert [each.cause for each in found] == ["dist.collective-failed"]
    assert words in found[0].summary


def test_a_collective_that_failed_in_a_stabilizer_is_known_from_its_log() -> None:
    words = "a collective failed: RuntimeError: [third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]"
    event = IncidentEvent(step=30, kind="dist.collective-failed", severity="error", action="", summary=words)
    (found,) = diagnose(RunFacts(scope=STEPS_ONLY, steps=30, events=[event]), strict=True).findings
    assert (found.cause, found.severity) == ("dist.collective-failed", "error")
    assert "`Connection closed by peer [127.0.0.1]`: another rank has ended or cannot be reached" in found.summary


def test_a_misfit_that_is_known_is_not_called_an_illegal_access() -> None:
    message = "CUDA error: an illegal memory access was encountered"
    crash = CrashFacts(type="AcceleratorError", message=message, site="train.py:12", calls_checked=40)
    found = diagnose(RunFacts(steps=30, crash=crash), strict=True).findings
    assert [each.cause for each in found] == ["device.illegal-access"]
    assert "The ids and labels of the last 40 calls" in found[0].summary
    known = diagnose(RunFacts(steps=30, crash=replace(crash, step=29)), strict=True).findings
    assert [each.cause for each in known] == []


def test_an_error_that_only_mentions_device_side_assertions_is_not_called_one() -> None:
    message = (
        "CUDA error: operation not permitted when stream is capturing\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    crash = CrashFacts(type="AcceleratorError", message=message, site="train.py:12")
    found = diagnose(RunFacts(steps=30, crash=crash), strict=True)
    assert (found.verdict, found.findings) == ("unknown", ())
    assert "operation not permitted when stream is capturing" in found.summary
