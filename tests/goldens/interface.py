"""What a user sees of the package: the help of every command, and the public names with their signatures."""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import re
import sys
import typing
from contextlib import redirect_stdout
from enum import Enum
from typing import TYPE_CHECKING, Any

import surefoot

if TYPE_CHECKING:
    from types import ModuleType

WIDTH = "100"
"""Columns of the terminal that the help is made for."""


def help_text() -> str:
    """`--help` of every command and subcommand, one after another."""
    from typer.main import get_command

    from surefoot.cli import app

    return "\n".join(f"$ {' '.join(words)} --help\n{_help(words)}" for words in _commands(get_command(app), "surefoot"))


def _commands(command: Any, *words: str) -> list[tuple[str, ...]]:
    inner = getattr(command, "commands", {})
    return [words, *(found for name, each in inner.items() for found in _commands(each, *words, name))]


def _help(words: tuple[str, ...]) -> str:
    """What the installed command prints, through its real entry point, without a process of its own."""
    from surefoot.__main__ import main

    said, argv, columns = io.StringIO(), sys.argv, os.environ.get("COLUMNS")
    sys.argv, os.environ["COLUMNS"] = [*words, "--help"], WIDTH
    try:
        with redirect_stdout(said):
            main()
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{' '.join(words)} --help ended with {end.code}") from None
    finally:
        sys.argv = argv
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return said.getvalue()


# ---- names --------------------------------------------------------------------------------------------------------


def public_names() -> str:
    """Every name of `surefoot.__all__` with its kind and signature, and the public members of its classes.

    Then those of the namespaces `build`, `presets` and `types`.
    """
    names = {name: getattr(surefoot, name) for name in surefoot.__all__}
    for space in (surefoot.build, surefoot.presets, surefoot.types):
        label = space.__name__.rsplit(".", 1)[-1]
        names |= {f"{label}.{name}": value for name, value in _names_of(space) if name not in surefoot.__all__}
    return "".join(line for name, value in names.items() for line in _described(name, value))


def _names_of(space: ModuleType) -> list[tuple[str, Any]]:
    listed = getattr(space, "__all__", None) or [
        name
        for name, value in vars(space).items()
        if getattr(value, "__module__", "") == space.__name__ and not name.startswith("_")
    ]
    return [(name, getattr(space, name)) for name in sorted(listed)]


def _described(name: str, value: Any) -> list[str]:
    if not inspect.isclass(value):
        callable_module = inspect.ismodule(value) and callable(value)
        kind = "function" if inspect.isfunction(value) or callable_module else "alias"
        return [f"{kind} {name}{_signature(value) if kind == 'function' else f' = {_annotation(value)}'}\n"]
    plain = issubclass(value, BaseException) and "__init__" not in vars(value)
    signature = "" if plain or _kind(value) == "protocol" else _signature(value)
    return [f"{_kind(value)} {name}{signature}\n", *_members(value)]


def _kind(value: type) -> str:
    if issubclass(value, BaseException):
        return "exception"
    if getattr(value, "_is_protocol", False):
        return "protocol"
    if issubclass(value, Enum):
        return "enum"
    if dataclasses.is_dataclass(value):
        return "frozen dataclass" if value.__dataclass_params__.frozen else "dataclass"  # type: ignore[attr-defined]
    return "named tuple" if issubclass(value, tuple) else "class"


def _members(value: type) -> list[str]:
    found = []
    for name in sorted(dir(value)):
        member = inspect.getattr_static(value, name)
        if name.startswith("_") or _is_inherited(value, name):
            continue
        if isinstance(member, property):
            found.append(f"    .{name}\n")
        elif isinstance(member, (classmethod, staticmethod)):
            found.append(f"    {type(member).__name__} .{name}{_signature(member.__func__)}\n")
        elif inspect.isfunction(member):
            found.append(f"    .{name}{_signature(member)}\n")
    return found


def _is_inherited(value: type, name: str) -> bool:
    """Whether it comes from outside: torch's Module, tuple, Exception."""
    owner = next(base for base in value.__mro__ if name in vars(base))
    return not owner.__module__.startswith("surefoot")


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        parts.append(_parameter(parameter))
    returned = (
        "" if signature.return_annotation is signature.empty else f" -> {_annotation(signature.return_annotation)}"
    )
    return f"({', '.join(parts)}){returned}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {_default(parameter.default)}"


def _annotation(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, type) and not typing.get_args(value):
        return value.__name__
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", str(value))  # without the modules that it comes from


def _default(value: Any) -> str:
    if inspect.isfunction(value) or inspect.isclass(value):
        return value.__name__
    return re.sub(r"<factory>|<.* at 0x[0-9a-f]+>", "...", repr(value))
