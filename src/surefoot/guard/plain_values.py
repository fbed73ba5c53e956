"""Plain values that are saved with a run, such as its config: written into every checkpoint, compared, never loaded.

A config determines how the run is built, before a checkpoint is loaded: loading it would change a variable, but nothing
that was made from it. So the script keeps its own values, and differences from the saved ones are logged.
"""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from surefoot.errors import SettingError

log = logging.getLogger("surefoot")
_LEAVES = (str, bytes, bool, int, float, complex, type(None), Tensor, np.ndarray, np.generic)
MOST_SHOWN = 5


def has_state(thing: Any) -> bool:
    """Whether a thing has its own state and is not a plain value."""
    return hasattr(thing, "state_dict")


def check_saved_with_run(things: Mapping[str, Any]) -> None:
    """Raise `SettingError` for a thing that has no state and is not a plain value."""
    for name, thing in things.items():
        if not has_state(thing):
            try:
                as_plain(thing)
            except TypeError as error:
                raise SettingError(
                    "`also_save` takes objects with `state_dict` and `load_state_dict`, and plain values such as a "
                    f"config; got {name!r} with {error}."
                ) from None


def as_plain(value: Any) -> Any:
    """The value as dictionaries, lists and tuples that a checkpoint can hold. Raises `TypeError` for anything else."""
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (Namespace, SimpleNamespace)):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: as_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        items = [as_plain(inner) for inner in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return sorted((as_plain(inner) for inner in value), key=repr)
    raise TypeError(f"a {type(value).__name__}")


def warn_of_changes(name: str, now: Any, saved: Any) -> None:
    """Log the differences from the saved values. The run keeps its own."""
    changed = list(_changes(name, as_plain(now), saved))
    if changed:
        more = f" and {len(changed) - MOST_SHOWN} more" if len(changed) > MOST_SHOWN else ""
        log.warning(
            "surefoot: %s%s. Plain values in `also_save` are compared, not loaded: the run continues with its own "
            "values.",
            "; ".join(changed[:MOST_SHOWN]),
            more,
        )


def _changes(name: str, now: Any, saved: Any) -> list[str]:
    if isinstance(now, dict) and isinstance(saved, dict):
        found: list[str] = []
        for key in dict.fromkeys([*saved, *now]):
            found += _changes(f"{name}.{key}", now.get(key, _MISSING), saved.get(key, _MISSING))
        return found
    if repr(now) == repr(saved):  # compared as text, so that NaN equals NaN
        return []
    return [f"{name} was {_short(saved)} when the checkpoint was saved and is {_short(now)}"]


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
