from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import surefoot as sf
from surefoot.errors import CheckpointError, UsageError
from surefoot.keep.checkpoint.exchange import (
    export_state,
    export_weights,
    import_state,
    load_whole,
    verify_step,
)
from surefoot.keep.checkpoint.listing import checkpoints_in, list_checkpoints
from surefoot.keep.checkpoint.manifest import TENSORS


def trained(folder, steps=3):
    """A run that is taken up, trained a few steps, and saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = sf.CheckpointManager(folder, every_steps=None)
    stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=manager)
    for row in stabilizer.resume(torch.randn(steps, 2, 3)):
        stabilizer.backward(model(row).square().mean())
        stabilizer.step()
    stabilizer.save()
    return model, optimizer, stabilizer


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_run_resumes_from_an_exported_and_imported_file_as_from_the_checkpoint(tmp_path):
    model, optimizer, _ = trained(tmp_path / "run")
    export_state(load_whole(checkpoints_in(tmp_path / "run"), "latest"), tmp_path / "state.safetensors")
    import_state(tmp_path / "state.safetensors", tmp_path / "again")
    other, its_optimizer, stabilizer = trained(tmp_path / "again")  # nothing is left of the data
    assert stabilizer.steps == 3
    assert same(model, other)
    for mine, its in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], its[key]) for key in mine)


def test_exported_weights_are_loaded_by_their_names(tmp_path):
    model, _, _ = trained(tmp_path / "run")
    export_weights(load_whole(tmp_path / "run" / "checkpoints", "3"), tmp_path / "weights.safetensors")
    found = load_file(tmp_path / "weights.safetensors")
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    other.load_state_dict(found)
    assert same(model, other)


def test_a_checkpoint_of_a_manager_alone_comes_back_from_one_file(tmp_path):
    tree = {"model": {"weight": torch.arange(4.0)}, "betas": (0.9, 0.99), "mask": torch.tensor([True, False])}
    with sf.CheckpointManager(tmp_path / "run", every_steps=None) as manager:
        manager.save(tree, 7, blocking=True)
    loaded = load_whole(checkpoints_in(tmp_path / "run"), "latest")
    export_state(loaded, tmp_path / "state.safetensors")
    assert torch.equal(load_file(tmp_path / "state.safetensors")["model.weight"], torch.arange(4.0))
    import_state(tmp_path / "state.safetensors", tmp_path / "again")
    back = sf.CheckpointManager(tmp_path / "again").load()
    assert (back.step, back.tree["betas"]) == (7, (0.9, 0.99))
    with pytest.raises(UsageError, match="not saved by a TrainingStabilizer"):
        export_weights(loaded, tmp_path / "weights.safetensors")


def test_nothing_is_overwritten_and_other_files_are_distinguished(tmp_path):
    trained(tmp_path / "run")
    loaded = load_whole(checkpoints_in(tmp_path / "run"), "latest")
    export_state(loaded, tmp_path / "state.safetensors")
    with pytest.raises(UsageError, match="already exists"):
        export_state(loaded, tmp_path / "state.safetensors")
    with pytest.raises(UsageError, match="already exists"):
        import_state(tmp_path / "state.safetensors", tmp_path / "run")
    save_file({"weight": torch.zeros(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(UsageError, match="contains tensors but no training state"):
        import_state(tmp_path / "plain.safetensors", tmp_path / "again")
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointError, match="looks like a pickle"):
        import_state(tmp_path / "pickle.safetensors", tmp_path / "again")
    with pytest.raises(UsageError, match="no checkpoint in"):
        checkpoints_in(tmp_path)


def test_one_changed_byte_is_found_by_verifying(tmp_path):
    trained(tmp_path / "run")
    (listing,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert verify_step(listing).fault is None
    file = listing.paths[0] / TENSORS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "its checksum is not the one" in verify_step(listing).fault
