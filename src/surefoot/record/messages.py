"""Messages from the training loop to the run log and its sinks: steps, layers, histograms, events.

They are plain data, created in the training thread and never changed afterwards, so that writers may read them in
theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
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
"""The cause of the event, at the end of a run, that rows did not reach a sink."""


@dataclass(frozen=True)
class StepRow:
    """The numbers of one optimizer step. `None` means not measured; NaN and Inf are kept as such."""

    step: int
    time: float
    """Seconds since the epoch."""
    part: str = ""
    """The optimizer of the run, if there are several: `generator`."""
    loss: float | None = None
    grad_norm: float | None = None
    """The norm before clipping, unscaled."""
    clip_factor: float | None = None
    """The factor by which clipping multiplied the gradient; 1 if it did nothing."""
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

    `None` in a list means not measured: a parameter without a gradient has no `grad_norm`.
    """

    step: int
    names: Sequence[str]
    columns: Mapping[str, Any]
    """Arrays or CPU tensors.

    For parameters: `grad_norm`, `grad_largest`, `nonfinite`, `param_norm`, `update_ratio`. For outputs of modules:
    `activation_mean`, `activation_std`, `activation_largest`, `dead_share`, `saturated_share`.
    """
    part: str = ""


@dataclass(frozen=True)
class Histogram:
    """A histogram of the values of one tensor, with the bins of `record.bins`."""

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
    """One reading of a device or of the host. Bytes, degrees Celsius, watts, MHz; `None` if it cannot be read."""

    time: float
    source: str
    """`host`, or the name of a device as torch prints it."""
    step: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """An event, which is one line in `events.jsonl`."""

    event: EventName
    step: int | None
    summary: str
    time: float
    severity: Severity = "info"
    cause: str = ""
    """The detector that raised it (`nonfinite`, `spike`) or a cause code."""
    action: str = ""
    """The response to it."""
    part: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionBegins:
    """The run has returned to an earlier step: rows from now on supersede those of the same and later steps."""


@dataclass(frozen=True)
class CheckpointsExpected:
    """Checkpoints should be written at these intervals: the log reports when they are not."""

    every_steps: int | None = None
    every_minutes: float | None = None


@dataclass(frozen=True)
class BatchesDrawn:
    """Data loaders have returned batches: a sign of progress in a run that makes no steps, as in an evaluation."""


@dataclass(frozen=True)
class Batch:
    """The messages that the writer passes to a sink at one time, in order."""

    steps: Sequence[StepRow] = ()
    layers: Sequence[LayerRows] = ()
    histograms: Sequence[Histogram] = ()
    devices: Sequence[DeviceRow] = ()
    events: Sequence[Event] = ()


@runtime_checkable
class Sink(Protocol):
    """A further destination of the log. Each runs in its own thread: it may be slow, and it may raise."""

    def write(self, batch: Batch) -> None:
        """Process the next rows and events."""

    def close(self) -> None:
        """The run has ended: write what is left."""
