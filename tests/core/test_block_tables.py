"""The tables of a launch over many tensors."""

from __future__ import annotations

import torch

from surefoot.core.block_tables import BLOCK, BlockTables, is_dense

CPU = torch.device("cpu")


def test_every_element_of_every_tensor_is_in_exactly_one_block():
    sizes = [3, BLOCK, 0, 2 * BLOCK + 1]
    tables = BlockTables(sizes, CPU)
    assert tables.blocks == 1 + 1 + 0 + 3
    assert tables.first_block.tolist() == [0, 1, 2, 2, 5]
    assert tables.block_tensor.tolist() == [0, 1, 3, 3, 3]
    assert tables.block_start.tolist() == [0, 0, 0, BLOCK, 2 * BLOCK]
    assert tables.sizes_table.tolist() == sizes


def test_addresses_are_overwritten_in_place_and_only_when_they_change():
    tables = BlockTables([4, 4], CPU, columns=2)
    tables.place([16, 32], [48, 64])
    first, second = tables.address_tables
    written = first._version, second._version
    assert tables.aligned
    tables.place([16, 32], [48, 66])
    assert tables.address_tables[0] is first
    assert tables.address_tables[1] is second
    assert (first._version, second._version) == (written[0], written[1] + 1)
    assert (first.tolist(), second.tolist()) == ([16, 32], [48, 66])
    assert not tables.aligned


def test_memory_without_gaps_in_any_order_of_dimensions_is_dense():
    image = torch.zeros(2, 3, 4, 5)
    assert is_dense(image)
    assert is_dense(image.to(memory_format=torch.channels_last))
    assert is_dense(image.permute(3, 1, 0, 2))
    assert not is_dense(image[:, :, ::2])
    assert not is_dense(torch.zeros(3, 1).expand(3, 4))
