"""Whether a class has changed, from the version that the interpreter itself gives to each class.

CPython numbers the states of a class for its cache of attributes: setting or deleting an attribute of the class or of a
base ends the number, and the next look-up assigns a new one. Comparing numbers replaces comparing hundreds of methods.
The number has no name in Python, so it is read from memory, where it has been since 3.8. A test at import shows whether
this interpreter behaves like that; where it does not, every version is unknown.
"""

from __future__ import annotations

import ctypes
import sys

UNKNOWN = 0
_POINTERS_BEFORE = 48
"""The number of fields of a class, each the size of a pointer, before the version."""


def version_of(kind: type) -> ctypes.c_uint:
    """The version of a class, which must not be deleted in the meantime: always the current `value`.

    Equal values mean an unchanged class, unless they are `UNKNOWN`.
    """
    address = id(kind) + _POINTERS_BEFORE * ctypes.sizeof(ctypes.c_void_p)
    return ctypes.c_uint.from_address(address) if IS_READABLE else ctypes.c_uint(UNKNOWN)


def _behaves_as_described() -> bool:
    if sys.implementation.name != "cpython" or sys.version_info < (3, 11):
        return False

    class Base:
        first = 1

    class Kind(Base):
        pass

    number = ctypes.c_uint.from_address(id(Kind) + _POINTERS_BEFORE * ctypes.sizeof(ctypes.c_void_p))
    for change in (
        lambda: setattr(Kind, "second", 2),
        lambda: delattr(Kind, "second"),
        lambda: setattr(Base, "first", 3),
    ):
        before = [(Kind().first, number.value)[1] for _ in range(3)]
        change()
        if UNKNOWN in before or len(set(before)) > 1 or number.value == before[0]:
            return False
    return True


IS_READABLE = _behaves_as_described()
"""Whether versions are known in this interpreter."""
