"""File permissions that bind root too, for tests of folders that cannot be written to."""

from __future__ import annotations

import ctypes
import os
import sys

_VERSION = 0x20080522
_OVERRIDE = 1 << 1 | 1 << 2
"""`CAP_DAC_OVERRIDE` and `CAP_DAC_READ_SEARCH`: with these, root may write and read everything."""


def obey() -> None:
    """From now on permissions bind this thread, and those that it starts, whoever runs the tests.

    The user stays the same: a test that became somebody else could no longer import from a checkout in root's home.
    """
    if os.getuid() != 0 or sys.platform != "linux":
        return
    system = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert system.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    sets[0] &= ~_OVERRIDE  # the first of the effective set
    assert system.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
