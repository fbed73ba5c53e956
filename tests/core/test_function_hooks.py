"""A function that is heard of stays the same function."""

import functools
import inspect
import traceback

import pytest

from surefoot.core.function_hooks import Hook, add_hook, add_hook_to_wrapper, remove_hook


def test_a_hook_is_given_the_parameters_and_the_result():
    def area(width, height=2, *more, unit="m", **settings):
        """Width times height."""
        return width * height

    heard, before = [], (area, inspect.signature(area), area.__doc__, area.__code__.co_firstlineno)
    add_hook(
        area,
        Hook(lambda args, kwargs: heard.append((args, kwargs)) or "token", lambda token, result: heard.append(result)),
    )
    assert area(3) == 6
    assert heard == [((3, 2), {"unit": "m"}), 6]
    assert area(3, 4, 5, colour="red") == 12
    assert heard[2] == ((3, 4, 5), {"unit": "m", "colour": "red"})
    assert (area, inspect.signature(area), area.__doc__, area.__code__.co_firstlineno) == before


def test_of_a_function_that_wraps_another_one_either_can_be_meant():
    def wrap(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return 2 * function(*args, **kwargs)

        return wrapper

    def one(x):
        return x

    heard, doubled, other = [], wrap(one), wrap(one)
    add_hook_to_wrapper(doubled, Hook(lambda args, kwargs: heard.append(("outer", args, kwargs))))
    assert (doubled(3), doubled(x=4), other(5)) == (6, 8, 10)
    assert heard == [("outer", (3,), {}), ("outer", (), {"x": 4})]
    add_hook(doubled, Hook(lambda args, kwargs: heard.append(("inner", args, kwargs))))
    assert other(6) == 12
    assert heard[2:] == [("inner", (6,), {})]


def test_after_none_nothing_more_is_heard_and_a_result_may_be_replaced():
    def double(x):
        if x > 1:
            return 2 * x
        return x

    add_hook(double, Hook(lambda args, kwargs: args[0] if args[0] > 1 else None, lambda token, result: result + token))
    assert double(1) == 1
    assert double(2) == 6


def test_the_end_is_heard_of_even_where_it_raises():
    def divide(x):
        return 1 / x

    ended = []
    add_hook(divide, Hook(lambda args, kwargs: "token", None, ended.append), always=True)
    line = divide.__code__.co_firstlineno + 1
    with pytest.raises(ZeroDivisionError) as raised:
        divide(0)
    assert ended == ["token"]
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-1] == "divide"
    assert traceback.extract_tb(raised.value.__traceback__)[-1].lineno == line


def test_two_hooks_are_both_called():
    def plain():
        return 1

    heard = []
    for name in ("first", "second"):
        add_hook(plain, Hook(lambda args, kwargs, name=name: heard.append(name) or name))
    assert plain() == 1
    assert heard == ["first", "second"]


def test_a_parameter_that_can_be_gone_through_once_becomes_a_list():
    def total(values):
        return sum(values)

    seen = []
    add_hook(total, Hook(lambda args, kwargs: seen.append(list(args[0]))), listed="values")
    assert total(iter([1, 2])) == 3
    assert seen == [[1, 2]]


def test_what_is_not_written_in_python_or_has_no_source_is_refused():
    with pytest.raises(TypeError, match="not written in Python"):
        add_hook(len, Hook(lambda args, kwargs: None))
    made = {}
    exec("def without_source(): return 1", made)
    with pytest.raises(Exception):  # noqa: B017
        add_hook(made["without_source"], Hook(lambda args, kwargs: None))
    assert made["without_source"]() == 1


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True)])
def test_hooks_of_both_kinds_are_called_in_any_order(order):
    def divide(x):
        return 1 / x

    heard = []
    for number, always in enumerate(order):
        hook = Hook(
            lambda args, kwargs, number=number: heard.append(f"begin {number}") or number + 1,
            lambda token, result: heard.append(f"return {token - 1}"),
            (lambda token: heard.append(f"end {token - 1}")) if always else None,
        )
        add_hook(divide, hook, always=always)
    ends = [f"end {number}" for number, always in enumerate(order) if always]
    assert divide(1) == 1
    assert heard == ["begin 0", "begin 1", "return 0", "return 1", *ends]
    heard.clear()
    with pytest.raises(ZeroDivisionError):
        divide(0)
    assert heard == ["begin 0", "begin 1", *ends]


def test_one_of_several_hooks_is_removed_and_the_last_one_leaves_the_functions_own_code():
    def half(x):
        if x < 0:
            raise ValueError(x)
        return x / 2

    heard, own = [], half.__code__
    first, second, third = (
        Hook(lambda args, kwargs, name=name: heard.append(name) or name, None, end)
        for name, end in (("first", None), ("second", lambda token: heard.append(f"end of {token}")), ("third", None))
    )
    add_hook(half, first)
    add_hook(half, second, always=True)
    add_hook(half, third)
    assert half(4) == 2
    assert heard == ["first", "second", "third", "end of second"]
    remove_hook(half, second)
    heard.clear()
    with pytest.raises(ValueError, match="-1"):
        half(-1)
    assert heard == ["first", "third"]
    remove_hook(half, first)
    remove_hook(half, first)  # a second time does nothing
    heard.clear()
    assert (half(6), heard) == (3, ["third"])
    remove_hook(half, third)
    assert half.__code__ is own
