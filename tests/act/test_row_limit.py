"""How many rows are tried at once, over many batches, and which errors say that memory has run out."""

from __future__ import annotations

import pytest
import torch

from surefoot.act.microbatches import RowLimit, is_out_of_memory


def sizes_tried(limit, fits, calls, batch=16):
    """Runs `calls` batches against a memory that holds `fits` rows; gives the calls in which something failed."""
    failed = []
    for call in range(calls):
        size = limit.size_for(batch)
        while size > fits:
            failed.append(call)
            size = limit.lower(size)
        limit.finish(size)
    return failed


def test_a_probe_that_fails_comes_less_and_less_often():
    limit = RowLimit(probe_after=10)
    failed = sizes_tried(limit, fits=5, calls=200)
    assert failed == [0, 0, 10, 30, 70, 150]
    assert limit.rows == 4


def test_the_size_grows_again_when_there_is_room():
    limit = RowLimit(probe_after=10)
    sizes_tried(limit, fits=2, calls=1)
    assert limit.rows == 2
    assert sizes_tried(limit, fits=100, calls=60) == []
    assert limit.rows == 16


def test_a_size_that_only_sometimes_fits_does_not_fail_indefinitely():
    limit = RowLimit(probe_after=10)
    failed = sum(len(sizes_tried(limit, fits=8 if call % 3 else 4, calls=1)) for call in range(1000))
    assert failed < 20


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 400 bytes."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("MPS backend out of memory (MPS allocated: 5.05 GB"),
        MemoryError(),
    ],
)
def test_allocators_are_understood(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("CUDA out of memory"), KeyError("memory")],
)
def test_other_errors_are_not_mistaken(error):
    assert not is_out_of_memory(error)
