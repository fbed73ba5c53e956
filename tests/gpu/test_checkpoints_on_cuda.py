"""Checkpoints of tensors on a CUDA device: through pinned buffers, chunk by chunk. Left out where there is none."""

from __future__ import annotations

import pytest
import torch

from surefoot import CheckpointManager
from surefoot.keep.checkpoint import tensor_file
from surefoot.keep.checkpoint.storage import read, write
from surefoot.keep.staging import Staged, stage

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


def test_a_copy_on_the_device_is_written_while_training_continues(tmp_path):
    weight = torch.full((4_000_000,), 1.0, device="cuda")
    manager = CheckpointManager(tmp_path)
    manager.save(None, 1, staged=Staged({"w": weight.clone()}))
    for _ in range(100):
        weight.add_(1.0)
    assert manager.load().tree["w"].unique().tolist() == [1.0]
    manager.save({"w": weight}, 2)
    weight.zero_()
    assert manager.load().tree["w"].unique().tolist() == [101.0]


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_a_copy_on_cuda_holds_the_values_whatever_the_memory_looks_like(place):
    torch.manual_seed(0)
    weight = torch.randn(70_000, device="cuda")
    live = {
        "plain": weight,
        "tied": weight,
        "window": weight[1:5],
        "transposed": torch.randn(30, 40, device="cuda").t(),
        "channels last": torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        "conjugate": torch.randn(5, dtype=torch.complex64, device="cuda").conj(),
        "bf16": torch.randn(7, device="cuda").bfloat16(),
        "step": torch.tensor(3.0, device="cuda"),
        "empty": torch.empty(0, device="cuda"),
        "host": torch.arange(4),
    }
    expected = {name: tensor.clone() for name, tensor in live.items()}
    staged = stage(live, place)
    staged.hold_updates()
    for tensor in live.values():
        tensor.zero_()
    staged.wait()
    for name, want in expected.items():
        assert torch.equal(staged.tree[name].to(want.device), want), name
    assert staged.tree["plain"] is staged.tree["tied"]
    again = stage(live, place, into=staged)
    again.wait()
    assert not any(tensor.any() for tensor in again.tree.values())
