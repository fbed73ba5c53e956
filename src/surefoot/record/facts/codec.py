"""Frozen dataclasses to and from JSON, by their type hints.

A class that inherits from `Facts` gets `to_json()` and `from_json()`. Reading and writing are compiled once per class
from its hints: numbers, text, lists, tuples, dictionaries with text keys, `X | None`, nested classes, and unions of
classes that are distinguished by a tag. JSON has no NaN: the words `nan`, `inf` and `-inf` represent those numbers.

Reading is strict about known keys and ignores unknown ones: a key without a field, and an event of an unknown kind,
come from a newer version and are left out. A missing key or a value of another type raises one `FactsError` that names
the path. No value is converted: an integer stays one where a float is expected, so that reading and writing preserves
the file.
"""

from __future__ import annotations

import dataclasses
import math
import types
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_F = TypeVar("_F", bound="Facts")
_readers: dict[Any, Callable[[Any], Any]] = {}
_writers: dict[Any, Callable[[Any], dict[str, object]]] = {}
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
    rest: bool = False,
) -> Any:
    """A field of facts. Without a default, and without `factory`, `null`, `beside` or `rest`, it is required.

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
        rest: A dictionary of all keys that no other field has.
    """
    if factory is not _MISSING:
        chosen: dict[str, object] = {"default_factory": factory}
    elif rest:
        chosen = {"default_factory": dict}
    elif default is not _MISSING:
        chosen = {"default": default}
    elif null or beside is not None:
        chosen = {"default": None}
    else:
        chosen = {}
    how = _How(key, null or always, beside, unwritten, whole, rest)
    return dataclasses.field(**chosen, metadata={"facts": how})  # type: ignore[call-overload]


@dataclasses.dataclass(frozen=True)
class _How:
    """How a field is written; see `item`."""

    key: str | None = None
    always: bool = False
    beside: str | None = None
    unwritten: bool = False
    whole: bool = False
    rest: bool = False


class Facts:
    """Base of the classes that facts are made of: frozen dataclasses that read and write themselves."""

    __slots__ = ()
    TAG: ClassVar[tuple[str, str] | None] = None
    """Key and value that distinguish the class from the others of a union."""

    def to_json(self) -> dict[str, object]:
        """A JSON object; lists may be shared with the facts."""
        return _writer_of(type(self))(self)

    @classmethod
    def from_json(cls: type[_F], value: object, source: str = "facts.json") -> _F:
        """Facts from a JSON object; `source` names the origin in errors."""
        try:
            made: _F = _reader(cls)(value)
        except _Mismatch as error:
            path = "".join(reversed(error.path)).lstrip(".")
            raise FactsError(f"{source}: {f'{path}: ' if path else ''}{error.words}") from None
        return made

    @classmethod
    def prepared(cls, value: dict[str, object]) -> dict[str, object]:
        """The JSON object as the fields expect it; a class may complete it here."""
        return value


class _Mismatch(Exception):
    def __init__(self, words: str) -> None:
        self.words = words
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


def _reader(hint: Any) -> Callable[[Any], Any]:
    """The function that reads a value of a type."""
    known = _SCALARS.get(hint)
    if known is not None:
        return known
    origin, inside = get_origin(hint), get_args(hint)
    if origin is list:
        return _read_list(inside[0])
    if origin is dict:
        return _read_dict(inside[1])
    if origin is tuple:
        return _read_tuple(inside)
    if origin in (Union, types.UnionType):
        return _read_union(inside)
    if isinstance(hint, type) and issubclass(hint, tuple):
        hints = get_type_hints(hint)
        read = _read_tuple(tuple(hints.values()))
        return lambda value: hint(*read(value))
    if isinstance(hint, type) and issubclass(hint, Facts):
        return _reader_of(hint)
    raise TypeError(f"facts cannot hold {hint!r}")


def _reader_of(cls: type[Facts]) -> Callable[[Any], Any]:
    found = _readers.get(cls)
    if found is None:
        found = _readers[cls] = _make_reader(cls)
    return found


def _make_reader(cls: type[Facts]) -> Callable[[Any], Any]:
    fields: list[tuple[str, str, Callable[[Any], Any], bool]] = []
    known: set[str] = {cls.TAG[0]} if cls.TAG is not None else set()
    rest = ""

    def fill() -> None:
        nonlocal rest
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            how: _How = field.metadata.get("facts", _How())
            key = how.key or field.name
            if how.whole:
                key = ""
            if how.rest:
                rest = field.name
                continue
            required = field.default is _MISSING and field.default_factory is _MISSING
            known.add(key)
            fields.append((field.name, key, _reader(hints[field.name]), required))

    def read(value: Any) -> Any:
        if not fields:
            fill()
        if type(value) is not dict:
            _expected("an object", value)
        value = cls.prepared(value)
        made: dict[str, object] = {}
        for name, key, reader, required in fields:
            if not key:
                made[name] = reader(value)
                continue
            found = value.get(key, _MISSING)
            if found is _MISSING:
                if required:
                    raise _Mismatch(f"expected the key {key!r}, which is missing")
                continue
            try:
                made[name] = reader(found)
            except _Mismatch as error:
                error.path.append(f".{key}")
                raise
        if rest:
            made[rest] = {key: item for key, item in value.items() if key not in known}
        return cls(**made)

    return read


def _read_int(value: Any) -> Any:
    if type(value) is int:
        return value
    _expected("a whole number", value)


