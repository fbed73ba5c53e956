"""Errors of the accelerator by real means: what is named, and that the traceback and the exit code stay the script's.

All runs are made at once, each in a process of its own, before the first test: see `together`. On the CPU
(`SUREFOOT_TEST_DEVICE=cpu`) only those run that need no error.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from together import DEVICE, ON_DEVICE, Ended, run_all, watched

pytestmark = ON_DEVICE
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs an error of CUDA")

SCRIPT = Path(__file__).with_name("device_errors.py")
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def write_at(pointer, place):
    tl.store(pointer + place, 1.0)
"""
MIB = 2**20
WATCHED = ["grows", "too_large", "not_fatal", "illegal", "compiled_misfit"] if DEVICE == "cuda" else []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The runs under watch by the name of their case; bare ones and ranks have a word in front."""
    programs = {}
    for name in ("peak", "compiled", *WATCHED, "bare peak", "bare compiled"):
        programs[name] = folder_of(tmp_path_factory), watched(DEVICE, name)
        if name.startswith("bare "):
            programs[name] = programs[name][0], ["train.py", DEVICE, name.removeprefix("bare ")]
    if DEVICE == "cuda":
        folder = folder_of(tmp_path_factory)
        for rank in ("0", "1"):
            environment = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "NCCL_DEBUG": "WARN"}
            programs[f"rank {rank}"] = folder, watched(DEVICE, "ranks"), environment
    return run_all(programs)


def folder_of(factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp("errors")
    shutil.copy(SCRIPT, folder / "train.py")
    (folder / "kernel.py").write_text(KERNEL)
    return folder


def line_of(words: str) -> str:
    (number,) = [number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if words in line]
    return f"train.py:{number}"


def is_quiet(ended: Ended) -> bool:
    """Whether surefoot reports no trouble of its own, and the process was not aborted."""
    words = ("stopped watching", "--guard has ended", "no diagnosis", "terminate called", "CUDA warning")
    return not any(each in ended.errors for each in words)


def test_the_counters_of_the_script_are_left_alone_and_each_module_has_its_share(runs: dict[str, Ended]) -> None:
    bare, ended = runs["bare peak"].last_line, runs["peak"].last_line
    assert bare <= ended <= 1.01 * bare
    facts = runs["peak"].written("facts.json")
    assert facts["problems"] == {}
    if DEVICE != "cuda":
        assert "module_memory" not in facts
        return
    noted = {(each["step"], each["module"].split(".")[-1]): each for each in facts["module_memory"]}
    assert {step for step, _ in noted} >= {0, 1, 2}, "the steps that are always sampled"
    for step in (1, 2):
        wide = noted[step, "wide"]
        assert 64 * MIB <= wide["held"] < 66 * MIB, "its output, and little of surefoot's own"
        assert wide["peak"] >= wide["held"]
        assert 2 * MIB <= noted[step, "narrow"]["held"] < 3 * MIB


@needs_cuda
def test_batches_that_grow_until_one_does_not_fit_name_the_modules_that_grew(runs: dict[str, Ended]) -> None:
    ended = runs["grows"]
    assert ended.code == 1
    assert "OutOfMemoryError" in ended.errors
    assert is_quiet(ended), ended.errors[-3000:]
    found = ended.written("findings.json")["findings"][0]
    assert found["cause"] == "device.out-of-memory", found
    assert "the calls of these modules left the most memory allocated: `" in found["summary"]
    largest, step, held, peak = found["evidence"]["modules"][0]
    assert largest.split(".")[-1] in ("wide", "model", "Net"), found["summary"]
    assert step > 0
    assert held > 100 * MIB
    assert peak < 2.1 * 1024 * MIB
    assert "64.0 MiB in step 0" in found["summary"], found["summary"]


@needs_cuda
def test_a_first_batch_that_does_not_fit_names_the_modules_that_had_run(runs: dict[str, Ended]) -> None:
    ended = runs["too_large"]
    assert ended.code == 1
    assert is_quiet(ended), ended.errors[-3000:]
    found = ended.written("findings.json")["findings"][0]
    assert found["cause"] == "device.out-of-memory", found
    assert "No step was completed" in found["summary"]
    assert "In step 0, the last sampled step" in found["summary"], found["summary"]


@needs_cuda
def test_an_illegal_access_is_named_with_its_traceback(runs: dict[str, Ended]) -> None:
    ended = runs["illegal"]
    assert ended.code == 1
    assert "Traceback (most recent call last)" in ended.errors
    assert "illegal memory access" in ended.errors
    assert is_quiet(ended), ended.errors[-3000:]
    found = ended.written("findings.json")["findings"][0]
    assert found["cause"] == "device.illegal-access", found
    assert found["evidence"]["error"] == "an illegal memory access was encountered"
    assert found["step"] in range(30, 61)
    assert "CUDA_LAUNCH_BLOCKING=1" in found["fixes"][0]


@needs_cuda
def test_an_error_that_the_device_survives_costs_no_number_and_is_no_assertion(runs: dict[str, Ended]) -> None:
    ended = runs["not_fatal"]
    assert ended.code == 1
    assert "invalid device ordinal" in ended.errors
    assert ended.written("findings.json")["findings"] == []
    assert "invalid device ordinal" in ended.written("findings.json")["summary"]
    facts = ended.written("facts.json")
    assert facts["problems"] == {}
    for name in ("loss", "grad_norm"):
        series = facts["optimizers"][0]["series"][name]
        assert len(series) == 40
        assert all(isinstance(value, float) for value in series), name


@needs_cuda
@pytest.mark.parametrize("rank", ["0", "1"])
def test_two_ranks_on_one_gpu_are_named(runs: dict[str, Ended], rank: str) -> None:
    ended = runs[f"rank {rank}"]
    assert ended.code != 0
    assert "DistBackendError" in ended.errors, ended.errors[-3000:]
    found = ended.written(f"rank{rank}/findings.json")["findings"][0]
    assert found["cause"] == "dist.collective-failed", found
    assert f"A collective of rank {rank} failed at {line_of('# the collective')} after 12 steps" in found["summary"]
    if "Duplicate GPU" in found["evidence"]["message"]:  # the other rank may only see it leave
        assert "two ranks use the same GPU" in found["summary"]


def test_a_compiled_model_with_a_table_is_watched_to_its_end(runs: dict[str, Ended]) -> None:
    assert runs["compiled"].last_line == pytest.approx(runs["bare compiled"].last_line, rel=1e-3)  # sums by atomics
    facts = runs["compiled"].written("facts.json")
    assert (facts["steps"], facts["problems"]) == (60, {})


@needs_cuda
def test_an_id_beyond_the_table_of_a_compiled_model_is_named(runs: dict[str, Ended]) -> None:
    ended = runs["compiled_misfit"]
    assert ended.code == 1
    assert "device-side assert triggered" in ended.errors, ended.errors[-4000:]
    assert is_quiet(ended), ended.errors[-4000:]
    found = ended.written("findings.json")["findings"][0]
    said = found["summary"], found["evidence"], ended.errors[-4000:]
    assert (found["cause"], found["step"]) == ("device.assert", 30), said
    assert f"`ids` goes into the compiled model at {line_of('# the compiled call')}" in found["summary"], said
