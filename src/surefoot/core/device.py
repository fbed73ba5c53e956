"""The accelerator of this process. Only this module names a kind of device: CUDA, XPU or MPS.

All other code uses it for streams and events, pinned memory and asynchronous copies, memory counters, the random
generators of devices, and graph capture. It is based on `torch.accelerator` and `torch.get_device_module`, so a backend
with the same functions works like CUDA. One that lacks them (MPS has no streams) gets plain, synchronous copies. CPU
and CUDA are tested; XPU and MPS are not.

Nothing here initialises a device: for a device that is not in use, the result is `None` or empty.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from surefoot.errors import UsageError, with_causes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_SYNC_IS_ERROR = 2
"""The result of `get_sync_debug_mode` after `set_sync_debug_mode("error")`."""

# ---- which device ---------------------------------------------------------------------------------------------------


@cache
def _accelerator() -> Any:
    """The torch module of the accelerator that torch was built for; `None` for a CPU-only build."""
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else getattr(torch, kind.type, None)


def _module_of(device: torch.device) -> Any:
    """The torch module of a device: `torch.xpu` for `xpu:0`."""
    return torch.get_device_module(device)


@cache
def _kind() -> str:
    """The type of the accelerator, as in `torch.device.type`; empty if there is none."""
    kind = torch.accelerator.current_accelerator()
    return "" if kind is None else kind.type


def is_in_use() -> bool:
    """Whether this process has used its accelerator, and still can. Does not initialise it."""
    module = _accelerator()
    if module is None or _failure:
        return False
    asked = getattr(module, "is_initialized", None)
    return bool(module.is_available() if asked is None else asked())


def devices_in_use() -> list[torch.device]:
    """The devices on which this process has a context; none before it uses one."""
    if not is_in_use():
        return []
    has_context: Any = getattr(torch._C, f"_{_kind()}_hasPrimaryContext", None)
    found = range(_accelerator().device_count())
    return [torch.device(_kind(), index) for index in found if has_context is None or has_context(index)]


def visible_devices() -> list[str]:
    """The names of all accelerators that this process could use, such as `xpu:0`; "mps" has no number."""
    names = [f"{kind}:{index}" for kind in ("cuda", "xpu") for index in range(getattr(torch, kind).device_count())]
    return [*names, "mps"] if torch.backends.mps.is_available() else names


def usable(name: str) -> torch.device:
    """The device with this name; raises `UsageError` if this process cannot use it."""
    there = [torch.device(each) for each in ("cpu:0", *visible_devices())]
    try:
        named = torch.device(name)
        is_there = any(named.type == each.type and named.index in (None, each.index) for each in there)
    except RuntimeError:  # not the name of any device
        is_there = False
    if not is_there:
        raise UsageError(f"no device {name!r} here: torch {torch.__version__} can use {', '.join(map(str, there))}.")
    return named


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one."""
    return _module_of(device).device(device)  # type: ignore[no-any-return]


def runs_triton(device: torch.device) -> bool:
    """Whether surefoot's Triton kernels run on a device. They need float64, which not every accelerator has."""
    return device.type == "cuda" and not (_postponed_triton and _is_triton_postponed())


_postponed_triton: list[tuple[Callable[[], bool], Callable[[], bool]]] = []


def postpone_triton(is_loaded: Callable[[], bool], is_observing: Callable[[], bool]) -> None:
    """Do not use Triton before it is loaded, while something is only observed.

    What a guard measures must not depend on when it is loaded: it uses Triton at once.
    """
    _postponed_triton[:] = [(is_loaded, is_observing)]


def stop_postponing_triton() -> None:
    """Nothing is observed any more."""
    _postponed_triton.clear()


def _is_triton_postponed() -> bool:
    is_loaded, is_observing = _postponed_triton[0]
    if not is_observing():
        return False
    if not is_loaded():
        return True
    _postponed_triton.clear()
    return False


# ---- streams and events ---------------------------------------------------------------------------------------------


