"""The order of one run of an experiment: the JSON in the environment variable that `surefoot run` reads."""

from __future__ import annotations

from typing import TypedDict

from surefoot.experiments.changes.guard import WriteRules


class RunOrder(WriteRules, total=False):
    """The order of a run. `Children` adds the parent and the folders."""

    change: str | None
    """The name of the change, as in `experiments.plan`; `None` runs the script unchanged."""
    seconds: float
    """The run ends after this time."""
    steps: int
    """The run ends after this many steps."""
    parent: int
    """The process that started the run. The run ends if this process ends."""
    warmup_steps: int
    """`warm-up`: how many steps the learning rate takes to reach the script's own."""
    skip_steps: list[int]
    """`skip-batch`: the steps to skip."""
    reset_at: int | None
    """`reset-moments`: the step before which the moments are reset."""
    incident: str
    """The folder of the incident that the run continues from."""
    target: str | None
    """With an incident: the function that builds the step, in place of a script."""
    follow: int
    """With an incident: how many steps to run after the captured one."""
    draws: bool
    """`other-seed` with an incident: whether the captured step is repeated with other random numbers."""
    bar: float | None
    """`tiny-batch` with an incident: a part of the batch fails if its loss is above it."""


class ChangedOptions(TypedDict, total=False):
    """The options of a watched run that an order changes."""

    most_sampled_steps: int
    """The number of steps that are observed in detail."""
    folder: None
    """No folder for incidents."""
