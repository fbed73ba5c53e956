"""Detects hooks of the script that a sampled step would call. `core.without_hooks` computes without calling any."""

from __future__ import annotations

from typing import Any

import torch


def has_modes_of_its_own() -> bool:
    """Whether the script is inside a function mode, including `with torch.device(...)`; a new mode would be above.

    The device set permanently by `torch.set_default_device` does not count.
    """
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    stack: Any = torch.overrides
    return any(mode is not default for mode in stack._get_current_function_mode_stack())


class ScriptHooks:
    """Whether the script has hooks that an extra backward, or reading saved tensors, would call."""

    gradients = False
    """Tensor hooks, module backward hooks, `retain_grad`: an extra backward would call or fill them."""
    saved = False
    """Saved-tensor hooks, as checkpointing uses: reading a saved tensor runs them."""


script_hooks = ScriptHooks()
