"""The version of a class changes with the class."""

from __future__ import annotations

import sys

import pytest
import torch

from surefoot.core import type_version
from surefoot.core.type_version import IS_READABLE, UNKNOWN, version_of


class Base:
    value = 1


class Kind(Base):
    def method(self) -> int:
        return self.value


readable = pytest.mark.skipif(not IS_READABLE, reason="the interpreter has no such versions")


def test_this_interpreter_has_versions():
    assert (sys.version_info >= (3, 11)) == IS_READABLE


@readable
@pytest.mark.parametrize("changed", [Kind, Base])
def test_a_set_or_deleted_attribute_changes_the_version(changed: type):
    version = version_of(Kind)
    Kind().method()
    before = version.value
    assert before not in (UNKNOWN, None)
    for _ in range(1_000):
        Kind().method()
    assert version.value == before
    changed.added = 1
    assert version.value != before
    Kind().method()
    between = version.value
    del changed.added
    assert version.value not in (before, between)


@readable
def test_what_a_script_does_to_tensors_is_noticed(monkeypatch: pytest.MonkeyPatch):
    version = version_of(torch.Tensor)
    torch.ones(1).sum()
    before = version.value
    torch.ones(1).attribute = 1
    assert version.value == before
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "sum", lambda self: self)
        assert version.value != before
    torch.ones(1).sum()
    assert version.value != before


def test_elsewhere_every_version_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type_version, "IS_READABLE", False)
    assert version_of(Kind).value == UNKNOWN
