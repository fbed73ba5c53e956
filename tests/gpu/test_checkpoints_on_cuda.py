"""Checkpoints of tensors on a CUDA device: through pinned buffers, chunk by chunk. Left out where there is none."""

from __future__ import annotations

import pytest
import torch

from surefoot import CheckpointManager
from surefoot.keep.checkpoint import tensor_file
from surefoot.keep.checkpoint.storage import read, write
from surefoot.keep.staging import Staged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_what_is_written_from_a_device_is_what_was_there(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk_bytes)
    tree = {
        "long": torch.randn(10_001, device="cuda"),
        "turned": torch.randn(30, 41, device="cuda").t(),
        "half": torch.randn(333, device="cuda", dtype=torch.bfloat16),
        "one": torch.tensor(3, device="cuda"),
        "none": torch.empty(0, device="cuda"),
        "flags": torch.tensor([True, False], device="cuda"),
        "waves": torch.randn(9, device="cuda", dtype=torch.complex64).conj(),
        "host": torch.randn(100),
    }
    write(tmp_path / "c", tree, {}, step=1)
    _, found = read(tmp_path / "c")
    assert {name: torch.equal(found[name], tensor.cpu()) for name, tensor in tree.items()} == dict.fromkeys(tree, True)


def test_a_nan_on_the_device_is_found_in_its_last_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 4_096)
    spoiled = torch.zeros(100_000, device="cuda")
    spoiled[-1] = float("nan")
    assert write(tmp_path / "c", {"w": spoiled}, {}, step=1).facts["broken"] == ["w"]


def test_a_copy_on_the_device_is_written_while_training_goes_on(tmp_path):
    weight = torch.full((4_000_000,), 1.0, device="cuda")
    manager = CheckpointManager(tmp_path)
    manager.save(None, 1, staged=Staged({"w": weight.clone()}))
    for _ in range(100):
        weight.add_(1.0)
    assert manager.load().tree["w"].unique().tolist() == [1.0]
    manager.save({"w": weight}, 2)
    weight.zero_()
    assert manager.load().tree["w"].unique().tolist() == [101.0]
