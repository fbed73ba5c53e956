"""Protects the script's files while it is run repeatedly.

`guard` checks every file that Python opens. This module also covers `torch.save` and safetensors, which open files
themselves. Files that other native libraries open by absolute path, and files of processes that the script starts, are
not seen here: `surefoot bisect` lets the kernel confine its runs where possible (`experiments.sandbox`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch

from surefoot.experiments.changes.guard import Protected, guard_for
from surefoot.watch.patches.hooks import around


def protect(run: Protected) -> None:
    """Check every file that is written from now on."""
    guard = guard_for(run)

    def saves(name: str) -> Callable[..., Any]:
        def call(original: Any, args: Any, kwargs: Any) -> Any:
            guard.before_writing(args[1] if len(args) > 1 else kwargs.get(name), keeps=False)
            return original(*args, **kwargs)

        return call

    around(torch.serialization, "save", saves("f"))
    for module in (safetensors, safetensors.torch, safetensors.numpy):  # written in Rust: audit hooks do not see it
        around(module, "serialize_file", saves("filename"))
