"""The counters and switches of a watched run, which every part of the watcher reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surefoot.record.facts import LossScalerFacts

if TYPE_CHECKING:
    import weakref

    from torch import Tensor

    from surefoot.watch.step_recording import StepRecording


@dataclass
class LossScalerState:
    """What a gradient scaler was seen to do."""

    enabled: bool = False
    scaled_now: bool | None = None
    """Whether gradients carry the scale now; `None` before the first call."""
    scale: float | None = None
    unscale_by: Any = None
    """What gradients still have to be divided by: a number, or one that is read when a number is divided by it."""
    clipped_scaled: int = 0
    """How often gradients were clipped while they carried the scale."""
    clip_site: str | None = None
    attempts: int = 0
    made_at: list[int] = field(default_factory=list)
    """How many attempts there had been whenever another scaler came."""
    skips: int = 0
    skip_steps: list[int] = field(default_factory=list)
    trace: list[float] = field(default_factory=list)
    """The scale after each step; of a long run the middle is left out."""

    def as_facts(self) -> LossScalerFacts:
        """All of it."""
        known = self.unscale_by if isinstance(self.unscale_by, float) else None
        return LossScalerFacts(**(vars(self) | {"unscale_by": known, "made_at": self.made_at or None}))


class WatchState:
    """How far the run is, and what is switched on."""

    def __init__(self) -> None:
        self.active = True
        """False in a forked child, such as a data loader's worker."""
        self.thread: int | None = None
        """The thread that trains, once an optimizer was made."""
        self.trainer: str | None = None
        """The library whose training loop runs, as the first step showed it."""
        self.compiled = False
        """Whether the script has compiled something. From then on no hooks and no modes are used."""
        self.steps = 0
        self.backwards = 0
        self.sampled: StepRecording | None = None
        """The sampled step in progress."""
        self.evaluated: StepRecording | None = None
        """The block without gradients, between two steps, that is being recorded."""
        self.sampling_stopped = False
        """Whether a probe that begins or ends sampled steps has failed, so that no more are started."""
        self.backwards_at_closure: int | None = None
        """The number of backwards when a step that evaluates a closure began; `None` outside of such a step."""
        self.losses_are_late = False
        """Whether the last loss, on a device, was not known yet when its backward began."""
        self.has_stepped = False
        """Whether an optimizer has stepped."""
        self.scaler = LossScalerState()
        self.scale: weakref.ref[Tensor] | None = None
        """The scale of the last scaler itself, which may be on a device."""

    def is_repeated_evaluation(self) -> bool:
        """Whether an optimizer evaluates its closure again within one step. Only the first evaluation is recorded."""
        return self.backwards_at_closure is not None and self.backwards > self.backwards_at_closure + 1

    def run_compiled(self) -> None:
        """Let compiled code run as such again, if it runs eagerly now, before the sampled step is over."""
        if self.sampled is not None and self.sampled.eager is not None:
            self.sampled.remove_hooks(forget=True)

    def stop_sampling(self) -> None:
        """Remove the hooks of the sampled step in progress and start no other one."""
        held, self.sampled, self.evaluated = (self.sampled, self.evaluated), None, None
        self.sampling_stopped = True
        for recording in held:
            if recording is not None:
                recording.remove_hooks()
