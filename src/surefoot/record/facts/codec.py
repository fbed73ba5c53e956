"""Frozen dataclasses to and from JSON, by their type hints.

A class that inherits from `Facts` is a frozen dataclass with keyword arguments, and gets `to_json()` and `from_json()`.
Reading and writing are compiled once per class from its hints: numbers, text, lists, tuples, dictionaries with text
keys, `X | None`, nested classes, and unions of classes that are distinguished by a tag. JSON has no NaN: the words
`nan`, `inf` and `-inf` represent those numbers.

Reading is strict about known keys and ignores unknown ones: a key without a field, and an event of an unknown kind,
come from a newer version and are left out. A missing key or a value of another type raises one `FactsError` that names
the path. No value is converted: an integer stays one where a float is expected, so that reading and writing preserves
the file.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Only type checkers need the real one."""
        return lambda cls: cls


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_F = TypeVar("_F", bound="Facts")
_MISSING: Any = dataclasses.MISSING
_SKIP: Any = object()
"""Represents a value of a kind that this version does not know."""


class FactsError(SurefootError, ValueError):
    """Invalid facts; the message names the path."""


def item(
    key: str | None = None,
    *,
    default: Any = _MISSING,
    factory: Any = _MISSING,
    null: bool = False,
    always: bool = False,
    beside: str | None = None,
    unwritten: bool = False,
    whole: bool = False,
) -> Any:
    """A field of facts. Without a default, and without `factory`, `null` or `beside`, it is required.

    A field that equals its default is left out of the JSON, unless one of these is given.

    Args:
        key: Its name in the JSON, where that differs.
        default: Its value if the JSON does not have it.
        factory: Makes that value.
        null: The default is `None`, which is written as null.
        always: The default is written too.
        beside: The default is written if the field of this name is not at its own default.
        unwritten: It is never written, but taken from the enclosing object.
        whole: The object has no other field: the JSON of this one is the JSON of the object.
    """
    if default is _MISSING and factory is _MISSING and (null or beside is not None):
        default = None
    how = {"key": key, "always": null or always, "beside": beside, "unwritten": unwritten, "whole": whole}
    return dataclasses.field(default=default, default_factory=factory, metadata=how)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Facts:
    """Base of the classes that facts are made of: frozen dataclasses that read and write themselves."""

    TAG: ClassVar[tuple[str, str] | None] = None
    """Key and value that distinguish the class from the others of a union."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def to_json(self) -> dict[str, object]:
        """A JSON object; lists may be shared with the facts."""
        return _writer_of(type(self))(self)

    @classmethod
    def from_json(cls: type[_F], value: object, source: str = "facts.json") -> _F:
        """Facts from a JSON object; `source` names the origin in errors."""
        try:
            made: _F = _reader_of(cls)(value)
        except _Mismatch as error:
            path = "".join(reversed(error.path)).lstrip(".")
            raise FactsError(f"{source}: {f'{path}: ' if path else ''}{error.text}") from None
        return made

    @classmethod
    def from_record(cls: type[_F], record: object, **others: Any) -> _F:
        """Facts with the attributes of a record that have the names of the fields, except for `others`."""
        names = (field.name for field in dataclasses.fields(cast("Any", cls)) if field.name not in others)
        return cls(**{name: getattr(record, name) for name in names}, **others)

    @classmethod
    def prepared(cls, value: dict[str, object]) -> dict[str, object]:
        """The JSON object as the fields expect it; a class may complete it here."""
        return value


class _Mismatch(Exception):
    def __init__(self, text: str) -> None:
        self.text = text
        self.path: list[str] = []
        """The steps of the path, innermost first."""


def _expected(what: str, value: object) -> NoReturn:
    raise _Mismatch(f"expected {what}, got {_shown(value)}")


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else type(value).__name__


# Reading

_SCALARS: dict[Any, tuple[str, frozenset[type]]] = {
    int: ("a whole number", frozenset({int})),
    float: ("a number", frozenset({int, float})),
    str: ("text", frozenset({str})),
    bool: ("true or false", frozenset({bool})),
    type(None): ("null", frozenset({type(None)})),
}
"""The word for each simple type, and the types of JSON values that are used unchanged for it."""


def _reader(hint: Any) -> Callable[[Any], Any]:
    """The function that reads a value of a type."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is object:
        return lambda value: value
    if hint in _SCALARS:
        return _read_scalar(hint)
    if origin is list:
        return _read_list(inside[0])
    if origin is dict:
        return _read_dict(inside[1])
    if origin is tuple:
        return _read_tuple(inside)
    if origin in (Union, types.UnionType):
        return _read_union(inside)
    if isinstance(hint, type) and issubclass(hint, tuple):
        read = _read_tuple(tuple(get_type_hints(hint).values()))
        return lambda value: hint(*read(value))
    if isinstance(hint, type) and issubclass(hint, Facts):
        return _reader_of(hint)
    raise TypeError(f"facts cannot hold {hint!r}")


def _make_reader(cls: Any) -> Callable[[Any], Any]:
    fields: list[tuple[str, str, Callable[[Any], Any], bool]] = []

    def fill() -> None:
        """At the first object, because a class may contain objects of its own kind."""
        found = []
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            key = "" if field.metadata.get("whole") else field.metadata.get("key") or field.name
            required = field.default is _MISSING and field.default_factory is _MISSING
            found.append((field.name, key, _reader(hints[field.name]), required))
        fields[:] = found  # at once: several threads may read

    def read(value: Any) -> Any:
        if not fields:
            fill()
        if type(value) is not dict:
            _expected("an object", value)
        value = cls.prepared(value)
        made: dict[str, object] = {}
        for name, key, reader, required in fields:
            found = value.get(key, _MISSING) if key else value
            if found is _MISSING:
                if required:
                    raise _Mismatch(f"expected the key {key!r}, which is missing")
                continue
            try:
                made[name] = reader(found)
            except _Mismatch as error:
                error.path += [f".{key}"] if key else []
                raise
        return cls(**made)

    return read


