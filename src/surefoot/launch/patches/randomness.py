"""Seeds and permutations: who seeds what, where and how often, and whether an order comes again.

A call counts if the script makes it, or a library for it before the first step, as `set_seed` and `seed_everything` of
many do; what torch and NumPy seed is for reasons of their own. No number is ever drawn here.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.launch.sites import caller, is_library, is_users, place, user_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.launch.patches.wrapping import Wrapping
    from surefoot.launch.watcher import Watcher


def wrap_randomness(watcher: Watcher, wrapping: Wrapping) -> None:
    """Seeding by torch, Python and NumPy, and permutations."""

    def seeding(kind: str) -> Callable[..., None]:
        def seeded(result: Any, args: Any, kwargs: Any) -> None:
            frame = caller()
            own = frame if frame is not None and is_users(frame.f_code.co_filename) else None
            for_it = frame is not None and is_library(frame.f_code.co_filename)
            if own is None and for_it and frame is not None and frame.f_back is not None:
                own = frame.f_back if is_users(frame.f_back.f_code.co_filename) else None
            if own is not None or (for_it and watcher.steps == 0 and user_frame() is not None):
                calls = watcher.seeds.setdefault(kind, [])
                calls.append(watcher.steps)
                del calls[400:]
            if own is not None:
                note_seed(kind, args[-1] if args else kwargs.get("seed", kwargs.get("a")), own)

        return seeded

    wrapping.after(torch, "manual_seed", "seeds", seeding("torch"))
    torch.random.manual_seed = torch.manual_seed
    wrapping.after(random, "seed", "seeds", seeding("python"))
    if "numpy" in sys.modules:
        import numpy as np

        wrapping.after(np.random, "seed", "seeds", seeding("numpy"))

    def note_seed(kind: str, value: Any, frame: Any) -> None:
        """The same line, seeding with the same number again and again, draws the same numbers again and again."""
        if isinstance(value, int) and len(watcher.reseeds) < 64:
            where = place(frame.f_code.co_filename, frame.f_lineno)
            calls = watcher.reseeds.setdefault(f"{kind}({value}) at {where}", [])
            if len(calls) < 400:
                calls.append(watcher.steps)

    def seeded_own(kind: str) -> Callable[..., None]:
        def seeded(result: Any, args: Any, kwargs: Any) -> None:
            frame: Any = caller()
            if frame is not None and frame.f_code.co_filename == random.__file__:
                frame = frame.f_back
            if frame is not None and is_users(frame.f_code.co_filename):
                note_seed(kind, args[-1] if args else kwargs.get("seed"), frame)

        return seeded

    wrapping.after(random.Random, "seed", "seeds", seeded_own("random.Random"))
    if "numpy" in sys.modules:
        wrapping.after(np.random, "default_rng", "seeds", seeded_own("numpy.random.default_rng"))

    def permuted(result: Any, args: Any, kwargs: Any) -> None:
        if isinstance(result, Tensor) and result.numel() >= 8 and len(watcher.permutations) < 200:
            watcher.permutations.append(
                {"step": watcher.steps, "length": result.numel(), "print": hash(tuple(result[:32].tolist()))}
            )

    wrapping.after(torch, "randperm", "permutations", permuted)
