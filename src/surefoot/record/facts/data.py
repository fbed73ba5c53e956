"""Facts of the data: what loaders returned, and what the steps were trained on."""

from __future__ import annotations

from surefoot.record.facts.codec import Facts, item


class StepBatch(Facts):
    """The data of one backward, read from its graph."""

    step: int
    """The step."""
    backward: int
    """Which backward of the run it is."""
    line: int
    """Which line that calls `backward` it is, in the order of their first call."""
    input_print: int | None = item("x", default=None)
    """A fingerprint of the inputs."""
    size: int | None = None
    """The number of rows."""
    input_largest: float | None = item("x_largest", default=None)
    """The largest absolute input."""
    target_print: int | None = item("y", default=None)
    """A fingerprint of the targets."""
    labels: dict[str, int] | None = None
    """How often each label occurs."""
    target_mean: float | None = item("y_mean", default=None)
    """The mean of the targets."""
    target_std: float | None = item("y_std", default=None)
    """The standard deviation of the targets."""
    target_largest: float | None = item("y_largest", default=None)
    """The largest absolute target."""


class SeenRows(Facts):
    """Every row that was trained on from one line that calls `backward`."""

    prints: list[int]
    """A fingerprint of each row."""
    first: list[int]
    """The backward at which it was first seen."""
    whole: bool
    """Whether every row is known."""


class StepDataFacts(Facts):
    """What the steps were trained on."""

    batches: list[StepBatch] = item("notes", factory=list, always=True)
    """The data of each backward, at most 1200."""
    rows: dict[str, SeenRows] = item(factory=dict, always=True)
    """The rows, by the number of the line."""


class Permutation(Facts):
    """A permutation that rows were picked by, at the first sampled step that saw it."""

    step: int
    """The step."""
    length: int
    """Its length."""
    fingerprint: int = item("print")
    """A number that equal permutations share."""
    number: int
    """Which permutation of the run it is."""


class LoaderFacts(Facts):
    """A data loader that was iterated."""

    number: int
    """Its number."""
    batch_size: int | None = item(null=True)
    """Its batch size."""
    sampler: str
    """The class of its sampler."""
    shuffles: bool
    """Whether the sampler means to give another order every time."""
    workers: int
    """The number of worker processes."""
    rows: int | None = item(null=True)
    """The length of its dataset."""
    batches: int | None = item(null=True)
    """Its own length."""
    iterations: int
    """How often it was iterated."""
    drawn: int
    """The number of batches that were drawn."""
    site: str
    """The line of the script that iterates it."""
    weights: int | None = None
    """For how many rows a `WeightedRandomSampler` has a weight; it draws only those."""


class DrawnBatch(Facts):
    """A batch that a data loader returned."""

    loader: int
    """The number of the loader."""
    iteration: int
    """Which iteration of the loader it is from, counted from 1."""
    step: int
    """The step."""
    backward: int
    """The number of backward calls so far."""
    size: int
    """The number of rows."""
    fingerprint: int = item("print")
    """A number that equal batches share."""
    grad_mode: bool = item("grad")
    """Whether gradients were enabled."""
    labels: dict[str, int] | None = None
    """How often each label occurs."""
    target_mean: float | None = None
    """The mean of the targets."""
    target_std: float | None = None
    """The standard deviation of the targets."""
