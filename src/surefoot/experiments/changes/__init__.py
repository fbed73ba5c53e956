"""One change, made to a script from outside: what `surefoot bisect` does to the runs it compares.

A run under `surefoot bisect`, or under `surefoot replay --experiments`, finds an order in its environment: which change
to make (none in the baseline), when to end, which folder to write in. `begin` reads it, before the watcher wraps
anything, so that the changes lie inside of what is watched; `follow` comes after, so that the watcher sees gradients as
the script made them. Every change says how often it could do something: one that found nothing to change is no
experiment.

`rates`, `gradients`, `state`, `precision`, `order`, `inputs`, `depth` and `kernels` hold the changes, `outputs` keeps
the script's files safe, `experiment` counts and ends the run. Without the order in the environment nothing of this is
imported.
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
"""The environment variable that holds the order, as JSON. It is taken out before the script can see it."""


def take_order() -> RunOrder | None:
    """The order, if this run has one. It is removed from the environment."""
    words = os.environ.pop(ORDER, None)
    return None if words is None else cast("RunOrder", json.loads(words))


def options_for(order: RunOrder | None) -> ChangedOptions:
    """The options of a watched run that an order changes.

    A run that continues from an incident is not diagnosed, and its bad step is kept already.
    """
    return {"most_sampled_steps": 0, "folder": None} if order is not None and order.get("incident") else {}


def begin(watcher: Watcher, order: RunOrder) -> Experiment:
    """Make the change that was ordered. Called once, right after torch was imported."""
    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.experiments.changes.outputs import protect
    from surefoot.experiments.changes.table import install

    experiment = Experiment(watcher, order)
    protect(experiment)
    made = False
    if order.get("incident"):  # `surefoot replay --experiments`: the run begins at the step of an incident
        from surefoot.replay.continued_run import continue_from_incident

        made = continue_from_incident(experiment)
    change = order.get("change")
    if change and not made:
        install(change, experiment)
    return experiment
