"""Facts of optimizers: settings, the numbers of their steps, and what changes rates and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping

from surefoot.record.facts.codec import Facts, item

Setting = bool | int | float | str | list[float]


class GroupSettings(Facts):
    """The settings of one parameter group, as the optimizer was given them."""

    values: dict[str, Setting] = item(whole=True)
    """Every setting that is a number, text, or a list of numbers."""

    @classmethod
    def of(cls, group: Mapping[str, object]) -> GroupSettings:
        """The settings of a parameter group of torch that JSON can hold."""
        known = {key: _simple(value) for key, value in group.items() if key != "params"}
        return cls(values={key: value for key, value in known.items() if value is not None})

    def number(self, name: str) -> float | None:
        """A setting that is a number."""
        value = self.values.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def lr(self) -> float | None:
        """The learning rate."""
        return self.number("lr")

    @property
    def initial_lr(self) -> float | None:
        """The learning rate that a scheduler began with."""
        return self.number("initial_lr")

    @property
    def eps(self) -> float | None:
        """What the second moment is kept away from 0 by."""
        return self.number("eps")

    @property
    def momentum(self) -> float | None:
        """The momentum of SGD and RMSprop."""
        return self.number("momentum")

    @property
    def weight_decay(self) -> float | None:
        """The weight decay."""
        return self.number("weight_decay")

    @property
    def betas(self) -> list[float] | None:
        """The decay rates of the moments."""
        value = self.values.get("betas")
        return value if isinstance(value, list) else None

    @property
    def maximize(self) -> bool:
        """Whether the loss is maximized."""
        return bool(self.values.get("maximize"))


def _simple(value: object) -> Setting | None:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value):
        return list(value)
    if getattr(value, "ndim", None) == 0 or getattr(value, "shape", None) == (1,):  # a learning rate may be a tensor
        return float(value)  # type: ignore[arg-type]
    return None


class StepSeries(Facts):
    """One number per step, in columns. A column is empty if no step had the number, and `None` where one had not.

    Of a long run the middle is thinned: the first thousand and the last two thousand steps are complete.
    """

    grad_norm: list[float | None] = item(factory=list)
    """The norm of the gradients before clipping."""
    skipped: list[bool | float | None] = item(factory=list)
    """Whether the guard skipped the step."""
    closure: list[int | None] = item(factory=list)
    """How often the step evaluated its closure."""
    loss: list[float | None] = item(factory=list)
    """The loss."""
    backwards: list[int | None] = item(factory=list)
    """How many backwards there were since the step before."""
    lr: list[float | None] = item(factory=list)
    """The learning rate of the first parameter group."""
    clip_norm: list[float | None] = item(factory=list)
    """The norm, or the largest entry, that clipping found."""
    clip_limit: list[float | None] = item(factory=list)
    """The limit of clipping."""
    clip_by_value: list[bool | None] = item(factory=list)
    """Whether entries were clipped, not the norm."""
    scale: list[float | None] = item(factory=list)
    """The loss scale."""
    roots: list[int | None] = item(factory=list)
    """How many different lines called `backward`."""
    at: list[int | None] = item(factory=list)
    """The step of the run."""
    step: list[int] = item(factory=list)
    """The step of the optimizer."""
    leftover: list[float | None] = item(factory=list)
    """Which share of the parameters still had a gradient when backward ran."""

    def without(self, steps: Container[int]) -> StepSeries:
        """The columns without the rows of some steps."""
        rows = [row for row, step in enumerate(self.step) if step not in steps]
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return StepSeries(**{name: [column[row] for row in rows] for name, column in columns.items() if column})


class OptimizerFacts(Facts):
    """One optimizer: its settings and the numbers of its steps."""

    number: int
    """Its number, in the order in which optimizers were made."""
    type: str
    """The name of its class."""
    site: str = ""
    """The line of the script that made it."""
    settings: list[GroupSettings] = item(factory=list, always=True)
    """The settings of its first eight parameter groups."""
    steps: int
    """The number of steps that it made."""
    created_at_step: int = item(default=0, always=True)
    """The step of the run at which it was made."""
    state_loaded_at_step: int | None = item(null=True)
    """The number of steps that it had made when a state was loaded into it."""
    loaded_state_steps: float | None = item(null=True)
    """How many steps that state had gathered."""
    backward_lines: list[int] = item("lines", factory=list, always=True)
    """The lines of `backward` whose gradients it stepped with, as `StepBatch.line` counts them."""
    zeroed_before_step: int = 0
    """How often gradients were zeroed between backward and step."""
    zeroed_between: int | None = None
    """In how many steps gradients were zeroed after one backward and before another; `None` if in none."""
    zero_site: str = ""
    """The line of the script that did so."""
    series: StepSeries = item(factory=StepSeries, always=True)
    """The numbers of its steps."""

    @property
    def first_group(self) -> GroupSettings:
        """The settings of its first parameter group; empty if they are not known."""
        return self.settings[0] if self.settings else GroupSettings(values={})


class SchedulerFacts(Facts):
    """A learning-rate scheduler."""

    type: str
    """The name of its class."""
    site: str
    """The line of the script that made it."""
    steps: int
    """How often it was stepped."""
    last_epoch: int
    """How far it counts."""
    optimizer: int | None = item(beside="settings")
    """The number of its optimizer."""
    settings: dict[str, bool | int | float] | None = None
    """Its numbers, as they were when it was first stepped; `None` if it never was."""

    @property
    def cosine_period(self) -> float | None:
        """After how many steps a cosine schedule reaches its floor."""
        return (self.settings or {}).get("T_max")


class ClippingFacts(Facts):
    """One of the first calls that clip gradients."""

    step: int
    """The step."""
    site: str
    """The line of the script."""
    limit: float | None = item(null=True)
    """The limit."""


class LossScalerFacts(Facts):
    """What a gradient scaler did. Empty if there is none."""

    enabled: bool = item(default=False)
    """Whether it scales."""
    scaled_now: bool | None = None
    """Whether gradients carried the scale at the end."""
    scale: float | None = None
    """The last scale."""
    unscale_by: float | None = item(beside="enabled")
    """What gradients still have to be divided by."""
    clipped_scaled: int = item(default=0)
    """How often gradients were clipped while they carried the scale."""
    clip_site: str | None = None
    """The line of the script that did so."""
    attempts: int = item(default=0)
    """The number of requested steps."""
    made_at: list[int] | None = None
    """The numbers of steps at which another scaler was first used, at most 64 times."""
    skips: int = item(default=0)
    """The number of steps that it skipped."""
    skip_steps: list[int] = item(factory=list)
    """Which ones, at most the last 500."""
    trace: list[float] = item(factory=list)
    """The scale after each step; of a long run the middle is left out."""
