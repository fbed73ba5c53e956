"""The manifest of a checkpoint: every changed bit of it is found, and it is read without torch."""

import json
import subprocess
import sys

import pytest
import torch

from surefoot.errors import CheckpointError
from surefoot.keep.checkpoint.manifest import MANIFEST, STATE, TENSORS, _parsed, read_manifest, rendered, verify
from surefoot.keep.checkpoint.storage import write


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "step-00000003", {"weight": torch.arange(4.0)}, {"quiet": True}, step=3)
    return tmp_path / "step-00000003"


def test_it_describes_the_checkpoint_without_its_tensors(folder):
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.facts["finite"], manifest.facts["quiet"]) == (3, True, True)
    assert manifest.bytes == sum((folder / name).stat().st_size for name in (TENSORS, STATE))
    assert verify(folder) == manifest


def test_every_single_bit_is_guarded(folder):
    text = (folder / MANIFEST).read_bytes()
    for position in range(8 * len(text)):
        changed = bytearray(text)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            _parsed(folder / MANIFEST, bytes(changed))


@pytest.mark.parametrize("files", [{}, {"../../etc/passwd": {"bytes": 1, "sha256": ""}}, {TENSORS: 3, STATE: []}])
def test_a_manifest_cannot_name_other_files(folder, files):
    content = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    (folder / MANIFEST).write_bytes(rendered({**content, "files": files}))
    with pytest.raises(CheckpointError, match="lacks an entry"):
        read_manifest(folder)


def test_checkpoints_are_listed_without_torch(folder):
    code = "import sys; from surefoot.keep.checkpoint.listing import list_checkpoints; from pathlib import Path; "
    code += f"print([each.step for each in list_checkpoints(Path({str(folder.parent)!r}))], 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["[3]", "False"]
