"""What the doctor measures on copies before training, and no run can show: other rates, other labels, other weights."""

from __future__ import annotations

import math

from surefoot.record.facts.codec import Facts, item


class RateProbe(Facts):
    """A short training run of a copy at some multiple of the learning rate."""

    factor: float
    """The multiple."""
    gradually: bool = False
    """Whether the rate was reached little by little."""
    start: float
    """The loss at first, over all batches of the probe."""
    end: float
    """The loss at the end."""
    peak: float
    """The largest loss on the way."""
    steps: int
    """The number of steps that were taken."""
    update_ratio: float
    """The norm of the first update over the norm of the weights, the median over parameters."""

    @property
    def fall(self) -> float:
        """How far the loss fell, as a share of its size; minus infinity if it is not finite."""
        if not math.isfinite(self.end) or not math.isfinite(self.start):
            return -math.inf
        return (self.start - self.end) / max(abs(self.start), 1e-8)


class LabelControl(Facts):
    """Two copies that learned the same rows, one of them with the labels shuffled."""

    rows: int
    """The number of rows that they learned."""
    steps: int
    """The number of steps that they took."""
    true_fall: float
    """The share of the training loss that had disappeared with the true labels."""
    shuffled_fall: float
    """The same with the shuffled labels."""
    true_held_out: float
    """The lowest loss on other rows with the true labels."""
    shuffled_held_out: float
    """The same with the shuffled labels."""
    passes: float = 0.0
    """How many times they went through the rows."""
    neighbour_score: float | None = item(null=True)
    """How much better other rows foretell a label than with the labels shuffled, in standard deviations."""

    @property
    def gain(self) -> float:
        """How much lower the true labels bring the loss on other rows, as a share of it."""
        return (self.shuffled_held_out - self.true_held_out) / max(abs(self.shuffled_held_out), 1e-8)


class AlikeRows(Facts):
    """A weight whose rows start equal, after a few updates of a copy."""

    parameter: str
    """Its name."""
    updates: int
    """The number of updates that were made."""
    apart: float
    """How far a row is from the first one, at most."""
    moved: float
    """How far the weight moved: the root mean square of the change."""


class MomentScale(Facts):
    """A loaded moment of an optimizer, compared with a new gradient of its parameter."""

    moment: str
    """What the optimizer calls it."""
    shape: list[int]
    """Its sizes."""
    parameter_shape: list[int]
    """The sizes of the parameter."""
    gradient_ratio: float | None = item(null=True)
    """For a second moment: the root mean square of the gradient over that represented by the moment."""


class OutputRange(Facts):
    """What reaches a loss function under weights that are changed by a large random amount."""

    loss: str
    """The loss function."""
    low: float
    """The lowest value of all draws."""
    high: float
    """The highest value."""
    target_low: float
    """The lowest target."""
    target_high: float
    """The highest target."""
    below: float
    """The share of the targets that is below every value."""
    above: float
    """The share of the targets that is above every value."""


class BatchScale(Facts):
    """The largest batch, by one of its tensors."""

    path: str
    """The tensor."""
    batch: int
    """Which batch it is."""
    ratio: float
    """Its root mean square over that of a usual batch."""


class SplitComparison(Facts):
    """Rows of the training data and of the evaluation data, side by side."""

    trained: int
    """How many training rows were compared."""
    different: int
    """How many of them differ from one another."""
    evaluated: int
    """How many evaluation rows were compared."""
    shared: int
    """How many of these are, value for value, among the training rows."""
    shift: float | None = item(null=True)
    """How far the means are from each other, in standard deviations of the training data; `None` if not known."""
    stretch: float | None = item(null=True)
    """The standard deviation of the evaluation data over that of the training data."""


class PreflightFacts(Facts):
    """What the doctor found out on copies. What was not measured is empty or `None`."""

    overfits: bool | None = None
    """Whether a few rows could be learned by heart."""
    tiny_batch_left: float | None = None
    """The share of the loss that was left after that."""
    rates: list[RateProbe] = item(factory=list)
    """The learning rates that were tried."""
    label_control: LabelControl | None = None
    """The comparison with shuffled labels."""
    alike_rows: list[AlikeRows] = item(factory=list)
    """Weights whose rows start equal."""
    moments: list[MomentScale] = item(factory=list)
    """The state that the optimizer brought along."""
    output_range: OutputRange | None = None
    """What can reach the loss function."""
    largest_batches: list[BatchScale] = item(factory=list)
    """For each tensor of a batch, the largest of all batches."""
    splits: SplitComparison | None = None
    """Training rows against evaluation rows."""

    def rate(self, factor: float, gradually: bool = False) -> RateProbe | None:
        """The first probe at some multiple of the learning rate, or the first that reached it gradually."""
        wanted = (probe for probe in self.rates if probe.gradually or not gradually)
        return next((probe for probe in wanted if probe.factor == factor), None)