def _read_float(value: Any) -> Any:
    kind = type(value)
    if kind is float or kind is int:
        return value
    if kind is str and value in _WORDS:
        return _WORDS[value]
    _expected("a number", value)


def _read_str(value: Any) -> Any:
    if type(value) is str:
        return value
    _expected("text", value)


def _read_bool(value: Any) -> Any:
    if type(value) is bool:
        return value
    _expected("true or false", value)


def _read_none(value: Any) -> Any:
    if value is None:
        return None
    _expected("null", value)


def _read_any(value: Any) -> Any:
    return value


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    int: _read_int,
    float: _read_float,
    str: _read_str,
    bool: _read_bool,
    type(None): _read_none,
    object: _read_any,
}
_PLAIN: dict[Any, frozenset[type]] = {
    int: frozenset({int}),
    float: frozenset({int, float}),
    str: frozenset({str}),
    bool: frozenset({bool}),
    type(None): frozenset({type(None)}),
}
"""The types of JSON values that are used unchanged."""


def _plain(hint: Any) -> frozenset[type]:
    """The types of values that need no conversion; empty if all do."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_plain(part) for part in get_args(hint)]
        return frozenset().union(*parts) if all(parts) else frozenset()
    return _PLAIN.get(hint, frozenset())


def _read_list(hint: Any) -> Callable[[Any], Any]:
    plain, one = _plain(hint), _later(hint)

    def read(value: Any) -> Any:
        if type(value) is not list:
            _expected("a list", value)
        if plain and plain.issuperset(map(type, value)):
            return value
        made = []
        for number, each in enumerate(value):
            try:
                found = one(each)
            except _Mismatch as error:
                error.path.append(f"[{number}]")
                raise
            if found is not _SKIP:
                made.append(found)
        return made

    return read


def _later(hint: Any) -> Callable[[Any], Any]:
    """The reader of a type, created when it is first needed: a class may contain objects of its own kind."""
    held: list[Callable[[Any], Any]] = []

    def read(value: Any) -> Any:
        if not held:
            held.append(_reader(hint))
        return held[0](value)

    return read


def _read_dict(hint: Any) -> Callable[[Any], Any]:
    plain, one = _plain(hint), _later(hint)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            _expected("an object", value)
        if plain and plain.issuperset(map(type, value.values())):
            return value
        made = {}
        for key, each in value.items():
            try:
                made[key] = one(each)
            except _Mismatch as error:
                error.path.append(f"[{key!r}]")
                raise
        return made

    return read


def _read_tuple(hints: tuple[Any, ...]) -> Callable[[Any], Any]:
    readers = [_later(hint) for hint in hints]

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            _expected(f"a list of {len(readers)}", value)
        made = []
        for number, (one, each) in enumerate(zip(readers, value, strict=True)):
            try:
                made.append(one(each))
            except _Mismatch as error:
                error.path.append(f"[{number}]")
                raise
        return tuple(made)

    return read


def _read_union(hints: tuple[Any, ...]) -> Callable[[Any], Any]:
    tagged = [hint for hint in hints if isinstance(hint, type) and issubclass(hint, Facts)]
    if len(tagged) == len(hints):
        return _read_tagged(tagged)
    optional = type(None) in hints
    readers = [_later(hint) for hint in hints if hint is not type(None)]
    plain = frozenset().union(*(_plain(hint) for hint in hints))

    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        if type(value) in plain:
            return value
        for reader in readers[:-1]:
            try:
                return reader(value)
            except _Mismatch:
                continue
        return readers[-1](value)

    return read


def _read_tagged(classes: list[type[Facts]]) -> Callable[[Any], Any]:
    tags = {cls.TAG[0] for cls in classes if cls.TAG is not None}
    key = tags.pop()
    readers = {cls.TAG[1]: _reader_of(cls) for cls in classes if cls.TAG is not None}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            _expected("an object", value)
        tag = value.get(key)
        if not isinstance(tag, str):
            _expected(f"an object with the key {key!r}", value)
        reader = readers.get(tag)
        return reader(value) if reader is not None else _SKIP

    return read


# Writing


def _writer_of(cls: type[Facts]) -> Callable[[Any], dict[str, object]]:
    found = _writers.get(cls)
    if found is None:
        found = _writers[cls] = _make_writer(cls)
    return found


def _make_writer(cls: type[Facts]) -> Callable[[Any], dict[str, object]]:
    fields: list[tuple[str, str, Any, str | None]] = []
    defaults: dict[str, object] = {}
    whole = rest = ""
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        how: _How = field.metadata.get("facts", _How())
        make: Any = field.default_factory
        default = make() if make is not _MISSING else field.default
        defaults[field.name] = default
        if how.whole:
            whole = field.name
        elif how.rest:
            rest = field.name
        elif not how.unwritten:
            is_plain = not field.metadata  # a field that is not made by `item` is left out only if it is `None`
            if how.always or (is_plain and default is not None):
                default = _MISSING
            fields.append((field.name, how.key or field.name, default, how.beside))

    def write(value: Any) -> dict[str, object]:
        if whole:
            return {key: _written(each) for key, each in getattr(value, whole).items()}
        made: dict[str, object] = {} if cls.TAG is None else {cls.TAG[0]: cls.TAG[1]}
        for name, key, default, beside in fields:
            held = getattr(value, name)
            if _is(held, default) and (beside is None or _is(getattr(value, beside), defaults[beside])):
                continue
            made[key] = _written(held)
        if rest:
            made |= {key: _written(each) for key, each in getattr(value, rest).items()}
        return made

    return write


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
