"""The calls that make a training loop, wrapped so that the watcher hears of them.

One file per group of calls; `wrapping` holds what makes a wrapper go unnoticed. The depths given to `site` and
`sys._getframe` count from an observation up to the script: observation, `safely`, the call around, the wrapper. Nothing
is ever unwrapped: a run is watched to its end.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from surefoot.launch.patches.backward import wrap_backward, wrap_function_modes, wrap_listeners
from surefoot.launch.patches.clipping import wrap_clipping
from surefoot.launch.patches.data import wrap_data
from surefoot.launch.patches.modes import wrap_compiling, wrap_modes
from surefoot.launch.patches.optimizers import wrap_optimizers
from surefoot.launch.patches.policies import wrap_policies
from surefoot.launch.patches.randomness import wrap_randomness
from surefoot.launch.patches.scaler import wrap_scaler
from surefoot.launch.patches.states import wrap_states
from surefoot.launch.patches.wrapping import Wrapping

if TYPE_CHECKING:
    from surefoot.launch.watcher import Watcher


def install(watcher: Watcher) -> None:
    """Wrap everything. Called once, right after torch was imported."""

    def left_behind() -> None:
        watcher.active = False

    os.register_at_fork(after_in_child=left_behind)
    wrapping = Wrapping(watcher)
    wrap_backward(watcher, wrapping)
    wrap_listeners(wrapping)
    wrap_function_modes(watcher, wrapping)
    wrap_optimizers(watcher, wrapping)
    wrap_clipping(watcher, wrapping)
    wrap_scaler(watcher, wrapping)
    wrap_randomness(watcher, wrapping)
    wrap_data(watcher, wrapping)
    wrap_states(watcher, wrapping)
    wrap_modes(watcher, wrapping)
    wrap_compiling(watcher, wrapping)
    wrap_policies(watcher, wrapping)
    if watcher.guard is not None:
        watcher.guard.install(wrapping)
