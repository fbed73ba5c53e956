"""A script that an error of the accelerator ends: its traceback and exit code stay, and surefoot reports one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n" + NET
ASSERT = "CUDA error: device-side assert triggered"


def test_an_error_of_the_device_keeps_its_traceback_and_gets_a_finding(watch: Nursery) -> None:
    run = watch(START, LOOP, f"raise torch.AcceleratorError({ASSERT!r})\n")
    assert run.exit_code == 1
    assert f"torch.AcceleratorError: {ASSERT}" in run.errors
    assert (run.first.cause, run.first.step) == ("device.assert", 60)
    assert "No call of embedding" in run.first.summary
    assert run.facts["problems"] == {}


def test_an_illegal_access_is_unknown_and_the_way_to_learn_more_is_named(watch: Nursery) -> None:
    message = "CUDA error: an illegal memory access was encountered"
    run = watch(START, LOOP, f"raise torch.AcceleratorError({message!r})\n")
    assert run.diagnosis.verdict == "unknown"
    assert message in run.diagnosis.summary
    assert "CUDA_LAUNCH_BLOCKING=1" in run.diagnosis.summary


def test_an_error_of_a_collective_sends_to_the_rank_that_failed_first(watch: Nursery) -> None:
    message = "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27"
    run = watch(START, LOOP, f"raise torch.distributed.DistBackendError({message!r})\n")
    assert run.diagnosis.verdict == "unknown"
    assert "NCCL_DEBUG=INFO" in run.diagnosis.summary


def test_running_out_of_memory_is_named_with_the_line_and_the_size(watch: Nursery) -> None:
    message = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.00 GiB "
        "is free."
    )
    run = watch(START, LOOP, f"raise torch.OutOfMemoryError({message!r})\n")
    assert run.exit_code == 1
    assert run.first.cause == "device.out-of-memory"
    assert "no memory for 2.50 GiB was left of 139.72 GiB" in run.first.summary
    assert "stopped watching" not in run.errors
