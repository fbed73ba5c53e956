"""The script's files stay as they are while it is run again and again.

`guard` watches over every file that Python opens; here `torch.save` and safetensors are looked at too, which open files
by themselves. Files that other native libraries open under absolute paths, and those of processes that the script
starts, are not seen here: `surefoot bisect` has the kernel confine its runs where it can (`experiments`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import safetensors.numpy
import safetensors.torch
import torch

from surefoot.experiments.changes.guard import guard_for
from surefoot.watch.patches.hooks import around

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.experiments.changes.guard import Protected


def protect(run: Protected) -> None:
    """Watch over every file that is written from now on."""
    guard = guard_for(run)

    def saves(position: int, name: str) -> Callable[..., Any]:
        def call(original: Any, args: Any, kwargs: Any) -> Any:
            guard.before_writing(args[position] if len(args) > position else kwargs.get(name), keeps=False)
            return original(*args, **kwargs)

        return call

    around(torch.serialization, "save", saves(1, "f"))
    for module in (safetensors, safetensors.torch, safetensors.numpy):  # written in Rust, which no audit hook sees
        around(module, "serialize_file", saves(1, "filename"))
