"""Run a program without Landlock, as in many containers: `python without_landlock.py (-m MODULE | SCRIPT) ...`."""

from __future__ import annotations

import ctypes
import runpy
import struct
import sys

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_CREATE_RULES = 444
_NO_SUCH_CALL = 0x00050000 | 38
_ALLOW = 0x7FFF0000


def refuse() -> None:
    """Install a seccomp filter: the call that makes rules of Landlock does not exist, all others are allowed."""
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, _CREATE_RULES), (0x06, 0, 0, _NO_SUCH_CALL), (0x06, 0, 0, _ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0 or libc.prctl(_SECCOMP, _FILTER, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no seccomp")


if __name__ == "__main__":
    if sys.platform.startswith("linux"):  # elsewhere there is no Landlock to begin with
        refuse()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
