"""The codec of facts: what is read is written back, and what does not fit is named by its path."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar, NamedTuple

import pytest

from surefoot.record.facts import codec
from surefoot.record.facts.codec import Facts, FactsError, item


class Pair(NamedTuple):
    left: int
    right: float


class Inner(Facts):
    name: str
    size: float | None = None


class Added(Facts):
    TAG: ClassVar[tuple[str, str]] = ("kind", "added")
    count: int


class Removed(Facts):
    TAG: ClassVar[tuple[str, str]] = ("kind", "removed")
    why: str


class Outer(Facts):
    number: int
    losses: list[float | None] = item("loss", factory=list)
    inner: Inner | None = None
    null: float | None = item(null=True)
    flag: bool = item(default=False)
    always: int = 0
    about: str | None = None
    beside: float | None = item(beside="about")
    pairs: list[Pair] = item(factory=list)
    span: tuple[int, int] | None = None
    labels: dict[str, int] | None = None
    settings: dict[str, bool | int | float | str | list[float]] = item(factory=dict)
    happened: list[Added | Removed] = item(factory=list)


class Tree(Facts):
    name: str
    below: list[Tree] = item(factory=list)


class Settings(Facts):
    values: dict[str, float | str] = item(whole=True)


SMALLEST = {"number": 1, "null": None, "always": 0}


@pytest.mark.parametrize(
    "value",
    [
        SMALLEST,
        SMALLEST | {"loss": [0.5, None, "nan", "inf", "-inf", 2]},
        SMALLEST | {"inner": {"name": "a"}},
        SMALLEST | {"inner": {"name": "a", "size": 1.5}, "flag": True, "null": 2.0},
        SMALLEST | {"about": "x", "beside": None},
        SMALLEST | {"about": "x", "beside": 1.0},
        SMALLEST | {"pairs": [[1, 2.0], [3, "nan"]], "span": [1, 2], "labels": {"7": 3}},
        SMALLEST | {"settings": {"a": True, "b": 0, "c": 0.5, "d": "word", "e": [0.9, 0.999], "f": "inf"}},
        SMALLEST | {"happened": [{"kind": "removed", "why": "old"}, {"kind": "added", "count": 2}]},
    ],
)
def test_what_is_read_is_written_back(value: dict[str, object]) -> None:
    assert Outer.from_json(value).to_json() == value


def test_whole_numbers_stay_whole_where_a_float_is_expected() -> None:
    written = Outer.from_json(SMALLEST | {"null": 0}).to_json()["null"]
    assert written == 0
    assert type(written) is int


def test_words_are_numbers_inside_and_words_outside() -> None:
    facts = Outer.from_json(SMALLEST | {"loss": ["nan", "-inf"]})
    assert math.isnan(facts.losses[0] or 0.0)
    assert facts.losses[1] == -math.inf
    assert Outer(number=1, losses=[math.nan, math.inf]).to_json()["loss"] == ["nan", "inf"]


def test_keys_and_kinds_of_a_newer_version_are_left_out() -> None:
    facts = Outer.from_json(
        SMALLEST | {"newer": 1, "inner": {"name": "a", "newer": {}}, "happened": [{"kind": "newer"}]}
    )
    assert facts == Outer(number=1, inner=Inner(name="a"))


def test_a_field_can_be_the_whole_object() -> None:
    assert Settings.from_json({"lr": 0.1, "mode": "min"}).to_json() == {"lr": 0.1, "mode": "min"}


def test_a_wrong_value_in_a_field_that_is_the_whole_object_is_named_by_its_key() -> None:
    with pytest.raises(FactsError, match=r"facts.json: \['lr'\]: expected text, got a list of 0"):
        Settings.from_json({"lr": []})


def test_a_class_may_contain_objects_of_its_own_kind() -> None:
    value = {"name": "a", "below": [{"name": "b", "below": [{"name": "c"}]}]}
    assert Tree.from_json(value).to_json() == value


def test_a_second_decorator_which_would_lose_the_options_of_the_fields_is_refused() -> None:
    with pytest.raises(TypeError, match="Cannot overwrite attribute"):

        @dataclass(frozen=True, kw_only=True, slots=True)
        class Decorated(Facts):
            name: str = item("called", default="")


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Inner(name="a").name = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "facts.json: expected an object, got a list of 0"),
        ({}, "facts.json: expected the key 'number', which is missing"),
        (SMALLEST | {"number": True}, "facts.json: number: expected a whole number, got true"),
        (SMALLEST | {"number": 1.5}, "facts.json: number: expected a whole number, got the number 1.5"),
        (SMALLEST | {"loss": [1.0, "abc"]}, "facts.json: loss[1]: expected a number, got the text 'abc'"),
        (SMALLEST | {"loss": {}}, "facts.json: loss: expected a list, got an object"),
        (SMALLEST | {"inner": {}}, "facts.json: inner: expected the key 'name', which is missing"),
        (SMALLEST | {"inner": {"name": None}}, "facts.json: inner.name: expected text, got null"),
        (SMALLEST | {"pairs": [[1, 2.0], [3]]}, "facts.json: pairs[1]: expected a list of 2, got a list of 1"),
        (SMALLEST | {"pairs": [["x", 2.0]]}, "facts.json: pairs[0][0]: expected a whole number, got the text 'x'"),
        (SMALLEST | {"labels": {"7": "x"}}, "facts.json: labels['7']: expected a whole number, got the text 'x'"),
        (SMALLEST | {"flag": 1}, "facts.json: flag: expected true or false, got the number 1"),
        (
            SMALLEST | {"happened": [{"kind": "added", "count": None}]},
            "facts.json: happened[0].count: expected a whole number, got null",
        ),
        (
            SMALLEST | {"happened": [{}]},
            "facts.json: happened[0]: expected an object with the key 'kind', got an object",
        ),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(value: object, words: str) -> None:
    with pytest.raises(FactsError) as caught:
        Outer.from_json(value)
    assert str(caught.value) == words


def test_a_type_that_json_has_not_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="facts cannot hold set"):
        Outer(number=1, settings={"a": {1}}).to_json()  # type: ignore[dict-item]


def test_facts_take_the_attributes_of_a_record_and_other_values_instead():
    @dataclass
    class Record:
        name: str
        size: float | None
        more: int = 0

    assert Inner.from_record(Record("weight", 2.0)) == Inner(name="weight", size=2.0)
    assert Inner.from_record(Record("weight", 2.0), size=None) == Inner(name="weight")


def test_a_record_without_a_field_is_an_error_rather_than_a_default():
    with pytest.raises(AttributeError, match="size"):
        Inner.from_record(Removed(why=""), name="weight")


class Shared(Facts):
    first: int
    second: str


def test_threads_that_read_the_first_objects_of_a_class_do_not_see_half_of_its_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, go, made = threading.Event(), threading.Event(), codec._reader

    def slow_for_the_other_thread(hint: object) -> Callable[[object], object]:
        if hint is str and threading.current_thread() is other:
            reached.set()
            go.wait()
        return made(hint)

    monkeypatch.setattr(codec, "_reader", slow_for_the_other_thread)
    text = {"first": 1, "second": "two"}
    other = threading.Thread(target=Shared.from_json, args=(text,))
    other.start()
    reached.wait()
    try:
        assert Shared.from_json(text) == Shared(first=1, second="two")
    finally:
        go.set()
        other.join()
