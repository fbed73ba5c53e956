"""Methods of single objects are replaced, and restored in any order."""

from __future__ import annotations

import copy

from surefoot.trainers.replacements import Replacements


def test_methods_are_put_back_unless_other_code_has_replaced_them():
    class Thing:
        def method(self) -> int:
            return 1

    thing, replaced = Thing(), Replacements()
    ours = lambda: 2  # noqa: E731
    replaced.put(thing, "method", ours)
    assert thing.method() == 2
    replaced.undo()
    assert vars(thing) == {}
    thing.method = theirs = lambda: 3  # type: ignore[method-assign]
    replaced.put(thing, "method", ours)
    replaced.undo()
    assert thing.method is theirs
    replaced.put(thing, "method", ours)
    thing.method = theirs  # type: ignore[method-assign]
    replaced.undo()
    assert thing.method is theirs


def test_methods_that_two_have_replaced_are_put_back_in_any_order():
    class Thing:
        def method(self) -> int:
            return 1

    for order in ((0, 1), (1, 0)):
        thing, both = Thing(), [Replacements(), Replacements()]
        both[0].put(thing, "method", lambda: 2)
        both[1].put(thing, "method", lambda: 3)
        both[order[0]].undo()
        assert thing.method() == (3, 2)[order[0]]
        both[order[1]].undo()
        assert vars(thing) == {}


def test_a_copy_of_an_object_has_the_method_of_its_class():
    class Thing:
        def method(self):
            return self

    thing, calls = Thing(), []
    replaced = Replacements()
    replaced.follow(thing, "method", lambda own: calls.append(1) or own())
    assert thing.method() is thing
    other = copy.deepcopy(thing)
    assert other.method() is other
    assert calls == [1]
    replaced.undo()
    assert vars(thing) == {}
