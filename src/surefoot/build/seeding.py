"""One call that seeds every random stream, and on request makes runs bitwise repeatable.

Seeding covers Python's `random`, NumPy's global stream, and torch on the CPU and on every device. Data-loader workers
are other processes with streams of their own: hand `**seeding.for_loader()` to the `DataLoader`.

Determinism is separate: with the same seed, a kernel that adds in the order in which its threads finish still gives
another last bit. `deterministic=True` makes torch use deterministic kernels only, and raise if an operation has none.
Used as a context, the message names that operation and the solutions, and the settings are restored afterwards:

    with seed_everything(42, deterministic=True):
        train()

Not included: a different seed per rank (`seed + rank`, when replicas should draw different dropout), generators of the
program's own (`numpy.random.Generator`), and `PYTHONHASHSEED`, which Python reads before any code runs: iterating over
a `set` of strings differs between processes unless the variable is set outside. The returned record says if it was.
"""

import os
import random
import re
import warnings
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch

from surefoot.core.device import has_workspaces, visible_devices

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_DETERMINISTIC_FORM = re.compile(r"(\S+) does not have a deterministic implementation")


class NondeterministicOperationError(RuntimeError):
    """An operation without a deterministic form ran while only deterministic ones were allowed."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"`{operation}` has no deterministic form on this device, and `seed_everything(..., deterministic=True)` "
            "allows none without. The traceback above shows the call (for a backward kernel, the forward of the same "
            "name). Ways out: replace the operation, run that part on the CPU, or accept it with "
            "`torch.use_deterministic_algorithms(True, warn_only=True)` and lose bitwise repeatability."
        )
        self.operation = operation


@dataclass(frozen=True)
class Seeding:
    """What `seed_everything` set."""

    seed: int
    """The seed given to every stream."""

    streams: tuple[str, ...]
    """The random streams that were seeded."""

    deterministic: bool
    """Whether only deterministic kernels are allowed."""

    settings: dict[str, Any]
    """Each setting that was changed, with its new value."""

    python_hash_seed: str | None
    """The environment's PYTHONHASHSEED; `None` means that sets of strings iterate differently in each process."""

    _before: dict[str, Any] = field(repr=False, default_factory=dict)

    def generator(self, device: str = "cpu") -> torch.Generator:
        """Make a new generator with this seed."""
        return torch.Generator(device).manual_seed(self.seed)

    def for_loader(self) -> dict[str, Any]:
        """Arguments for a `DataLoader`: its shuffling and its workers become functions of the seed alone."""
        return {"generator": self.generator(), "worker_init_fn": seed_worker}

    def __enter__(self) -> "Seeding":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _put_back(self._before)
        found = _NO_DETERMINISTIC_FORM.search(str(error)) if isinstance(error, RuntimeError) else None
        if found:
            raise NondeterministicOperationError(found.group(1)) from error


def seed_everything(seed: int, deterministic: bool = False) -> Seeding:
    """Seed Python, NumPy and torch on every device; return what was set.

    With `deterministic=True` also allow deterministic kernels only (some are slower). `False` leaves those settings as
    they are. As a context manager it restores the settings at the end; the streams continue from their state.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed` must be an integer from 0 to 2**32 - 1, the range NumPy takes; got {seed!r}.")
    seed = int(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # every device, those not yet initialised too
    before = _current_settings()
    settings = _allow_deterministic_only() if deterministic else {}
    return Seeding(
        seed,
        ("python", "numpy", "torch:cpu", *(f"torch:{device}" for device in visible_devices())),
        torch.are_deterministic_algorithms_enabled(),
        settings,
        os.environ.get("PYTHONHASHSEED"),
        before,
    )


def seed_worker(worker_id: int) -> None:
    """Seed Python and NumPy in a data-loader worker from the seed torch gave it, which differs by worker and epoch."""
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)


def _current_settings() -> dict[str, Any]:
    return {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        _WORKSPACE: os.environ.get(_WORKSPACE),
    }


def _allow_deterministic_only() -> dict[str, Any]:
    if _WORKSPACE not in os.environ:
        os.environ[_WORKSPACE] = ":4096:8"
        if has_workspaces():
            warnings.warn(
                f"CUDA was in use before {_WORKSPACE} was set, and matrix products may keep their old workspace. "
                "Call `seed_everything` before anything touches the GPU, or set the variable outside.",
                stacklevel=3,
            )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    return {key: value for key, value in _current_settings().items() if key != "warn_only"}


def _put_back(before: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(before["torch.use_deterministic_algorithms"], warn_only=before["warn_only"])
    torch.backends.cudnn.deterministic = before["torch.backends.cudnn.deterministic"]
    torch.backends.cudnn.benchmark = before["torch.backends.cudnn.benchmark"]
    if before[_WORKSPACE] is None:
        os.environ.pop(_WORKSPACE, None)
    else:
        os.environ[_WORKSPACE] = before[_WORKSPACE]
