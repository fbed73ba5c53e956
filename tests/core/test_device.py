"""The device seam: what holds on a CPU; `tests/gpu/test_device_seam_on_cuda.py` has the rest."""

from pathlib import Path

import pytest
import torch

from surefoot.core import device
from surefoot.core.device import generators_of, has_streams, is_capturing
from surefoot.core.device_copies import begin_reading, upload
from surefoot.errors import UsageError

CPU = torch.device("cpu")
without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def test_the_cpu_has_no_streams_and_runs_no_kernels_of_a_device():
    assert not has_streams(CPU)
    assert not device.runs_triton(CPU)
    assert not device.can_record(CPU)
    assert not is_capturing(CPU)


@pytest.mark.parametrize("kind", ["meta", "mps", "vulkan"])
def test_a_device_without_streams_is_served_by_plain_copies(kind):
    assert not has_streams(torch.device(kind))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_cuda_and_xpu_have_streams(kind):
    assert has_streams(torch.device(kind))


def test_numbers_of_the_cpu_are_read_at_once():
    vector = torch.arange(3.0, requires_grad=True)
    host = begin_reading(vector).wait()
    assert host.tolist() == [0.0, 1.0, 2.0]
    assert not host.requires_grad


def test_a_table_of_the_cpu_needs_no_pinned_memory():
    table = upload([3, 1, 2], CPU)
    assert table.tolist() == [3, 1, 2]
    assert table.dtype == torch.int64
    assert not table.is_pinned() or torch.accelerator.is_available()


@without_accelerator
def test_without_an_accelerator_nothing_is_in_use():
    assert not device.is_in_use()
    assert not is_capturing()
    assert device.devices_in_use() == device.visible_devices() == []
    assert device.allocated_and_reserved() is None
    assert device.free_bytes() is None
    assert generators_of([CPU, torch.device("cuda", 0)]) == []
    device.empty_cache()


@without_accelerator
def test_the_stored_states_of_generators_have_the_same_keys_everywhere():
    assert device.random_states() == {"cuda": [], "mps": None}
    states = {"cuda": [torch.zeros(16, dtype=torch.uint8)], "mps": torch.zeros(16, dtype=torch.uint8)}
    device.set_random_states(states)  # written on a machine with devices that this one lacks
    none: device.DeviceStreams = {"cuda": [], "mps": None}
    device.replace_random_states(none, [(3, torch.ones(1))])
    assert none == {"cuda": [], "mps": None}


def test_versions_and_names_are_those_of_torch():
    found = device.versions()
    assert found["cuda"] == torch.version.cuda
    assert device.name_of(CPU) == torch.backends.cpu.get_cpu_capability()
    assert device.runtime_version("cuda", {"cuda": "12.8"}) == "CUDA 12.8"
    assert device.runtime_version("cpu", found) == ""


def test_a_device_that_is_not_there_is_refused_with_those_that_are():
    assert device.usable("cpu") == CPU
    assert device.usable("cpu:0") == torch.device("cpu", 0)
    for name in ("cpu:1", "meta", "cuda:99", "xpu:99", "turbo", ""):
        with pytest.raises(UsageError, match=f"no device '{name}' here: torch .* can use cpu:0"):
            device.usable(name)
    for name in device.visible_devices():
        assert str(device.usable(name)) == name
        assert device.usable(name.partition(":")[0]).type == device.usable(name).type


SOURCE = Path(device.__file__).parents[1]
MAY_NAME_IT = {
    "core/device.py",
    "diagnose/rules/device.py",  # reads the messages of CUDA and NCCL
    "watch/function_recorder.py",  # lists the names of torch's own tensor attributes
}


def test_only_the_seam_names_a_kind_of_accelerator():
    modules = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    ours = [path for path in modules if path.parts[:2] not in (("zoo", "testing"), ("zoo", "tuning"))]
    naming = {path.as_posix() for path in ours if "cuda" in (SOURCE / path).read_text(encoding="utf-8")}
    assert naming - MAY_NAME_IT == set(), "ask core/device.py, so that other accelerators work too"


FATAL = [
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: misaligned address",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa)`",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error",
    "Triton Error [CUDA]: device-side assert triggered",
]
NOT_FATAL = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB",
    "CUDA error: out of memory",
    "CUDA error: operation not permitted when stream is capturing",
    "mat1 and mat2 shapes cannot be multiplied",
]


@pytest.mark.parametrize("message", FATAL + NOT_FATAL)
def test_only_errors_after_which_every_call_raises_are_fatal(message, monkeypatch):
    monkeypatch.setattr(device, "_failure", [])
    error = torch.AcceleratorError(message) if "CUDA error" in message else RuntimeError(message)
    assert device.note_failure(error) == (message in FATAL)
    assert device.has_failed() == (message in FATAL)
    assert device.failure() == ((type(error).__name__, message) if message in FATAL else None)


def test_a_message_about_a_device_in_an_error_of_another_kind_is_not_fatal():
    assert not device.is_fatal(ValueError("device-side assert"))
    assert not device.is_fatal(KeyboardInterrupt())


def test_after_a_failure_nothing_of_the_device_is_read_and_the_cpu_still_is(monkeypatch):
    from surefoot.observe.readable import is_readable, readable

    monkeypatch.setattr(device, "_failure", [("AcceleratorError", FATAL[0])])
    held = torch.ones(3)
    assert readable(held) is held
    assert is_readable(held)
    assert not device.is_in_use()


def test_what_must_not_be_freed_after_a_failure_is_not(monkeypatch):
    import gc
    import weakref

    monkeypatch.setattr(device, "_failure", [])
    monkeypatch.setattr(device, "_not_to_be_freed", {})

    class Thing:
        pass

    gone, kept = Thing(), Thing()
    for each in (gone, kept):
        device.keep_if_device_fails(each)
    references = weakref.ref(gone), weakref.ref(kept)
    del gone, each
    device.note_failure(RuntimeError(FATAL[0]))
    del kept
    gc.collect()
    assert references[0]() is None
    assert references[1]() is not None
