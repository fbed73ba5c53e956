"""One folder, written at once or not at all; a changed bit, a cut file or a pickle under any name is found."""

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from surefoot import CheckpointError
from surefoot.core.formats import CHECKPOINT
from surefoot.keep.checkpoint import manifest as manifest_file
from surefoot.keep.checkpoint import storage, tensor_file
from surefoot.keep.checkpoint.folders import new_folder, sweep
from surefoot.keep.checkpoint.manifest import MANIFEST, STATE, TENSORS, verify
from surefoot.keep.checkpoint.storage import read, write

INF, NAN = float("inf"), float("nan")
FILES = (TENSORS, STATE, MANIFEST)


def state():
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(3, dtype=torch.bfloat16)},
        "betas": (0.9, 0.999),
        "flags": torch.tensor([True, False, True]),
    }


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "one"
    write(folder, state(), {"quiet": True, "metric": 0.25}, step=7)
    return folder


def test_what_is_read_is_what_was_written(kept):
    manifest, tree = read(kept)
    assert (manifest.step, manifest.schema, manifest.facts["quiet"]) == (7, CHECKPOINT.version, True)
    assert manifest.facts["torch"] == torch.__version__
    assert torch.equal(tree["model"]["weight"], state()["model"]["weight"])
    assert tree["betas"] == (0.9, 0.999)
    assert sorted(path.name for path in kept.iterdir()) == sorted(FILES)
    assert [path.name for path in kept.parent.iterdir()] == ["one"]


def test_the_tensor_file_is_one_that_the_library_reads(tmp_path):
    tensors = {f"t{i}": torch.randn(i, 3).to(dtype) for i, dtype in enumerate(tensor_file.STORED_AS_IS)}
    write(tmp_path / "c", tensors, {}, step=1)
    found = load_file(tmp_path / "c" / TENSORS)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    header_bytes = int.from_bytes((tmp_path / "c" / TENSORS).read_bytes()[:8], "little")
    assert header_bytes % 8 == 0


def test_one_value_expanded_is_written_in_full(tmp_path):
    write(tmp_path / "one", {"mask": torch.full((1,), 2.0).expand(3, 4)}, {}, step=0)
    assert torch.equal(read(tmp_path / "one")[1]["mask"], torch.full((3, 4), 2.0))


def test_a_tensor_of_many_chunks_is_written_and_judged_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    long = torch.randn(1_000)
    spoiled, turned = long.clone(), torch.randn(30, 40).t()
    spoiled[-1] = NAN
    mask = torch.full((30, 30), -INF).triu(1)
    manifest = write(tmp_path / "c", {"a": long, "b": spoiled, "c": turned, "d": mask}, {}, step=1)
    assert manifest.facts["broken"] == ["b"]
    _, tree = read(tmp_path / "c")
    assert torch.equal(tree["a"], long)
    assert torch.equal(tree["c"], turned)


# ---- a changed file -------------------------------------------------------------------------------------------------


def damaged(kept, name, change):
    """The fault that is found when `change` is done to the bytes of one file."""
    folder = kept.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept, folder)
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(CheckpointError) as found:
        read(folder)
    assert f"damaged/{name}" in str(found.value)
    with pytest.raises(CheckpointError):
        verify(folder)


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flip_of_any_bit_is_found(kept, name, where, bit):
    def flip(data):
        changed = bytearray(data)
        changed[int(where * len(data))] ^= 1 << bit
        return bytes(changed)

    damaged(kept, name, flip)


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True))
def test_a_truncation_at_any_length_is_found(kept, name, where):
    damaged(kept, name, lambda data: data[: int(where * len(data))])


