"""Runs the probes, so that a failing probe never affects the script.

Every observation of the script runs through `ProbeRunner.safely`. A probe that raises is disabled, one line on stderr
reports it, and everything else continues. Inside `safely`, surefoot calls the functions that existed before the script
ran (`originals`), and the compiler does not see surefoot's code.
"""

from __future__ import annotations

import os
import time
import traceback
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from surefoot.core.device import is_capturing, note_failure
from surefoot.keep.position.workers import worker_died
from surefoot.watch.messages import say
from surefoot.watch.originals import Originals, Unobservable
from surefoot.watch.script_hooks import runs_eagerly, without_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.watch_state import WatchState

SOME_STEPS = "some steps"
"""The name under which steps that could not be observed are listed among the problems."""
_SAMPLING_PROBES = frozenset({"looking", "steps", "backward", "optimizers"})
"""Probes that begin and end sampled steps. If one fails, sampling stops."""
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
"""With `None` the compiler, which otherwise compiles whatever is called where a graph breaks, sees nothing."""


class ProbeRunner:
    """Runs observations one at a time and records which probes have failed."""

    def __init__(self, state: WatchState) -> None:
        self._state = state
        self._is_observing = False
        self._began = 0.0
        self.originals = Originals()
        """The functions and methods that existed before the script ran; in use once they are bound."""
        self.out_of_memory = False
        """Whether the script has ended because no memory was left: what fails for that reason is not reported."""
        self.problems: dict[str, str] = {}
        """The probes that failed, each with its error."""

    def here(self) -> bool:
        """Whether this is the process and the thread that train, and torch is not compiling, tracing or capturing."""
        is_ours = self._state.active and self._state.thread in (None, get_ident())
        return is_ours and runs_eagerly() and not is_capturing()

    def safely(self, probe: str, observe: Callable[..., Any], *args: Any) -> Any:
        """Run one observation; returns its result. If it fails, returns `None` and switches the probe off."""
        if probe in self.problems:
            return None
        try:
            with without_torch_function():
                if self._is_observing or not self.originals.is_bound:
                    return observe(*args)
                self._is_observing = True
                compiler = _set_eval_frame(None) if self._state.compiled else None
                sampled, self._began = self._state.sampled or self._state.evaluated, time.perf_counter()
                try:
                    return self.originals.call(observe, *args)
                finally:
                    self._is_observing = False
                    if sampled is not None and sampled in (self._state.sampled, self._state.evaluated):
                        sampled.seconds += time.perf_counter() - self._began
                    if compiler is not None:
                        _set_eval_frame(compiler)
        except Unobservable as reason:  # later, when there is no other thread, it may be possible again
            if SOME_STEPS not in self.problems:
                self.problems[SOME_STEPS] = str(reason)
                say(f"surefoot: {SOME_STEPS} are not observed ({reason})")
            return None
        except Exception as error:
            if worker_died(error):  # torch raises it wherever the program is, and it is the script's
                raise
            self.switch_off(probe, error)
            return None

    def seconds_so_far(self) -> float:
        """How long the observation in progress has taken; 0 if there is none."""
        return time.perf_counter() - self._began if self._is_observing else 0.0

    def always(self, act: Callable[..., Any], *args: Any) -> Any:
        """Run what protects the weights, and return its result. Its errors are the caller's.

        It runs with torch's methods as they were before the script, or as they are now if other threads would notice.
        """
        with without_torch_function():
            if self._is_observing or not self.originals.is_bound:
                return act(*args)
            self._is_observing = True
            compiler = _set_eval_frame(None) if self._state.compiled else None
            try:
                return self.originals.call(act, *args)
            except Unobservable:  # raised before `act` began
                return act(*args)
            finally:
                self._is_observing = False
                if compiler is not None:
                    _set_eval_frame(compiler)

    def switch_off(self, probe: str, error: Exception) -> None:
        """Record that a probe failed, and report it once.

        An error of the device is none of the probe's: the script's next call of the device raises it too, and the
        diagnosis at the end names it.
        """
        if note_failure(error) or (self.out_of_memory and isinstance(error, torch.OutOfMemoryError)):
            self._state.stop_sampling()
            return
        if os.environ.get("SUREFOOT_DEBUG"):
            say("".join(traceback.format_exception(error)))
        is_known, self.problems[probe] = probe in self.problems, f"{type(error).__name__}: {error}"
        if probe in _SAMPLING_PROBES:  # nothing else would ever end the sampled step
            self._state.stop_sampling()
        if not is_known:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            say(f"surefoot: stopped watching {probe} ({words}); the script is not affected")
