"""A reference does not keep an object alive where its class allows that."""

import copy
import pickle

import pytest

from surefoot.core.weak_reference import InertWhenCopied, weak_callback, weak_reference


def test_an_object_dies_as_it_would_have():
    class Plain:
        pass

    thing = Plain()
    held = weak_reference(thing)
    assert held() is thing
    del thing
    assert held() is None


def test_what_cannot_be_referenced_weakly_is_kept():
    held = weak_reference((1, 2))
    assert held() == (1, 2)


class Owner:
    def __init__(self):
        self.calls = []

    def called(self, value):
        self.calls.append(value)


def test_a_weak_callback_calls_a_method_while_its_object_exists():
    owner = Owner()
    callback = weak_callback(owner.called)
    callback(1)
    calls = owner.calls
    assert calls == [1]
    del owner
    callback(2)
    assert calls == [1]


class RaisingHook(InertWhenCopied):
    def __call__(self, *args):
        raise AssertionError


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copied_or_unpickled_hook_accepts_anything_and_does_nothing(copied):
    assert copied(RaisingHook())("module", (), {}) is None
    assert b"surefoot" not in pickle.dumps(RaisingHook())
