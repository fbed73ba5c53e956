"""Device numbers on their way to the host: copied now, read later.

`begin_reading` starts one asynchronous copy into pinned memory and returns at once. Whoever reads it waits, if it has
not arrived; a few steps later it always has.
"""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncCopy:
    """A vector of device numbers that is being copied to the host."""

    def __init__(self, host: Tensor, arrived: torch.cuda.Event | None) -> None:
        self._host = host
        self._arrived = arrived

    def wait(self) -> Tensor:
        """The numbers on the host. Waits for the copy if it has not arrived: this is the sync."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
            self._host = self._host.clone()  # give the pinned memory back: allocating more of it would sync
        return self._host


def begin_reading(vector: Tensor) -> AsyncCopy:
    """Start to bring a vector to the host."""
    if vector.device.type == "cuda":
        host = torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True)
        host.copy_(vector, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(vector.device))
        return AsyncCopy(host, arrived)
    return AsyncCopy(vector.detach().to("cpu"), None)
