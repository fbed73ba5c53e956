"""Fingerprints on a GPU: those of the CPU, to the last bit, and nothing waits for the device."""

import pytest
import torch

from surefoot.observe.fingerprints import fingerprint, fingerprints, state_fingerprints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 1000, 65_537, (1 << 22) + 77])
def test_the_fingerprint_of_a_gpu_is_that_of_the_cpu(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert fingerprint(tensor.to(CUDA)).item() == fingerprint(tensor).item()


def test_taking_fingerprints_waits_for_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 64, device=CUDA)).sum().backward()
    optimizer.step()
    parameters = [parameter.detach() for parameter in model.parameters()]
    fingerprints(parameters, CUDA)  # makes the weights
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = fingerprints([*parameters, *(parameter.grad for parameter in model.parameters())], CUDA)
        state = state_fingerprints(optimizer, list(model.parameters()), CUDA)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken.tolist() == [fingerprint(each.cpu()).item() for each in
                              [*parameters, *(parameter.grad for parameter in model.parameters())]]  # fmt: skip
    assert len(set(state.tolist())) == 4
