"""One change, applied to a script from outside: what `surefoot bisect` does to the runs that it compares.

A run under `surefoot bisect`, or under `surefoot replay --experiments`, finds its order in an environment variable:
which change to make (none in the baseline), when to end, which folder to write to. `begin` reads it before the watcher
wraps anything, so that the watcher observes the changed functions. `follow` is called afterwards, so that the watcher
sees gradients as the script computed them. Every change counts how often it had an effect: a change that found nothing
to change is not an experiment.

`steps`, `data`, `precision` and `depth` implement the changes, `guard` protects the script's files, `experiment`
counts steps and ends the run. Without the environment variable, nothing of this is imported.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.experiments.changes.run_order import ChangedOptions, RunOrder
    from surefoot.watch.watcher import Watcher

ORDER = "SUREFOOT_EXPERIMENT"
"""The environment variable with the order, as JSON. It is removed before the script can see it."""


def take_order() -> RunOrder | None:
    """The order of this run, if there is one. It is removed from the environment."""
    words = os.environ.pop(ORDER, None)
    return None if words is None else cast("RunOrder", json.loads(words))


def options_for(order: RunOrder | None) -> ChangedOptions:
    """The options of a watched run that an order changes.

    A run that continues from an incident is not diagnosed, and captures no incidents of its own.
    """
    return {"most_sampled_steps": 0, "folder": None} if order is not None and order.get("incident") else {}


def begin(watcher: Watcher, order: RunOrder) -> Experiment:
    """Apply the ordered change. Called once, right after torch has been imported."""
    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.experiments.changes.guard import protect
    from surefoot.experiments.changes.table import install

    experiment = Experiment(watcher, order, protect(order))
    made = False
    if order.get("incident"):  # `surefoot replay --experiments`: the run begins at the captured step
        from surefoot.replay.continued_run import continue_from_incident

        made = continue_from_incident(experiment)
    change = order.get("change")
    if change and not made:
        install(change, experiment)
    return experiment