class _HasStreams(dict[str, bool]):
    """For each kind of device, whether torch has streams for it."""

    def __missing__(self, kind: str) -> bool:
        module = getattr(torch, kind, None)
        names = ("Stream", "Event", "current_stream", "stream")
        found = self[kind] = kind != "cpu" and all(hasattr(module, name) for name in names)
        return found


_has_streams = _HasStreams()


def has_streams(device: torch.device) -> bool:
    """Whether a device runs asynchronously, with streams and events; copies from pinned memory are asynchronous."""
    return _has_streams[device.type]


def current_stream(device: torch.device | None = None) -> torch.Stream:
    """The stream that work is launched on; without a device, that of the accelerator's current device."""
    if device is None:
        return _accelerator().current_stream()  # type: ignore[no-any-return]
    return _module_of(device).current_stream(device)  # type: ignore[no-any-return]


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    _module_of(device).synchronize(device)


def forbids_waiting() -> bool:
    """Whether everything that waits for the device raises: `set_sync_debug_mode("error")`."""
    asked = getattr(_accelerator(), "get_sync_debug_mode", None)
    return is_in_use() and asked is not None and asked() == _SYNC_IS_ERROR


def new_stream(device: torch.device) -> torch.Stream:
    """A new stream."""
    return _module_of(device).Stream(device)  # type: ignore[no-any-return]


