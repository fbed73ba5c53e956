"""Writes a safetensors file as a stream, computing its hash and checking for NaN and Inf at the same time.

The library would need every byte in memory at once. The format is simple: eight bytes with the length of the header,
the header (JSON: dtype, shape and position of every tensor), then the tensors. Each is written in chunks: directly from
host memory, or from an accelerator through two pinned buffers on their own stream, so that the next chunk is copied
while the last one is hashed and written. Hashing, writing, copying and checking all release the GIL.

A floating-point tensor is broken if it contains a NaN or a +Inf, or a -Inf that is not part of a mask: the finite
entries of a mask are all equal, as in the causal mask of 0 and -Inf that some models keep as a buffer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.core.device import current_stream, has_streams, new_event, new_stream, on_stream
from surefoot.keep.checkpoint.tree import STORED_AS_IS

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from surefoot.keep.checkpoint.manifest import FileFacts

CHUNK_BYTES = 16 << 20


class HashedFile:
    """A new file that is hashed while it is written, and is on disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> None:
        """Append all bytes."""
        rest = memoryview(data).cast("B")
        self._hash.update(rest)
        self.size += len(rest)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    @property
    def facts(self) -> FileFacts:
        """Size and checksum so far, as the manifest has them."""
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


@torch.no_grad()
def write_tensors(
    file: HashedFile, tensors: Mapping[str, Tensor], judged: set[str], metadata: Mapping[str, str] | None = None
) -> list[str]:
    """Write the tensors, and `metadata` into the header; returns the names of those in `judged` that are broken."""
    # Widest type first, as in the library: then every tensor is aligned to its own width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    file.write(_header(order, tensors, metadata))
    broken, copiers = [], dict[torch.device, _ChunkCopier]()
    for name in order:
        check = FiniteCheck() if name in judged and tensors[name].is_floating_point() else None
        for chunk in _host_chunks(tensors[name], copiers):
            file.write(chunk.view(torch.uint8).numpy())
            if check is not None:
                check.add(chunk)
        if check is not None and check.broken:
            broken.append(name)
    return broken


def _header(order: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in order:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": STORED_AS_IS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class FiniteCheck:
    """Accumulates what is known about the values of one tensor, chunk by chunk."""

    def __init__(self) -> None:
        self._is_broken = self._has_low = False
        self._least, self._most = math.inf, -math.inf  # of the finite entries

    def add(self, chunk: Tensor) -> None:
        """Check one more chunk of the tensor."""
        if self._is_broken:
            return
        values = chunk.float() if chunk.element_size() == 1 else chunk
        least, most = (float(bound) for bound in torch.aminmax(values))  # NaN if there is one
        if math.isnan(least) or most == math.inf:
            self._is_broken = True
            return
        if least == -math.inf:
            self._has_low = True
            values = values[values != -math.inf]
            if values.numel() == 0:
                return
            least, most = (float(bound) for bound in torch.aminmax(values))
        self._least, self._most = min(self._least, least), max(self._most, most)

    @property
    def broken(self) -> bool:
        """Whether there is a NaN, or an Inf that is not part of a mask. A tensor of only -Inf is not a mask either."""
        return self._is_broken or (self._has_low and self._least != self._most)


# ---- reading tensors from any device --------------------------------------------------------------------------------


def _host_chunks(tensor: Tensor, copiers: dict[torch.device, _ChunkCopier]) -> Iterator[Tensor]:
    """The values in order, in host memory, a few megabytes at a time; a chunk is valid until the next is requested."""
    if tensor.numel() == 0:
        return
    if has_streams(tensor.device):
        if tensor.device not in copiers:
            copiers[tensor.device] = _ChunkCopier(tensor.device)
        yield from copiers[tensor.device].chunks(tensor)
        return
    for piece in _pieces(tensor):
        yield piece.cpu().contiguous()  # for one expanded value, every piece is a view of that value


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.detach().reshape(-1), max(1, CHUNK_BYTES // tensor.element_size()))


class _ChunkCopier:
    """Two pinned buffers and a stream: one chunk is copied while the previous one is written."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
        # Blocking: a thread that spins while it waits would take a core from training.
        self._arrived = [new_event(device, blocking=True) for _ in range(2)]
        self._turn = 0

    def chunks(self, tensor: Tensor) -> Iterator[Tensor]:
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            pieces = _pieces(tensor)  # a tensor that is not contiguous is copied, on this stream
        waiting: tuple[int, Tensor] | None = None
        for piece in pieces:
            sent = self._send(piece)
            if waiting is not None:
                yield self._receive(*waiting)
            waiting = sent
        if waiting is not None:
            yield self._receive(*waiting)

    def _send(self, piece: Tensor) -> tuple[int, Tensor]:
        index = self._turn
        self._turn = 1 - index
        host = self._buffers[index][: piece.numel() * piece.element_size()].view(piece.dtype)
        with on_stream(self._stream):
            host.copy_(piece, non_blocking=True)
            self._arrived[index].record(self._stream)
        return index, host

    def _receive(self, index: int, host: Tensor) -> Tensor:
        self._arrived[index].synchronize()
        return host