def test_bytes_added_at_the_end_are_found(kept):
    for name in FILES:
        damaged(kept, name, lambda data: data + b"\n")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_a_link_a_folder_and_a_pipe_are_refused(kept, name, tmp_path):
    for number, put in enumerate(
        [
            lambda path: None,
            lambda path: path.symlink_to(kept / name),
            lambda path: path.mkdir(),
            lambda path: os.mkfifo(path),
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(kept, folder)
        (folder / name).unlink()
        put(folder / name)
        with pytest.raises(CheckpointError, match=name):
            read(folder)


def forge(folder):
    """A manifest that fits whatever the other two files now hold, as an attacker would make it."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    for name in (TENSORS, STATE):
        data = (folder / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_bytes(manifest_file.rendered(content))


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_is_refused_and_not_run(kept, tmp_path, name, how):
    folder, trace = tmp_path / "hostile", tmp_path / "executed"
    shutil.copytree(kept, folder)
    if how == "pickle":
        (folder / name).write_bytes(pickle.dumps(Payload(trace)))
        pickle.loads(pickle.dumps(Payload(trace)))  # the payload does work
        trace.unlink()
    else:
        torch.save({"a": Payload(trace)}, folder / name)
    if name != MANIFEST:
        forge(folder)
    with pytest.raises(CheckpointError, match=rf"hostile/{name}.*looks like a pickle"):
        read(folder)
    assert not trace.exists()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "9" * 10_000, '{"$": "exec"}', '{"model": {"$": "tensor", "name": "no"}}']
)
def test_a_forged_state_is_refused_with_the_file_named(kept, tmp_path, text):
    folder = tmp_path / "forged"
    shutil.copytree(kept, folder)
    (folder / STATE).write_text(text)
    forge(folder)
    with pytest.raises(CheckpointError, match=f"forged/{STATE}"):
        read(folder)


def test_a_forged_tensor_file_with_other_tensors_is_refused(kept, tmp_path):
    folder = tmp_path / "forged"
    shutil.copytree(kept, folder)
    save_file({"model.weight": torch.ones(1)}, folder / TENSORS)
    forge(folder)
    with pytest.raises(CheckpointError, match="names a tensor"):
        read(folder)


# ---- schemas --------------------------------------------------------------------------------------------------------


def use_format(monkeypatch, form):
    for module in (storage, manifest_file):
        monkeypatch.setattr(module, "CHECKPOINT", form)


def test_another_schema_is_refused_naming_both_and_a_migration_brings_it_up(kept, monkeypatch):
    use_format(monkeypatch, replace(CHECKPOINT, version=4, migrations={}))
    with pytest.raises(CheckpointError, match="schema 2; this surefoot reads schema 4"):
        read(kept)

    def rename(contents):
        plain = {"net" if key == "model" else key: value for key, value in contents.plain.items()}
        return contents._replace(plain=plain)

    use_format(monkeypatch, replace(CHECKPOINT, version=4, migrations={3: rename}))
    with pytest.raises(CheckpointError, match="schema 2; this surefoot reads schema 3 to 4"):
        read(kept)
    note = {2: lambda contents: contents._replace(facts={**contents.facts, "up": 1})}
    use_format(monkeypatch, replace(CHECKPOINT, version=4, migrations={**note, 3: rename}))
    manifest, tree = read(kept)
    assert manifest.facts["up"] == 1
    assert torch.equal(tree["net"]["weight"], state()["model"]["weight"])


def test_a_checkpoint_from_the_future_is_refused(kept, tmp_path, monkeypatch):
    use_format(monkeypatch, replace(CHECKPOINT, version=9))
    write(tmp_path / "c", {}, {}, step=1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=f"schema 9; this surefoot reads schema 1 to {CHECKPOINT.version}"):
        read(tmp_path / "c")


# ---- finite ---------------------------------------------------------------------------------------------------------

CAUSAL = torch.full((5, 5), -INF).triu(1)


@pytest.mark.parametrize(
    ("tensor", "broken"),
    [
        (torch.linspace(-1.5, 1.5, 9), False),
        (CAUSAL, False),
        (CAUSAL.bfloat16(), False),
        (CAUSAL + 1, False),
        (CAUSAL + torch.arange(5.0), True),
        (-CAUSAL, True),
        (torch.tensor(-INF), True),
        (torch.tensor([0.0, NAN]), True),
        (torch.tensor([0.0, NAN, -INF]), True),
        (torch.tensor([1.0, INF], dtype=torch.float16), True),
        (torch.tensor([1.0, NAN], dtype=torch.bfloat16), True),
        (torch.tensor([1.0, NAN], dtype=torch.float64), True),
        (torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), True),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e5m2), False),
        (torch.tensor([1.0, complex(0, NAN)]), True),
        (torch.tensor([3e38, 3e38]), False),
        (torch.empty(0), False),
        (torch.tensor([1, -(2**63)]), False),
    ],
    ids=str,
)
def test_a_nan_is_broken_and_a_mask_is_not(tmp_path, tensor, broken):
    manifest = write(tmp_path / "c", {"net": {"t": tensor}}, {}, step=1)
    assert manifest.facts["finite"] is not broken
    assert manifest.facts["broken"] == (["net.t"] if broken else [])


def test_what_need_not_be_finite_is_not_judged_unless_it_is_also_elsewhere(tmp_path):
    bad, tied = torch.tensor([NAN]), torch.tensor([INF])
    tree = {"checker": {"window": bad}, "checker.x": torch.tensor([NAN]), "model": {"w": tied}}
    manifest = write(
        tmp_path / "c", {**tree, "checker": {"window": bad, "w": tied}}, {}, step=1, unchecked=("checker",)
    )
    assert manifest.facts["broken"] == ["checker.w", "checker.x"]


# ---- the folder -----------------------------------------------------------------------------------------------------


def test_a_folder_is_replaced_and_one_that_fails_leaves_the_old_one(tmp_path):
    write(tmp_path / "c", {"a": 1}, {}, step=1)
    write(tmp_path / "c", {"a": 2}, {}, step=2)
    assert read(tmp_path / "c")[1] == {"a": 2}
    with pytest.raises(ValueError, match="Out of range"):
        write(tmp_path / "c", {"a": 3}, {"metric": NAN}, step=3)
    assert read(tmp_path / "c")[1] == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_sweeping_puts_back_what_was_moved_aside_and_leaves_the_living_alone(tmp_path):
    write(tmp_path / "c", {"a": 1}, {}, step=1)
    (tmp_path / "c").rename(tmp_path / ".c.999999999-5-0123abcd.old")
    (tmp_path / f".c.{os.getpid()}-5-0123abcd.part").mkdir()  # the number is used again: it started at another time
    (tmp_path / ".d.999999999-5-0123abcd.part").mkdir()
    (tmp_path / ".unrelated").mkdir()
    with new_folder(tmp_path / "e") as hidden:
        sweep(tmp_path, lambda name: name in "ce")
        assert hidden.is_dir()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".d.999999999-5-0123abcd.part", ".unrelated", "c", "e"]
    assert read(tmp_path / "c")[1] == {"a": 1}
