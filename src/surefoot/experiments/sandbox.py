"""Start a program that can write only to some folders: `python sandbox.py FOLDERS -- PROGRAM ARGUMENTS…`.

On Linux the kernel enforces this (Landlock): the program and its child processes cannot write, create, rename or remove
anything elsewhere, by any means. If the kernel does not support it, the program is started unrestricted, and
`warn_if_unconfined` prints a warning. `FOLDERS` is a JSON list; folders that do not exist are ignored. This file is run
as a script and uses only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System call numbers, the same on all processors."""
_VERSION_WANTED = 1
_NO_NEW_PRIVILEGES = 38
_OLDEST = 2
"""The first version that allows moving a file from one folder to another."""
_WRITE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14


class _Rules(ctypes.Structure):
    _fields_ = [("handled", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def confined(folders: list[str]) -> list[str]:
    """The prefix of a command that can then write only to these folders."""
    if not can_confine():
        return []
    return [sys.executable, "-I", "-S", __file__, json.dumps(folders), "--"]


def can_confine() -> bool:
    """Whether the kernel can confine a process: not on macOS, before Linux 5.19, or in a container that forbids it."""
    return sys.platform.startswith("linux") and _version() >= _OLDEST


def warn_if_unconfined() -> None:
    """Print a warning if the kernel cannot confine the runs."""
    if not can_confine():
        print(
            "surefoot: this system cannot confine the runs (Landlock is missing): "
            "files outside the copied folder are protected from Python code only",
            file=sys.stderr,
            flush=True,
        )


def _version() -> int:
    """The version of Landlock; negative if it is not available."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_WANTED)))


def confine(folders: list[str]) -> bool:
    """Restrict this process to writing to these folders; returns whether that worked."""
    libc, version = ctypes.CDLL(None, use_errno=True), _version()
    if version < _OLDEST:
        return False
    handled = _WRITE | _REMOVE_AND_MAKE | _REFER | (_TRUNCATE if version >= 3 else 0)
    rules = _Rules(handled)
    ruleset = libc.syscall(_CREATE, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    try:
        for folder in folders:
            if not os.path.isdir(folder):
                continue
            opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                beneath = _Beneath(handled, opened)
                if libc.syscall(_ADD, ruleset, 1, ctypes.byref(beneath), ctypes.c_uint32(0)) != 0:
                    return False
            finally:
                os.close(opened)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            return False
        return bool(libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)


def main(words: list[str]) -> None:
    """Confine this process and execute the program."""
    confine(json.loads(words[0]))
    os.execv(words[2], words[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
