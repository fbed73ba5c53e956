"""The file of tensors is one that safetensors reads, with a checksum, and NaN and Inf are found while it is written."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from surefoot.keep.checkpoint import tensor_file
from surefoot.keep.checkpoint.tensor_file import FiniteCheck, HashedFile, write_tensors

NAN, INF = float("nan"), float("inf")


def written(path, tensors, judged=None):
    with HashedFile(path) as file:
        return write_tensors(file, tensors, set(tensors) if judged is None else judged), file.facts


def test_safetensors_reads_what_was_written(tmp_path):
    tensors = {
        "half": torch.randn(3, 2, dtype=torch.float16),
        "transposed": torch.randn(4, 3).t(),
        "empty": torch.zeros(0, 5),
        "flags": torch.tensor([True, False, True]),
        "expanded": torch.ones(1).expand(4),
    }
    broken, facts = written(tmp_path / "t.safetensors", tensors)
    assert broken == []
    read = load_file(tmp_path / "t.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    content = (tmp_path / "t.safetensors").read_bytes()
    assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_tensors_larger_than_a_chunk_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    values = torch.arange(1000.0)
    values[777] = NAN
    assert written(tmp_path / "t.safetensors", {"values": values})[0] == ["values"]
    read = load_file(tmp_path / "t.safetensors")["values"]
    assert torch.equal(read.nan_to_num(-1), values.nan_to_num(-1))


def test_only_what_is_judged_is_called_broken(tmp_path):
    tensors = {"mask": torch.tensor([NAN]), "weight": torch.tensor([INF])}
    assert written(tmp_path / "t.safetensors", tensors, judged={"weight"})[0] == ["weight"]


@pytest.mark.parametrize(
    ("values", "broken"),
    [
        ([1.0, 2.0], False),
        ([0.0, -INF], False),  # a causal mask
        ([-INF, -INF], True),  # nothing but -Inf is no mask
        ([0.0, 1.0, -INF], True),
        ([INF, 0.0], True),
        ([NAN, 0.0], True),
    ],
)
def test_a_mask_of_one_value_and_minus_infinity_is_not_broken(values, broken):
    check = FiniteCheck()
    for value in values:
        check.add(torch.tensor([value]))
    assert check.broken == broken