def on_stream(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Launch the work inside on a stream."""
    return _module_of(stream.device).stream(stream)  # type: ignore[no-any-return]


def new_event(device: torch.device, blocking: bool = False) -> torch.Event:
    """An event to record on a stream of the device. A thread that waits for a `blocking` one sleeps; others spin."""
    made = _module_of(device).Event
    return made(blocking=True) if blocking else made()  # type: ignore[no-any-return]


# ---- a device that has failed ---------------------------------------------------------------------------------------

_FATAL = (
    "device-side assert triggered",
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "global/shared address space",
    "launch timed out",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "NCCL error",
    "ncclUnhandledCudaError",
    "NCCL communicator was aborted",
)
"""Parts of the messages of errors after which every call of the device raises, or may wait indefinitely (NCCL)."""
_failure: list[tuple[str, str]] = []
"""Type and message of the error after which the device can no longer be used; empty while it can."""


class DeviceFailed(RuntimeError):
    """A number had not reached the host when the device failed."""


def is_fatal(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that the device cannot be used any more.

    Running out of memory does not: the device can still be used.

    >>> is_fatal(RuntimeError("CUDA error: device-side assert triggered")), is_fatal(RuntimeError("out of memory"))
    (True, False)
    """
    return fatal_cause(error) is not None


def fatal_cause(error: BaseException | None) -> BaseException | None:
    """The device error among an error and its causes; `None` if there is none."""
    for each in with_causes(error):
        text = str(each) if isinstance(each, RuntimeError) else ""
        if isinstance(each, DeviceFailed) or any(part in text for part in _FATAL):
            return each
    return None


def note_failure(error: BaseException) -> bool:
    """Whether an error is fatal to the device. After that, this process no longer calls the device."""
    cause = fatal_cause(error)
    if cause is not None and not isinstance(cause, DeviceFailed) and not _failure:
        _failure.append((type(cause).__name__, str(cause)))
        for reference in list(_not_to_be_freed.values()):
            keep_until_exit(reference())
    return cause is not None


def keep_if_device_fails(thing: Any) -> None:
    """Keep an object until the process ends if the device fails: freeing it would call the device and may abort."""
    if not _not_to_be_freed:
        atexit.register(_note_last_error)
    known, number = _not_to_be_freed, id(thing)
    known[number] = weakref.ref(thing, lambda _: known.pop(number, None))


_not_to_be_freed: dict[int, weakref.ref[Any]] = {}


def _note_last_error() -> None:
    """Record the error that ends the process."""
    last = getattr(sys, "last_value", None)
    if last is not None:
        note_failure(last)


def keep_until_exit(thing: Any) -> None:
    """Add a reference that is never released."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def has_failed() -> bool:
    """Whether the device of this process can no longer be used. Every call of it would raise."""
    return bool(_failure)


def failure() -> tuple[str, str] | None:
    """Type and message of the error that the device has failed with; `None` if it has not."""
    return _failure[0] if _failure else None


# ---- graphs ---------------------------------------------------------------------------------------------------------


def is_capturing(device: torch.device | None = None) -> bool:
    """Whether a graph is being recorded on the current stream; without a device, on any device in use."""
    if device is None:
        process, asked = _query
        if process != os.getpid():
            asked = _query_if_in_use()
        return asked is not None and not _failure and bool(asked())
    if device.type != _kind():
        return False
    asked = _capture_query()
    return asked is not None and bool(asked())


_query: tuple[int, Any] = (0, None)
"""The process that has used the accelerator, and the result of `_capture_query`: `is_capturing` is called many times in
each step. A forked child cannot use the accelerator, and functions that run at its beginning, such as that of `random`,
may call this before any other."""


def _query_if_in_use() -> Any:
    global _query
    if not is_in_use():
        return None
    _query = os.getpid(), _capture_query()
    return _query[1]


@cache
def _capture_query() -> Any:
    """The function that returns whether the current stream is being recorded; for CUDA, without Python overhead."""
    own = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) if _kind() == "cuda" else None
    return getattr(_accelerator(), "is_current_stream_capturing", None) if own is None else own


def can_record(device: torch.device) -> bool:
    """Whether launches on a device can be recorded into a graph now: a CUDA device that is not already recording."""
    return device.type == "cuda" and not is_capturing(device)


@contextmanager
def recorded_graph(device: torch.device) -> Iterator[Any]:
    """Record the launches inside on a separate stream; the graph's `replay()` runs them again.

    Garbage collection is off in the meantime: freeing an older graph during a recording breaks both.
    """
    graph, stream = torch.cuda.CUDAGraph(), new_stream(device)
    keep_if_device_fails(graph)
    stream.wait_stream(current_stream())
    collects = gc.isenabled()
    gc.disable()
    try:
        with on_stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    current_stream().wait_stream(stream)


# ---- memory ---------------------------------------------------------------------------------------------------------


def allocated_and_reserved() -> tuple[int, int] | None:
    """Bytes that torch's allocator has given out and holds on the current device; `None` if it is not in use."""
    if not is_in_use():
        return None
    if _kind() == "mps":
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    module = _accelerator()
    return module.memory_allocated(), module.memory_reserved()


def free_bytes() -> int | None:
    """Bytes that can still be allocated on the current device, including the allocator's own reserve."""
    usage = allocated_and_reserved()
    if usage is None:
        return None
    allocated, reserved = usage
    if _kind() == "mps":
        return torch.mps.recommended_max_memory() - allocated
    free, _ = _accelerator().mem_get_info()
    return int(free) + reserved - allocated


def unreserved_bytes(device: torch.device) -> int:
    """Free bytes of a device, without what torch's allocator has reserved, which the next step needs again."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    asked = getattr(_module_of(device), "mem_get_info", None)
    return total_bytes(device) if asked is None else int(asked(device)[0])


def total_bytes(device: torch.device) -> int:
    """The memory of a device."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return int(_module_of(device).get_device_properties(device).total_memory)


def empty_cache() -> None:
    """Release the memory that the allocator holds and does not need."""
    if is_in_use():
        _accelerator().empty_cache()


def memory_counters(device: torch.device) -> dict[str, float]:
    """Bytes that torch's allocator has allocated and reserved, and the maximum allocated, from its own counters."""
    read: Any = getattr(_accelerator(), "memory_stats_as_nested_dict", None)
    counters = {} if read is None else read(device)
    try:
        allocated, reserved = counters["allocated_bytes"]["all"], counters["reserved_bytes"]["all"]
    except KeyError:  # a custom allocator has no such counters
        return {}
    return {
        "allocated": float(allocated["current"]),
        "reserved": float(reserved["current"]),
        "peak": float(allocated["peak"]),
    }


# ---- random generators ----------------------------------------------------------------------------------------------


class DeviceStreams(TypedDict, total=False):
    """The stored states of the generators of devices: one per device, one for MPS."""

    cuda: list[Tensor]
    xpu: list[Tensor]
    mps: Tensor | None


def random_states() -> DeviceStreams:
    """The states of the generators of all devices in use, as stored: a list per kind, one state for MPS."""
    states: DeviceStreams = {
        "cuda": [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }
    if is_in_use() and _kind() == "cuda":
        states["cuda"] = _accelerator().get_rng_state_all()
    elif is_in_use() and _kind() == "xpu":
        states["xpu"] = _accelerator().get_rng_state_all()
    return states


def set_random_states(states: DeviceStreams) -> None:
    """Set the generators from stored states. Missing devices are ignored."""
    for module, found in ((torch.cuda, states.get("cuda", [])), (torch.xpu, states.get("xpu", []))):
        for index, state in enumerate(found[: module.device_count()]):
            module.set_rng_state(state.cpu(), index)
    mps = states["mps"]
    if mps is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(mps.cpu())


def default_generators() -> Sequence[torch.Generator]:
    """The default generator of every device of this process, by index; empty if there is none."""
    return getattr(_accelerator(), "default_generators", ())


def generators_of(devices: Iterable[torch.device]) -> list[tuple[int, torch.Generator]]:
    """The index and the default generator of each accelerator among some devices."""
    indices = sorted({device.index or 0 for device in devices if has_streams(device)})
    generators = default_generators() if indices else ()
    return [(index, generators[index]) for index in indices if index < len(generators)]


def replace_random_states(states: DeviceStreams, replaced: Iterable[tuple[int, Tensor]]) -> None:
    """Replace the states of some devices among stored ones, by index; devices without a state are left out."""
    own = states.get("xpu", []) if _kind() == "xpu" else states.get("cuda", [])
    for index, state in replaced:
        if index < len(own):
            own[index] = state


# ---- descriptions ---------------------------------------------------------------------------------------------------


class DeviceVersions(TypedDict, total=False):
    """Versions of the libraries that compute on devices."""

    cuda: str | None
    cudnn: int | None
    xpu: str | None


def versions() -> DeviceVersions:
    """The versions of the libraries that compute on the device."""
    used = is_in_use() and _kind() == "cuda"
    found: DeviceVersions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if used else None}  # type: ignore[no-untyped-call]
    if getattr(torch.version, "xpu", None):
        found["xpu"] = torch.version.xpu
    return found


def runtime_version(kind: str, found: DeviceVersions) -> str:
    """The runtime of a kind of device with its version, from stored `versions()`; empty for a CPU.

    >>> runtime_version("cuda", {"cuda": "12.8"}), runtime_version("cpu", {"cuda": "12.8"})
    ('CUDA 12.8', '')
    """
    version = {"cuda": found.get("cuda"), "xpu": found.get("xpu")}.get(kind)
    return "" if version is None else f"{kind.upper()} {version}"


def name_of(device: torch.device) -> str:
    """The product name of a device; of the CPU, its vector instructions."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if named is None else str(named(device))


def uuid_of(device: torch.device) -> str:
    """The driver's identifier of a device; empty if it has none."""
    properties = getattr(_accelerator(), "get_device_properties", lambda _: None)(device)
    return str(getattr(properties, "uuid", ""))


def has_cudnn() -> bool:
    """Whether kernels of cuDNN may run, so that its switches matter."""
    return torch.cuda.is_available()


def has_workspaces() -> bool:
    """Whether cuBLAS may have allocated its workspaces, which it does when CUDA is first used."""
    return is_in_use() and _kind() == "cuda"
