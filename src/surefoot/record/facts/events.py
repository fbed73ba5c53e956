"""Facts about what happened at one moment of a run: a spike, a non-finite loss or gradient, a state loaded or saved."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from surefoot.record.facts.calls import TensorSummary
from surefoot.record.facts.codec import Facts, item
from surefoot.record.facts.sampled_steps import NonFiniteNode


class UngraphedCall(Facts):
    """An operation without a graph, on the way of data into the model, that is not defined everywhere."""

    call: str
    """The name of the function."""
    site: str
    """The line of the script."""
    module: str
    """The module that was running."""
    bad: bool
    """Whether its result was not finite."""
    given_finite: bool | None = item(null=True)
    """Whether what it was given was finite; `None` if that is not known."""
    nan: int | None = None
    """The number of results that are NaN."""
    inf: int | None = None
    """The number of results that are infinite."""
    of: int | None = None
    """The number of results."""
    lowest: float | None = None
    """The lowest value it was given."""


class NonFiniteLoss(Facts):
    """A loss that is not finite, and where the first non-finite value under it came from."""

    name: str | None = None
    """The variable that held it; only of a loss that `backward` was never called on."""
    step: int | None = None
    """The step; `None` for a loss that `backward` was never called on."""
    value: float
    """The loss."""
    kind: str
    """Where it came from: `parameter`, `data`, `operation` or `unknown`."""
    op: str | None = None
    """The autograd node that made or used the first non-finite value."""
    parameters: list[str] | None = None
    """The parameters that are not finite."""
    count: int | None = None
    """The number of parameters that are not finite."""
    tensor: str | None = None
    """What the node calls the non-finite operand."""
    argument: str | None = None
    """The argument of a compiled model or function that is not finite, as it is written in Python."""
    inputs: dict[str, tuple[float, float]] | None = None
    """The range of the finite values of each operand."""
    dtype: str | None = None
    """The type of the operands."""
    nan: int | None = None
    """The number of values that are NaN."""
    inf: int | None = None
    """The number of values that are infinite."""
    minus_inf: int | None = None
    """The number of values that are minus infinity."""
    shape: list[int] | None = None
    """The shape of the non-finite tensor."""
    rows: list[int] | None = None
    """The first rows that are not finite, at most ten."""
    bad_rows: int | None = None
    """The number of rows that are not finite."""
    undefined_at: str | None = None
    """Where the operation is not defined, in words."""
    bad: int | None = None
    """The number of such values."""
    lowest: float | None = None
    """The lowest operand."""
    largest: float | None = None
    """The largest absolute operand, or result beyond half precision."""
    empty_count: bool = item(default=False)
    """Whether a count of 0 was divided by."""
    masked_rows: int | None = None
    """How many rows of a softmax have every key masked."""
    below: list[str] | None = None
    """The autograd nodes under a softmax."""
    all_ignored: bool = item(default=False)
    """Whether every target is the ignored one."""
    all_weightless: bool = item(default=False)
    """Whether every target that is not ignored belongs to a class with the weight 0."""
    ignore_index: int | None = None
    """The label that is left out."""
    site: str | None = None
    """The line of the script that called the operation."""
    module: str | None = None
    """The module that was running."""
    call: str | None = None
    """The function that was called."""
    sites: list[str] | None = None
    """All lines that called an operation of this kind, if there are several."""
    came_in_finite: bool | None = None
    """`False` if the data was not finite where it came in."""
    from_model: bool = item(default=False)
    """Whether the data was computed by a model."""
    without_graph: bool = item(default=False)
    """Whether the operation ran outside of autograd, before the data entered the graph."""
    exact: bool | None = None
    """Whether that operation was seen to make the value, or is only the likely one."""
    made_by: UngraphedCall | None = item(beside="without_graph")
    """That operation."""
    passed: list[str] | None = None
    """The operations without a graph that the data went through, in words."""


class NonFiniteLossEvent(NonFiniteLoss):
    """The first loss that was not finite."""

    TAG: ClassVar[tuple[str, str]] = ("event", "nonfinite-loss")
    step: int
    """The step."""

    @classmethod
    def at(cls, step: int, loss: NonFiniteLoss) -> NonFiniteLossEvent:
        """The event that a loss of a step was not finite."""
        return cls.from_record(loss, step=step)


class NonFiniteGradientEvent(Facts):
    """The first step whose gradients were not finite."""

    TAG: ClassVar[tuple[str, str]] = ("event", "nonfinite-gradient")
    step: int
    """The step."""
    parameters: list[str]
    """The parameters whose gradients are not finite, at most 20."""
    finite: list[str]
    """The parameters whose gradients are finite, at most 20."""
    loss_finite: bool
    """Whether the loss was finite."""
    node: NonFiniteNode | None = item("backward", default=None)
    """The node of the backward pass that made the first of them, where that was seen."""


class SavedTensor(Facts):
    """A tensor that an autograd node saved."""

    op: str
    """The autograd node that holds it."""
    tensor: str
    """What the node calls it."""


class SpikeData(TensorSummary, SavedTensor):
    """A tensor of data that went into a loss."""

    worst_row: int | None = None
    """The row with the largest absolute value."""
    row_ratio: float | None = None
    """That value over the median of all rows."""


class SpikeEvent(Facts):
    """A loss far above the last ones from the same line of the script."""

    TAG: ClassVar[tuple[str, str]] = ("event", "spike")
    step: int
    """The step."""
    value: float
    """The loss."""
    level: float
    """The median of the losses before."""
    data: list[SpikeData]
    """The data that went into it."""
    backward: int
    """Which backward of the run it is."""
    began: float
    """Where the loss of that line was at first."""


class StateEvent(Facts):
    """A state was loaded or saved."""

    step: int
    """The step."""
    site: str
    """The line of the script."""


class ModelLoadedEvent(StateEvent):
    """A state was loaded into a model."""

    TAG: ClassVar[tuple[str, str]] = ("event", "model-loaded")
    file: int | None = None
    """Which of the files that were read the state came from, counted from 0; `None` if that is not known."""
    unmatched: list[str] | None = None
    """If no name of the state is one of the model: the first name of each."""


class OptimizerLoadedEvent(StateEvent):
    """A state was loaded into an optimizer."""

    TAG: ClassVar[tuple[str, str]] = ("event", "optimizer-loaded")
    optimizer: int
    """The number of the optimizer."""
    file: int | None = None
    """Which of the files that were read the state came from, counted from 0; `None` if that is not known."""
    age: float | None = None
    """How many steps old its moments are; `None` if they do not say."""


class ScalerLoadedEvent(StateEvent):
    """A state was loaded into a gradient scaler."""

    TAG: ClassVar[tuple[str, str]] = ("event", "scaler-loaded")


class SchedulerLoadedEvent(StateEvent):
    """A state was loaded into a learning-rate scheduler."""

    TAG: ClassVar[tuple[str, str]] = ("event", "scheduler-loaded")


class FileLoadedEvent(StateEvent):
    """A file was read with `torch.load`."""

    TAG: ClassVar[tuple[str, str]] = ("event", "file-loaded")
    holds: list[str]
    """The kinds of state in it: `model`, `optimizer`, `scheduler`, `scaler`, `progress`."""
    backward: int
    """The number of backward calls so far."""
    progress: int | None = None
    """The step that is written in it, if there is one."""
    saved_at_step: int | None = None
    """The step at which this run wrote the file, if it did."""
    moments_age: int | None = None
    """The number of steps of the optimizer state in it, if there is exactly one that counts them."""
    scaler_attempts: int = item(default=0)
    """How many steps a gradient scaler had been asked for."""


class FileSavedEvent(StateEvent):
    """A file was written with `torch.save`."""

    TAG: ClassVar[tuple[str, str]] = ("event", "saved")
    holds: list[str]
    """The kinds of state in it."""


class StepSkippedEvent(Facts):
    """A step was skipped by the guard."""

    TAG: ClassVar[tuple[str, str]] = ("event", "skip")
    step: int
    """The step."""
    parameters: list[str]
    """The parameters whose gradients are not finite."""
    of: int
    """How many there are."""
    settings: list[str] = item(factory=list)
    """Settings of the optimizer that are not finite, in words."""
    optimizer: int | None = item(null=True)
    """The number of the optimizer."""


class IncidentEvent(Facts):
    """Something that a stabilizer noticed, and what it did about it."""

    TAG: ClassVar[tuple[str, str]] = ("event", "incident")
    step: int
    """The step."""
    kind: str
    """The detector that raised it, or a cause."""
    severity: str
    """`info`, `warning` or `error`."""
    action: str
    """What was done: `skip`, `back_off`, `roll_back`, `halt`, …; empty if nothing was."""
    summary: str
    """What happened, in one sentence."""


Event: TypeAlias = (
    NonFiniteLossEvent
    | NonFiniteGradientEvent
    | SpikeEvent
    | ModelLoadedEvent
    | OptimizerLoadedEvent
    | ScalerLoadedEvent
    | SchedulerLoadedEvent
    | FileLoadedEvent
    | FileSavedEvent
    | StepSkippedEvent
    | IncidentEvent
)
