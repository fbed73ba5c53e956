"""Where a thread is, seen from another one: the user's line, and the call of torch's that waits for other ranks."""

from __future__ import annotations

import os
import sys
import threading
import weakref

import patience
from surefoot.core.stacks import position_of, stacks_of_all


class Blocked:
    """A thread that waits inside of a function, until it is released."""

    def __init__(self, files=()):
        """`files`: the files and names of the functions between `work`, which is the user's, and the wait."""
        self._go, self._inside = threading.Event(), threading.Event()
        call = self._wait
        for filename, name in reversed(files):
            call = called_in(filename, name, call)

        def work():
            call()

        self.line = work.__code__.co_firstlineno + 1
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        self._inside.wait(patience.HANG_SECONDS)
        self.ident = self._thread.ident

    def _wait(self):
        self._inside.set()
        self._go.wait(patience.HANG_SECONDS)

    def end(self):
        self._go.set()
        self._thread.join(patience.HANG_SECONDS)


def called_in(filename, name, call):
    """A function of a file that has this name."""
    scope = {"call": call}
    exec(compile(f"def {name}():\n    call()\n", filename, "exec"), scope)
    return scope[name]


def test_the_line_is_the_users_and_a_plain_wait_is_no_wait_for_ranks():
    thread = Blocked()
    try:
        one, other = position_of(thread.ident), position_of(thread.ident)
        assert one == other
        assert one.where.startswith("tests/core/test_stacks.py:")
        assert one.function == "_wait"
        assert one.waits_in == ""
        assert not one.in_debugger
        assert f'{__file__}", line {thread.line}, in work' in stacks_of_all()
    finally:
        thread.end()
    assert position_of(thread.ident) is None


def test_a_collective_a_backward_and_a_debugger_are_distinguished_from_other_calls(monkeypatch):
    monkeypatch.setattr("surefoot.core.stacks.is_users", lambda name: name.endswith("train.py"))
    torch = os.path.join("site-packages", "torch")
    barrier = [("distributed/c10d_logger.py", "wrapper"), ("distributed/distributed_c10d.py", "barrier")]
    cases = [
        (barrier, "torch.distributed.barrier", False),
        ([("_tensor.py", "backward"), ("autograd/__init__.py", "backward")], "torch.autograd.backward", False),
        ([("nn/parallel/distributed.py", "_pre_forward")], "DistributedDataParallel._pre_forward", False),
        ([("bdb.py", "dispatch_line")], "", True),
    ]
    for files, waits_in, in_debugger in cases:
        calls = [(os.path.join(torch, *name.split("/")), function) for name, function in files]
        thread = Blocked([("train.py", "step"), *calls])
        try:
            found = position_of(thread.ident)
        finally:
            thread.end()
        assert (found.waits_in, found.in_debugger) == (waits_in, in_debugger)
        assert (found.where, found.function) == ("train.py:2", "step")


def test_nothing_of_a_frame_is_held():
    class Held:
        pass

    seen = []

    def work():
        held = Held()
        seen.append(weakref.ref(held))
        position_of(threading.get_ident())
        stacks_of_all()

    work()
    assert seen[0]() is None
    assert sys._getframe().f_code.co_name == "test_nothing_of_a_frame_is_held"
