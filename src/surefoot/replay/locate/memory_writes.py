"""Which operation wrote a bad value into which memory.

Views share memory and in-place operations write to it, so writes are recorded per storage, not per tensor. A storage
that the step has not written to existed before: a parameter, the batch, a constant. No activation is kept alive: a
storage is identified by a weak reference, which also prevents reuse of its address.

Only operations with a bad output are recorded; for the others it is only known that their storage is finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.replay.locate.describe import Counts, TensorDescription
    from surefoot.replay.locate.frames import Place

Phase: TypeAlias = Literal["forward", "backward", "optimizer", "input"]


@dataclass(eq=False)
class MemoryWrite:
    """An operation whose output was not finite, or a tensor that was not finite before the step."""

    index: int
    """The index of the operation in the step; -1 for a tensor that existed before."""

    op: str
    """Its name, such as `aten.log.default`; of a tensor, what the program calls it."""

    phase: Phase
    counts: Counts
    """What is not finite in its output."""

    numel: int
    place: Place | None = None
    module: str = ""
    node: str = ""
    """In backward, the autograd node that is being run."""

    forward_op: str = ""
    """In backward, the operation whose backward it is."""

    parents: tuple[MemoryWrite, ...] = ()
    """Where the bad values among its inputs came from."""

    input_nan: bool = False
    """Whether there was a NaN among its inputs."""

    born: bool = False
    """Whether it makes bad values also when the bad ones among its inputs are replaced."""

    meant: bool = False
    """An infinity that the program requested, such as a mask."""

    mask_like: bool = False
    """A tensor from outside that holds -Inf and may be a mask."""

    inputs: tuple[TensorDescription, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def makes_nan(self) -> bool:
        """Whether NaN was produced here, possibly from infinities."""
        return self.counts.nan > 0 and not self.input_nan


@dataclass
class Memory:
    """The state of one storage."""

    hold: Any
    """Keeps the address of the storage from being reused."""

    writers: list[MemoryWrite] = field(default_factory=list)
    """The operations that wrote a bad value that may still be there."""

    blank: MemoryWrite | None = None
    """Set until it has been written completely: the operation that left it uninitialised."""

    external: bool = False
    """Whether it was there before the step."""


class MemoryWrites:
    """Every storage that the step has used."""

    def __init__(self) -> None:
        self._memories: dict[Any, Memory] = {}

    def find(self, tensor: Tensor) -> Memory | None:
        """What is known of a tensor's storage; `None` if it has not been seen."""
        return self._memories.get(_key(tensor))

    def add(self, tensor: Tensor, *, external: bool) -> Memory:
        """Note a storage that has not been seen."""
        memory = self._memories[_key(tensor)] = Memory(_hold(tensor), external=external)
        return memory

    def write(self, tensor: Tensor, record: MemoryWrite | None, blank: MemoryWrite | None = None) -> None:
        """Record that a tensor has been written: by `record` if the values are bad."""
        memory = self.find(tensor) or self.add(tensor, external=False)
        whole = _covers_its_storage(tensor)
        if blank is not None:
            memory.writers, memory.blank = [], blank
            return
        if whole:
            memory.writers, memory.blank = [], None
        if record is not None:
            memory.writers.append(record)


def same_storage(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors share memory."""
    return bool(_key(first) == _key(second))


def _key(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors and some subclasses have none
        return ("tensor", id(tensor))


def _hold(tensor: Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):
        return tensor  # known by its address, which must then stay its own


def _covers_its_storage(tensor: Tensor) -> bool:
    try:
        return bool(tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return True
