"""The counters and switches of a watched run, which every part of the watcher reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.watch.sampled_step import SampledStep


class RunState:
    """How far the run is, and what is switched on."""

    def __init__(self) -> None:
        self.active = True
        """False in a forked child, such as a data loader's worker."""
        self.thread: int | None = None
        """The thread that trains, once an optimizer was made."""
        self.compiled = False
        """Whether the script has compiled something. From then on no hooks and no modes are used."""
        self.steps = 0
        self.backwards = 0
        self.sampled: SampledStep | None = None
        """The sampled step in progress."""
        self.sampling_stopped = False
        """Whether a probe that begins or ends sampled steps has failed, so that no more are started."""
        self.backwards_at_closure: int | None = None
        """The number of backwards when a step that evaluates a closure began; `None` outside of such a step."""
        self.has_stepped = False
        """Whether an optimizer has stepped."""
        self.scaler: dict[str, Any] = {}
        """What the gradient scaler was seen to do."""

    def is_repeated_evaluation(self) -> bool:
        """Whether an optimizer evaluates its closure again within one step. Only the first evaluation is recorded."""
        return self.backwards_at_closure is not None and self.backwards > self.backwards_at_closure + 1

    def stop_sampling(self) -> None:
        """Remove the hooks of the sampled step in progress and start no other one."""
        sampled, self.sampled = self.sampled, None
        self.sampling_stopped = True
        if sampled is not None:
            sampled.remove_hooks()
