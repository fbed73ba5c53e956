"""Keeps the number of rows per optimizer step when a run continues with another number of ranks.

A step uses `ranks x batch_size x accumulate` rows. A run that was saved by four ranks and continues with two would use
half of them, with the same learning rate. So `accumulate` is adapted: the same script on two ranks uses two
microbatches instead of one. With torch's `DistributedSampler` the rows of each step are the same as before.

The number of ranks is read from the sampler of the loader (`num_replicas`), so that ranks of tensor parallelism, which
share their rows, are not counted. If the script itself uses another `accumulate` or `batch_size` than the saved run, it
is not changed, and a different number of rows is logged. A number that cannot be kept is an error. Without such a
sampler, or without `resume(loader)`, nothing is changed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypedDict

from surefoot.errors import CheckpointError
from surefoot.keep.position.loaders import describe

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("surefoot")


class GlobalBatchState(TypedDict):
    """The stored number of rows of one optimizer step."""

    given: int
    """`accumulate` in the script."""
    accumulate: int
    """`accumulate` after adaptation."""
    batch_size: int | None
    """The batch size of the loader on each rank; `None` if not known."""
    replicas: int | None
    """The number of ranks that draw different rows; `None` if it is not known."""


class GlobalBatch:
    """Adapts `accumulate` when the number of ranks differs from that of the saved run."""

    def __init__(self, accumulate: int, set_accumulate: Callable[[int], None]) -> None:
        self._now: GlobalBatchState = {
            "given": accumulate,
            "accumulate": accumulate,
            "batch_size": None,
            "replicas": None,
        }
        self._set = set_accumulate
        self._saved: GlobalBatchState | None = None

    def state_dict(self) -> GlobalBatchState | None:
        """The state that the next run needs to keep the number of rows; `None` if that is not known."""
        state = self._now.copy() if self._saved is None else self._saved
        return None if state["replicas"] is None else state

    def load_state_dict(self, state: GlobalBatchState | None) -> None:
        """Continue a saved run; `None` if it was saved by a version that did not store this."""
        self._saved = state

    def follow(self, loader: Any) -> None:
        """Batches are about to be drawn: adapt to the saved run. Raises `CheckpointError` if that is not possible."""
        facts = describe(loader)
        self._now["batch_size"], self._now["replicas"] = facts["batch_size"], facts.get("replicas")
        saved, self._saved = self._saved, None
        if saved is not None:
            self._adapt(saved)

    def _adapt(self, saved: GlobalBatchState) -> None:
        now, before, here = self._now, _rows(saved), _rows(self._now)
        if before is None or here is None or before == here:
            return
        ranks, size = now["replicas"], now["batch_size"]
        assert ranks is not None
        assert size is not None
        if (now["given"], size) != (saved["given"], saved["batch_size"]):
            log.warning(
                "surefoot: a step now uses %d rows (%d ranks x batch_size %d x accumulate %d); it used %d in the saved "
                "run.", here, ranks, size, now["accumulate"], before,
            )  # fmt: skip
            return
        if before % (ranks * size):
            raise CheckpointError(
                f"a step of the saved run took {before} rows ({saved['replicas']} ranks x batch_size {size} x "
                f"accumulate {saved['accumulate']}), which {ranks} ranks cannot divide evenly. Start "
                f"{_fitting(before // size)} ranks, or choose another `batch_size` or `accumulate`, which changes the "
                "number of rows."
            )
        now["accumulate"] = before // (ranks * size)
        self._set(now["accumulate"])
        log.warning(
            "surefoot: the run was saved by %s ranks and continues with %d: accumulate is %d instead of %d, "
            "so that a step still uses %d rows.", saved["replicas"], ranks, now["accumulate"], now["given"], before,
        )  # fmt: skip


def _rows(state: GlobalBatchState) -> int | None:
    if state["replicas"] is None or state["batch_size"] is None:
        return None
    return state["replicas"] * state["batch_size"] * state["accumulate"]


def _fitting(microbatches: int) -> str:
    """The numbers of ranks that can share this many microbatches."""
    numbers = [str(count) for count in range(1, microbatches + 1) if microbatches % count == 0]
    return numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} or {numbers[-1]}"
