"""Passes without gradients, between the steps: which model, in which mode, on what data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.watch.sampled_step import SampledStep

if TYPE_CHECKING:
    from surefoot.watch.watcher import Watcher

FIRST_BLOCKS = 12
MOST_PASSES = 400


class Evaluations:
    """Opened when the user's code turns gradients off or calls `eval()`, closed when that is over."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._look: SampledStep | None = None
        self._depth = 0
        self.blocks = 0
        self.passes: list[dict[str, Any]] = []

    def open(self) -> None:
        """Start watching model calls, unless a look already does."""
        self._depth += 1
        if self._depth > 1 or self._watcher.look is not None or self._look is not None:
            return
        self.blocks += 1
        sampled = self.blocks <= FIRST_BLOCKS or self.blocks & (self.blocks - 1) == 0
        if not sampled or len(self.passes) >= MOST_PASSES or not self._watcher.steps:
            return
        watcher = self._watcher
        self._look = SampledStep(
            watcher.steps, watcher.book, watcher.safely, use_tape=False, thorough=False, hooked=not watcher.compiled
        )
        self._look.begin()

    def close(self) -> None:
        """The block is over."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self.drop()

    def drop(self) -> None:
        """Stop watching and keep the passes."""
        look, self._look = self._look, None
        self._depth = 0
        if look is not None:
            look.end()
            for note in look.passes.notes[:16]:
                self.passes.append(note | {"block": self.blocks, "block_passes": len(look.passes.notes)})
