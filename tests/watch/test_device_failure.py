"""A script that an error of the accelerator ends: its traceback and exit code stay, and surefoot reports one thing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import forked
from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from pathlib import Path

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


def test_an_illegal_access_is_named_and_the_way_to_learn_more_too(watch: Nursery) -> None:
    message = (
        "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in "
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel "
        "errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    run = watch(START, LOOP, f"raise torch.AcceleratorError({message!r})\n")
    assert run.exit_code == 1
    assert f"torch.AcceleratorError: {message.splitlines()[0]}" in run.errors
    assert (run.first.cause, run.first.step) == ("device.illegal-access", 60)
    assert "`an illegal memory access was encountered`, which was reported at train.py:" in run.first.summary
    assert "CUDA_LAUNCH_BLOCKING=1" in run.first.fixes[0]


def test_an_error_of_a_collective_is_named_with_its_kind_and_its_reason(watch: Nursery) -> None:
    message = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a "
        "network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer"
    )
    run = watch(START, LOOP, f"raise torch.distributed.DistBackendError({message!r})\n")
    assert (run.first.cause, run.first.step) == ("dist.collective-failed", 60)
    assert "`ncclRemoteError` (`socketProgress: Connection closed by remote peer`): another rank" in run.first.summary
    assert "the rank that ended first" in run.first.fixes[0]


LEFT_ALONE = """
import os
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    if rank == 1 and step == 12:
        os._exit(0)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the collective
    optimizer.step()
"""


def test_a_rank_that_another_one_left_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEFT_ALONE)
    command = ["-m", "surefoot", "run", "--out", "run", "train.py"]
    ranks = [
        forked.start(command, cwd=tmp_path, env=forked.environment(RANK=str(rank), WORLD_SIZE="2")) for rank in range(2)
    ]
    left, _ = [rank.end() for rank in ranks]
    assert left.returncode == 1
    assert "Traceback (most recent call last)" in left.stderr
    first = json.loads((tmp_path / "run" / "rank0" / "findings.json").read_text())["findings"][0]
    assert (first["cause"], first["step"]) == ("dist.collective-failed", 12), left.stderr[-2000:]
    assert (
        "A collective of rank 0 failed at train.py:16 after 12 steps with `Connection closed by peer"
        in first["summary"]
    )
    assert "another rank has ended or cannot be reached" in first["summary"]


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
