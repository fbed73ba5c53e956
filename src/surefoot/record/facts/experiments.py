"""Facts of experiments: what `surefoot bisect` and `surefoot replay --experiments` changed, and what they saw."""

from __future__ import annotations

from surefoot.record.facts.codec import Facts, item


class ExperimentDevices(Facts):
    """What an experiment saw of the optimizers."""

    devices: list[str]
    """The kinds of devices that parameters are on."""
    has_state: bool
    """Whether an optimizer keeps tensors."""
    dtypes: list[str]
    """The types of the parameters."""


class ContinuedStep(Facts):
    """One step of a run that continues from an incident; the first is the captured step."""

    loss: float | None = item(null=True)
    """Its loss; the mean of its microbatches."""
    grad_norm: float | None = item(null=True)
    """Its gradient norm; `None` if a loss scaler skipped the step."""
    lr: float | None = item(null=True)
    """Its learning rate; `None` if a loss scaler skipped the step."""
    applied: bool
    """Whether the optimizer applied it."""
    skipped: bool
    """Whether the experiment skipped it on purpose."""
    captured_rows: int | None = None
    """With other batches: how many rows of the captured batch could not be replaced in this step's batches."""


class CapturedBatch(Facts):
    """The batch of the captured step."""

    nonfinite: int
    """How many of its values are not finite."""
    handed_out: bool = item(default=False, always=True)
    """Whether the batch itself was captured; otherwise only the inputs of the model were."""


class RepeatedDraws(Facts):
    """The captured step, repeated with other random numbers."""

    random: bool = item(default=False, always=True)
    """Whether the step draws random numbers."""
    tries: int = item(default=0, always=True)
    """How many other draws were tried."""
    failed: int = item(default=0, always=True)
    """With how many of them the step failed."""


class FailingRows(Facts):
    """Which rows of the captured batch fail."""

    of: int = item(default=0, always=True)
    """The number of rows of the batch."""
    tries: int = item(default=0, always=True)
    """How many parts of it were tried."""
    draws: RepeatedDraws = item(factory=RepeatedDraws, always=True)
    """What other random numbers change."""
    ahead: bool = item(default=False, always=True)
    """Whether the script draws batches ahead of their steps, so that a failure cannot be assigned to a part."""
    fails: bool | None = item(null=True)
    """Whether the whole batch fails; `None` if it was not tried."""
    single: list[int] = item(factory=list, always=True)
    """Rows that fail alone."""
    together: list[list[int]] = item(factory=list, always=True)
    """First and last row of each part that fails only as a whole."""
    everywhere: bool = item(default=False, always=True)
    """Whether every part fails."""
    done: bool = item(default=False, always=True)
    """Whether the search was completed."""
    microbatch: int | None = item(null=True)
    """Which microbatch was searched, if the step had several."""
    narrowed: list[int] | None = None
    """First and last row of the part that failed last."""


class ExperimentFacts(Facts):
    """The change that `surefoot bisect` or `surefoot replay --experiments` made to the run."""

    change: str | None = item(null=True)
    """Its name."""
    acted: int = item(default=0, always=True)
    """How often it was made."""
    problem: str | None = item(null=True)
    """Why it could not be made; empty if it could."""
    notes: list[str] = item(factory=list, always=True)
    """What is worth knowing about it."""
    skipped: list[int] = item(factory=list, always=True)
    """The steps it left out."""
    refused: str | None = item(null=True)
    """Why it does not apply."""
    outside: list[str] = item(factory=list, always=True)
    """Files that the script made outside of the scratch folder."""
    ended: str | None = item(null=True)
    """Why the run was ended early; empty if it was not."""
    seen: ExperimentDevices | None = item(null=True)
    """What it saw of the optimizers."""
    trail: list[ContinuedStep] | None = None
    """After an incident: the steps of the run, the captured one first."""
    open: list[float] | None = None
    """After an incident: the losses of the step that was not complete when the run ended."""
    state: dict[str, int] | None = None
    """After an incident: how many values of each weight were not finite before the captured step."""
    batch: CapturedBatch | None = None
    """After an incident: the captured batch."""
    rows: FailingRows | None = None
    """After an incident, with a search for rows: what it found."""
    why_not: str | None = None
    """After an incident: why the change does not apply to it."""
