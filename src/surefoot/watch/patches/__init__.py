"""Hooks on the calls that make up a training loop, through which the watcher observes it.

One file per group of calls; `core.function_hooks` describes how a call is observed without replacing the function.
`surefoot run` watches a process to its end and undoes nothing. A training that is watched from inside
(`watch.training_watch`) ends before its process does, and `uninstall` restores everything.
"""

from __future__ import annotations

import os
import weakref
from importlib import import_module
from typing import TYPE_CHECKING

from surefoot.core.device import stop_postponing_triton
from surefoot.watch import function_recorder
from surefoot.watch.patches.backward import wrap_backward, wrap_function_modes, wrap_script_hooks
from surefoot.watch.patches.clipping import wrap_clipping
from surefoot.watch.patches.data import wrap_data
from surefoot.watch.patches.hooks import Hooks
from surefoot.watch.patches.indexing import wrap_indexing
from surefoot.watch.patches.losses import wrap_losses
from surefoot.watch.patches.modes import wrap_compiling, wrap_modes
from surefoot.watch.patches.optimizers import wrap_optimizers
from surefoot.watch.patches.policies import wrap_policies
from surefoot.watch.patches.randomness import wrap_randomness
from surefoot.watch.patches.scaler import wrap_scaler
from surefoot.watch.patches.states import wrap_states

if TYPE_CHECKING:
    from surefoot.watch.watcher import Watcher

_LATER = (
    "surefoot.record.log", "surefoot.record.store", "surefoot.observe.device", "surefoot.observe.device_alarms",
    "surefoot.guard.model_sampling",
)  # fmt: skip
"""Modules that are used while the script runs. The functions that they call are recorded beforehand."""
installed: list[Hooks] = []
"""The hooks of this process."""


def install(watcher: Watcher, later: tuple[str, ...] = ()) -> Hooks:
    """Observe everything from now on; `later` names further modules that will be used."""
    state = weakref.ref(watcher.state)

    def deactivate() -> None:
        held = state()
        if held is not None:
            held.active = False

    os.register_at_fork(after_in_child=deactivate)
    wrapping = Hooks(watcher.probes)
    wrap_backward(watcher, wrapping)
    wrap_script_hooks(wrapping)
    wrap_function_modes(watcher, wrapping)
    wrap_optimizers(watcher, wrapping)
    wrap_clipping(watcher, wrapping)
    wrap_indexing(watcher, wrapping)
    wrap_scaler(watcher, wrapping)
    wrap_randomness(watcher, wrapping)
    wrap_data(watcher, wrapping)
    wrap_states(watcher, wrapping)
    wrap_modes(watcher, wrapping)
    wrap_losses(watcher, wrapping)
    wrap_compiling(watcher, wrapping)
    wrap_policies(watcher, wrapping)
    watcher.steps.guard.install(wrapping)
    watcher.ranks.install(wrapping)
    for name in (*_LATER, *later):
        import_module(name)
    watcher.probes.originals.bind()
    function_recorder.original_of = watcher.probes.originals.original_of
    installed.append(wrapping)
    return wrapping


def uninstall(watcher: Watcher, wrapping: Hooks) -> None:
    """Stop observing: functions get their original code back.

    If something was compiled in the meantime, functions keep their hooks, which then do nothing: torch recompiles code
    if a function in it changes.
    """
    watcher.state.active = False
    stop_postponing_triton()
    installed.remove(wrapping)
    if not watcher.state.compiled:
        wrapping.remove()
    function_recorder.original_of = function_recorder.unchanged
    watcher.probes.originals.unbind()
