"""Tables with which one kernel launch processes any number of tensors: the blocks of all of them, and their addresses.

A program of the kernel processes one block: it reads the tensor of the block, its start in the tensor, the size of the
tensor, and the tensor's address. The tables of sizes and blocks depend only on the sizes; those of
addresses are overwritten only when an address has changed. They stay at the same place, so that a recorded CUDA graph
reads the current addresses. Uploading is an asynchronous copy from pinned memory, so nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from surefoot.core.device_copies import overwrite, upload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LANES = 2048
"""The number of elements that a program processes at once."""
LOOPS = 16
"""The number of repetitions: one block has LANES x LOOPS elements."""
BLOCK = LANES * LOOPS


class BlockTables:
    """The tables for tensors of given sizes on one device, `columns` of each size: weight and moment, for example."""

    def __init__(self, sizes: list[int], device: torch.device, columns: int = 1) -> None:
        self.sizes, self.device = sizes, device
        counts = [-(-size // BLOCK) for size in sizes]
        first = [0]
        for blocks in counts:
            first.append(first[-1] + blocks)
        self.blocks = first[-1]
        """The total number of blocks."""
        self.first_block = upload(first, device)
        """The first block of each tensor, and the end of the last one."""
        self.sizes_table = upload(sizes, device)
        self.block_tensor = upload([i for i, blocks in enumerate(counts) for _ in range(blocks)], device)
        self.block_start = upload([b * BLOCK for blocks in counts for b in range(blocks)], device)
        self._addresses: list[list[int]] = [[] for _ in range(columns)]
        self.address_tables: list[Tensor] = [upload([0] * len(sizes), device) for _ in range(columns)]
        """The addresses of the tensors, a table for each column."""
        self._aligned = [False] * columns

    def place(self, *addresses: list[int]) -> None:
        """Update the addresses of the tensors, column by column."""
        for column, own in enumerate(addresses):
            if own != self._addresses[column]:
                overwrite(self.address_tables[column], own)
                self._addresses[column] = own
                self._aligned[column] = reduce(or_, own, 0) % 16 == 0

    @property
    def aligned(self) -> bool:
        """Whether all tensors start at a multiple of 16 bytes, so that they can be read in wide loads."""
        return all(self._aligned)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def all_dense(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel may treat each of these as one flat piece of memory."""
    return all(map(is_dense, tensors))
