"""Many ranks on a GPU: the bits of a fingerprint are those of the CPU, nothing waits, and NCCL's recorder is read."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from surefoot.guard.replica_check import ReplicaCheck
from surefoot.observe.parameters import Layout
from surefoot.record.collectives import recorded_collectives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def check_on(device):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    check = ReplicaCheck(Layout([model], optimizer), optimizer, SimpleNamespace(place=3, count=100))
    check.model, check.held = model, optimizer  # it holds neither itself
    return check


def test_the_bits_that_a_gpu_sends_are_those_of_the_cpu_and_nothing_waits():
    on_cpu = check_on("cpu").numbers(0)
    check = check_on("cuda")
    check.numbers(0)  # makes the weights of the fingerprint
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = check.numbers(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sent.device.type == "cuda"
    assert sent.tolist() == on_cpu.tolist()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_the_last_collective_of_nccl_is_known(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(7, device="cuda"))
        torch.cuda.synchronize()
        found = recorded_collectives()
    finally:
        dist.destroy_process_group()
    assert any("all_reduce" in each.name and "7" in each.sizes for each in found)
