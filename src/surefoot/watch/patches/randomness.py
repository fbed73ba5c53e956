"""Observes seeding: which generators are seeded, where and how often.

A call counts if the script makes it, or a library before the first step, as `set_seed` and `seed_everything` of many
libraries do; torch's own seeding does not count. No number is ever drawn here. NumPy's functions are implemented in C,
and numba identifies them by identity: they are not observed.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.user_code import is_users, place
from surefoot.watch.user_frames import caller, is_library, user_frame

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


def wrap_randomness(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe seeding by torch and Python."""
    shared = getattr(random, "_inst", None)
    """The generator behind `random.random`."""

    def torch_seeded(result: Any, args: Any, kwargs: Any) -> None:
        seeded("torch", args[0] if args else kwargs.get("seed"), caller())

    def python_seeded(result: Any, args: Any, kwargs: Any) -> None:
        frame = caller()
        if frame is not None and frame.f_code.co_filename == random.__file__:  # a new generator is being constructed
            frame = frame.f_back
        seeded("python" if args[0] is shared else "random.Random", args[1], frame)

    def seeded(kind: str, value: Any, frame: Any) -> None:
        own = frame if frame is not None and is_users(frame.f_code.co_filename) else None
        if kind != "random.Random":
            for_it = frame is not None and is_library(frame.f_code.co_filename)
            if for_it and frame.f_back is not None and is_users(frame.f_back.f_code.co_filename):
                own = frame.f_back
            if own is not None or (for_it and watcher.state.steps == 0 and user_frame() is not None):
                calls = watcher.calls.seeds.setdefault(kind, [])
                calls.append(watcher.state.steps)
                del calls[400:]
        # A line that seeds with the same number repeatedly draws the same numbers repeatedly.
        if own is not None and isinstance(value, int) and len(watcher.calls.reseeds) < 64:
            where = place(own.f_code.co_filename, own.f_lineno)
            calls = watcher.calls.reseeds.setdefault(f"{kind}({value}) at {where}", [])
            if len(calls) < 400:
                calls.append(watcher.state.steps)

    why = "whether, where and how often the script seeds"
    wrapping.after(torch, "manual_seed", "seeds", torch_seeded, why)
    wrapping.after(random.Random, "seed", "seeds", python_seeded, why)
