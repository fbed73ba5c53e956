"""The counters and switches of a watched run, which every part of the watcher reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surefoot.record.facts import LossScalerFacts

if TYPE_CHECKING:
    import weakref

    from torch import Tensor

    from surefoot.watch.function_recorder import FunctionRecorder
    from surefoot.watch.step_recording import StepRecording


@dataclass
class LossScalerState:
    """The observed state of a gradient scaler."""

    enabled: bool = False
    scaled_now: bool | None = None
    """Whether gradients are scaled now; `None` before the first call."""
    scale: float | None = None
    unscale_by: Any = None
    """The divisor that unscales the gradients: a number, or an object that is read when a number is divided by it."""
    clipped_scaled: int = 0
    """How often gradients were clipped while they were scaled."""
    clip_site: str | None = None
    attempts: int = 0
    made_at: list[int] = field(default_factory=list)
    """The numbers of attempts at which another scaler came into use."""
    skips: int = 0
    skip_steps: list[int] = field(default_factory=list)
    trace: list[float] = field(default_factory=list)
    """The scale after each step; the middle of a long run is left out."""

    def as_facts(self) -> LossScalerFacts:
        """All facts."""
        known = self.unscale_by if isinstance(self.unscale_by, float) else None
        return LossScalerFacts.from_record(self, unscale_by=known, made_at=self.made_at or None)


class WatchState:
    """The progress of the run, and what is enabled."""

    def __init__(self) -> None:
        self.active = True
        """False in a forked child, such as a data loader's worker."""
        self.thread: int | None = None
        """The thread that trains, known once an optimizer was made."""
        self.trainer: str | None = None
        """The library whose training loop runs, detected at the first step."""
        self.compiled = False
        """Whether the script has compiled something. From then on no hooks and no modes are used."""
        self.on_device = False
        """Whether parameters on a device that runs asynchronously are trained, known at the first step."""
        self.steps = 0
        self.backwards = 0
        self.sampled: StepRecording | None = None
        """The sampled step in progress."""
        self.evaluated: StepRecording | None = None
        """The block without gradients, between two steps, that is being recorded."""
        self.sampling_stopped = False
        """Whether a probe that begins or ends sampled steps has failed, so that no more are started."""
        self.backwards_at_closure: int | None = None
        """The number of backward calls when a step that evaluates a closure began; `None` outside such a step."""
        self.losses_are_late = False
        """Whether the last loss, on a device, had not arrived when its backward began."""
        self.has_stepped = False
        """Whether an optimizer has stepped."""
        self.scaler = LossScalerState()
        self.scale: weakref.ref[Tensor] | None = None
        """The scale of the last scaler, which may be on a device."""

    def is_repeated_evaluation(self) -> bool:
        """Whether an optimizer evaluates its closure again within one step. Only the first evaluation is recorded."""
        return self.backwards_at_closure is not None and self.backwards > self.backwards_at_closure + 1

    def set_recorder_aside(self) -> FunctionRecorder | None:
        """Stop recording calls while a function of torch reads each parameter; `take_up` of the result resumes it."""
        recorder = None if self.sampled is None else self.sampled.recorder
        return recorder if recorder is not None and recorder.set_aside() else None

    def run_compiled(self) -> None:
        """Let compiled code run compiled again before the end of the sampled step, if it runs eagerly now."""
        if self.sampled is not None and self.sampled.eager is not None:
            self.sampled.remove_hooks(forget=True)

    def stop_sampling(self) -> None:
        """Remove the hooks of the sampled step in progress and start no other one."""
        held, self.sampled, self.evaluated = (self.sampled, self.evaluated), None, None
        self.sampling_stopped = True
        for recording in held:
            if recording is not None:
                recording.remove_hooks()
