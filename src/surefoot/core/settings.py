"""Checks the types of settings: a frozen dataclass says in its annotations what each of its fields may be.

`check_types` is called first in `__post_init__`, so that the range checks after it compare numbers only. Without it, a
text raises a TypeError of Python's that does not name the setting, and a text in the place of several patterns
(`exclude="head.*"`) is silently taken as its single letters.

Annotations other than those in `_KINDS` are not checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from surefoot.errors import require


def is_number(value: object) -> bool:
    """Whether a value is a plain number other than NaN; `True` and tensors are not numbers."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def is_whole(value: object) -> bool:
    """Whether a value is an integer; `True` is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value)


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "int": ("a whole number", is_whole),
    "float": ("a number", is_number),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "str": ("a string", lambda value: isinstance(value, str)),
    "tuple[str, ...]": ("a tuple of strings, such as ('head.*',)", _are_texts),
}


def require_module(module: object, name: str = "model") -> None:
    """Raise `SettingError` unless a value is a torch module."""
    from torch import nn  # here: commands that show a run do not import torch

    require(isinstance(module, nn.Module), f"`{name}` must be a torch.nn.Module; got {shown(module)}.")


def check_types(settings: Any) -> None:
    """Raise `SettingError` for a field of a dataclass whose value is not of its annotated type."""
    for each in fields(settings):
        text = each.type if isinstance(each.type, str) else getattr(each.type, "__name__", "")
        kind = text.removesuffix(" | None")
        value = getattr(settings, each.name)
        if kind not in _KINDS or (value is None and kind != text):
            continue
        words, fits = _KINDS[kind]
        expected = words if kind == text else f"{words}, or None"
        require(fits(value), f"`{each.name}` must be {expected}; got {shown(value)}.")


def shown(value: object) -> str:
    """A value in an error message: short ones as they are, others by their type."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text and " at 0x" not in text else f"a {type(value).__name__}"