_reader_of: Callable[[Any], Callable[[Any], Any]] = cache(_make_reader)


def _read_scalar(hint: Any) -> Callable[[Any], Any]:
    what, kinds = _SCALARS[hint]

    def read(value: Any) -> Any:
        if type(value) in kinds:
            return value
        if hint is float and type(value) is str and value in _WORDS:
            return _WORDS[value]
        _expected(what, value)

    return read


def _plain(hint: Any) -> frozenset[type]:
    """The types of values that need no conversion; empty if all do."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_plain(part) for part in get_args(hint)]
        return frozenset().union(*parts) if all(parts) else frozenset()
    return _SCALARS[hint][1] if hint in _SCALARS else frozenset()


def _read_at(place: object, reader: Callable[[Any], Any], value: Any) -> Any:
    """Read an entry of a list or a dictionary; `place` is its index or key."""
    try:
        return reader(value)
    except _Mismatch as error:
        error.path.append(f"[{place!r}]")
        raise


def _read_list(hint: Any) -> Callable[[Any], Any]:
    plain, reader = _plain(hint), _reader(hint)

    def read(value: Any) -> Any:
        if type(value) is not list:
            _expected("a list", value)
        if plain and plain.issuperset(map(type, value)):
            return value
        made = [_read_at(number, reader, each) for number, each in enumerate(value)]
        return [each for each in made if each is not _SKIP]

    return read


def _read_dict(hint: Any) -> Callable[[Any], Any]:
    plain, reader = _plain(hint), _reader(hint)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            _expected("an object", value)
        if plain and plain.issuperset(map(type, value.values())):
            return value
        return {key: _read_at(key, reader, each) for key, each in value.items()}

    return read


def _read_tuple(hints: tuple[Any, ...]) -> Callable[[Any], Any]:
    readers = [_reader(hint) for hint in hints]

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            _expected(f"a list of {len(readers)}", value)
        return tuple(_read_at(number, readers[number], each) for number, each in enumerate(value))

    return read


def _read_union(hints: tuple[Any, ...]) -> Callable[[Any], Any]:
    if all(isinstance(hint, type) and issubclass(hint, Facts) for hint in hints):
        return _read_tagged(hints)
    readers = [_reader(hint) for hint in hints if hint is not type(None)]
    plain = frozenset().union(*(_plain(hint) for hint in hints))

    def read(value: Any) -> Any:
        if type(value) in plain:
            return value
        for reader in readers[:-1]:
            try:
                return reader(value)
            except _Mismatch:
                continue
        return readers[-1](value)

    return read


def _read_tagged(classes: tuple[type[Facts], ...]) -> Callable[[Any], Any]:
    tags = [(cls.TAG, _reader_of(cls)) for cls in classes if cls.TAG is not None]
    (key,) = {tag[0] for tag, _ in tags}
    readers = {tag[1]: reader for tag, reader in tags}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            _expected("an object", value)
        tag = value.get(key)
        if not isinstance(tag, str):
            _expected(f"an object with the key {key!r}", value)
        return readers[tag](value) if tag in readers else _SKIP

    return read


# Writing


def _make_writer(cls: Any) -> Callable[[Any], dict[str, object]]:
    fields: list[tuple[str, str, Any, str | None]] = []
    defaults: dict[str, object] = {}
    whole = ""
    for field in dataclasses.fields(cls):
        how, make = field.metadata, cast("Any", field.default_factory)
        default = field.default if make is _MISSING else make()
        defaults[field.name] = default
        whole = field.name if how.get("whole") else whole
        # A field that is not made by `item` is left out only if it is `None`.
        if how.get("always") or (not how and default is not None):
            default = _MISSING
        if not how.get("unwritten"):
            fields.append((field.name, how.get("key") or field.name, default, how.get("beside")))

    def write(value: Any) -> dict[str, object]:
        if whole:
            return {key: _written(each) for key, each in getattr(value, whole).items()}
        made: dict[str, object] = {} if cls.TAG is None else {cls.TAG[0]: cls.TAG[1]}
        for name, key, default, beside in fields:
            held = getattr(value, name)
            if _is(held, default) and (beside is None or _is(getattr(value, beside), defaults[beside])):
                continue
            made[key] = _written(held)
        return made

    return write


_writer_of: Callable[[Any], Callable[[Any], dict[str, object]]] = cache(_make_writer)


def _is(held: Any, default: Any) -> bool:
    return held is default or (type(held) is type(default) and bool(held == default))


def _written(value: Any) -> Any:
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if kind is list:
        return _written_list(value)
    if kind is dict:
        return {key: _written(each) for key, each in value.items()}
    if isinstance(value, Facts):
        return _writer_of(kind)(value)
    if isinstance(value, tuple):
        return [_written(each) for each in value]
    raise TypeError(f"facts cannot hold {kind.__name__}: {value!r}")


_NUMBERS = frozenset({int, float})


def _written_list(value: list[Any]) -> list[Any]:
    kinds = set(map(type, value))
    if kinds <= _NUMBERS and (float not in kinds or math.isfinite(sum(value))):
        return value  # a non-finite entry makes the sum non-finite
    return [_written(each) for each in value]
