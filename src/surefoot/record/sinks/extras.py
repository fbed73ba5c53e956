"""Imports the optional packages of the sinks. If one is missing, constructing the sink raises an error with the fix."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from surefoot.errors import UsageError


def load(module: str, extra: str) -> Any:
    """Import a module of an optional package, or raise an error that names the extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"this sink needs `{module.split('.')[0]}`, which cannot be imported ({error}). "
            f"In the checkout of surefoot, run `pip install -e '.[{extra}]'`."
        ) from error
