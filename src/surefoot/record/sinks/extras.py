"""The packages behind the sinks are extras: a missing one is an error when the sink is made, with what to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from surefoot.errors import UsageError


def load(module: str, extra: str) -> Any:
    """Import a module of an optional package, or say which extra brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"this sink needs `{module.split('.')[0]}`, which cannot be imported ({error}). "
            f"Install it with `pip install surefoot[{extra}]`."
        ) from error
