"""The environment of a step: versions, devices, threads, and the switches that select kernels."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from surefoot.core.device import DeviceVersions, has_cudnn, name_of
from surefoot.core.device import versions as device_versions
from surefoot.core.redaction import Redactor
from surefoot.core.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path


class Versions(DeviceVersions):
    """Versions of everything that computes."""

    python: str
    torch: str
    numpy: str
    surefoot: str
    platform: str


class Hardware(TypedDict):
    """The device that trained, and the host's processor."""

    device: str
    name: str
    cpu_count: int | None
    cpu: str


class Switches(TypedDict, total=False):
    """Threads and settings of torch that select kernels."""

    threads: int
    deterministic: bool
    default_dtype: str
    matmul_precision: str
    flush_denormal: bool
    mkldnn: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    cudnn: bool


class ScriptFacts(TypedDict):
    """What is running."""

    path: str | None
    module: str | None
    arguments: list[str]
    redacted: bool


def versions() -> Versions:
    """The versions of everything that computes."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "surefoot": VERSION,
        **device_versions(),
        "platform": f"{sys.platform} {platform.machine()}",
    }


def hardware(device: torch.device) -> Hardware:
    """The device that trained, and the host's processor."""
    return {"device": device.type, "name": name_of(device), "cpu_count": os.cpu_count(), "cpu": _processor()}


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def switches() -> Switches:
    """Threads and settings of torch that select kernels, and so affect the last bits of their results."""
    found: Switches = {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "flush_denormal": _flushes(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
    }
    if has_cudnn():
        found["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        found["cudnn_deterministic"] = torch.backends.cudnn.deterministic
        found["cudnn"] = torch.backends.cudnn.enabled
    return found


def _flushes() -> bool:
    """Whether denormal numbers are flushed to zero, which is a setting of each thread."""
    return bool((torch.full((), 1e-310, dtype=torch.float64) * 1.0) == 0)


def script(redact: Redactor) -> ScriptFacts:
    """What is running: the path of the script or the module's name, and its arguments."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    arguments = redact.arguments(sys.argv[1:])
    # A replay needs the real arguments.
    found: ScriptFacts = {
        "path": None,
        "module": None,
        "arguments": arguments,
        "redacted": arguments != sys.argv[1:],
    }
    if spec is not None and path:  # python -m
        found["module"] = redact(str(spec.name).removesuffix(".__main__"))
    elif path:
        found["path"] = redact.path(str(path))
    return found


def replay_command(place: Path) -> str:
    """The command that replays an incident of this process, to be shown to the user."""
    words = ["surefoot", "replay", str(place)]
    main = sys.modules.get("__main__")
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if not path:
        return shlex.join([*words, "--script", "train.py"])
    if spec is not None:
        words += ["--module", str(spec.name).removesuffix(".__main__")]
    else:
        relative = os.path.relpath(path)
        words += ["--script", path if relative.startswith("..") else relative]
    arguments = Redactor(identity=False).arguments(sys.argv[1:])
    return shlex.join([*words, "--", *arguments] if arguments else words)
