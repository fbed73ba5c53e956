"""What a piece of code does, counted: a cost that is the same on every machine."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def calls() -> Iterator[list[str]]:
    """Collects the name of every function that this thread calls inside the block, of Python's and of C's."""
    made: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            made.append(frame.f_code.co_name)
        elif event == "c_call" and argument is not sys.setprofile:
            made.append(argument.__name__)

    before = sys.getprofile()
    assert threading.current_thread() is threading.main_thread()
    sys.setprofile(note)
    try:
        yield made
    finally:
        sys.setprofile(before)


def collectives_of(group: Any) -> int:
    """How many collectives this rank has started in a process group so far."""
    return int(group._get_sequence_number_for_group())
