"""What travels from the training loop to the run log and its sinks: steps, layers, histograms, events.

Plain data, made in the training thread and never changed afterwards, so that writers may look at it from theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surefoot.types import Severity

EventName: TypeAlias = Literal[
    "start",
    "resume",
    "skip",
    "overflow",
    "clip-burst",
    "spike",
    "rollback",
    "checkpoint",
    "lr-change",
    "alarm",
    "finding",
    "halt",
    "drops",
    "end",
]


SINK_DROPPED = "sink.dropped"
"""The cause of the event at the end of a run that rows did not reach a sink."""


@dataclass(frozen=True)
class StepRow:
    """The numbers of one optimizer step. `None` means that nobody measured it; NaN and Inf are kept as such."""

    step: int
    time: float
    """Seconds since the epoch."""
    part: str = ""
    """Which optimizer of the run, where there are several: `generator`."""
    loss: float | None = None
    grad_norm: float | None = None
    """Before clipping, unscaled."""
    clip_factor: float | None = None
    """What clipping multiplied the gradient by; 1 when it did nothing."""
    lr: float | None = None
    loss_scale: float | None = None
    nonfinite: float | None = None
    """Entries of the gradient that are NaN or Inf."""
    skipped: bool = False
    signals: Mapping[str, float] = field(default_factory=dict)
    """The user's own signals; in the tables they are columns named `signal.<name>`."""


@dataclass(frozen=True)
class LayerRows:
    """Per-layer numbers of one step: in each column one value per name, with NaN and Inf kept.

    `None` in a list means that there was nothing to measure: a parameter without a gradient has no `grad_norm`.
    """

    step: int
    names: Sequence[str]
    columns: Mapping[str, Any]
    """Arrays or CPU tensors.

    Of parameters: `grad_norm`, `grad_largest`, `nonfinite`, `param_norm`, `update_ratio`. Of the outputs of modules:
    `activation_mean`, `activation_std`, `activation_largest`, `dead_share`, `saturated_share`.
    """
    part: str = ""


@dataclass(frozen=True)
class Histogram:
    """How the values of one tensor are spread, over the bins that `record.bins` lays down."""

    step: int
    kind: Literal["weight", "gradient", "activation"]
    layer: str
    counts: Sequence[int]
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    part: str = ""


@dataclass(frozen=True)
class DeviceRow:
    """One reading of a device or of the host. Bytes, degrees Celsius, watts, MHz; `None` where it cannot be read."""

    time: float
    source: str
    """`host`, or the name of a device such as torch prints it."""
    step: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Something that happened, one line in `events.jsonl`."""

    event: EventName
    step: int | None
    summary: str
    time: float
    severity: Severity = "info"
    cause: str = ""
    """The detector that raised it (`nonfinite`, `spike`) or a cause code."""
    action: str = ""
    """What was done about it."""
    part: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionBegins:
    """The run has gone back to an earlier step: rows from here on supersede those of the same and later steps."""


@dataclass(frozen=True)
class CheckpointsExpected:
    """Checkpoints are to be written at these intervals: the log reports when they are not."""

    every_steps: int | None = None
    every_minutes: float | None = None


@dataclass(frozen=True)
class BatchesDrawn:
    """Data loaders have handed out batches: a sign of life of a run that makes no steps, as in an evaluation."""


@dataclass(frozen=True)
class Batch:
    """What the writer hands on to a sink at one go, in order."""

    steps: Sequence[StepRow] = ()
    layers: Sequence[LayerRows] = ()
    histograms: Sequence[Histogram] = ()
    devices: Sequence[DeviceRow] = ()
    events: Sequence[Event] = ()


@runtime_checkable
class Sink(Protocol):
    """Another place that the log goes to. Each runs in a thread of its own: it may be slow, it may raise."""

    def write(self, batch: Batch) -> None:
        """Take the next rows and events in."""

    def close(self) -> None:
        """The run is over: write what is left."""
