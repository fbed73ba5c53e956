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
from surefoot.core.without_hooks import without_torch_function
from surefoot.keep.position.workers import worker_died
from surefoot.watch.messages import print_line
from surefoot.watch.originals import Originals, Unobservable

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.watch_state import WatchState

SOME_STEPS = "some steps"
"""Steps that could not be observed are listed under this name among the problems."""
_SAMPLING_PROBES = frozenset({"looking", "steps", "backward", "optimizers"})
"""Probes that begin and end sampled steps. If one fails, sampling stops."""
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
"""With `None`, the compiler ignores surefoot's code; otherwise it compiles functions called after a graph break."""
_level, _dispatch_modes = torch._C._functorch.maybe_current_level, torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_compiler, _IS_COMPILING = vars(torch.compiler), "_is_compiling_flag"


class ProbeRunner:
    """Runs observations one at a time and records which probes have failed."""

    def __init__(self, state: WatchState) -> None:
        self._state = state
        self._is_observing = False
        self._began = 0.0
        self.originals = Originals()
        """The functions and methods that existed before the script ran; in use once they are bound."""
        self.out_of_memory = False
        """Whether the script ran out of memory and ended: probes that fail for this reason are not reported."""
        self.problems: dict[str, str] = {}
        """The probes that failed, each with its error."""

    def here(self) -> bool:
        """Whether this is the training process and thread, and torch is not compiling, tracing or capturing."""
        state = self._state
        if not state.active or (state.thread is not None and state.thread != get_ident()):
            return False
        # The same as `runs_eagerly`, without further calls: hooked functions call nothing while Dynamo traces them.
        is_eager = (
            _level() is None and not _dispatch_modes() and _tracing() is None and not _compiler.get(_IS_COMPILING)
        )
        return is_eager and not is_capturing()

    def safely(self, probe: str, observe: Callable[..., Any], *args: Any) -> Any:
        """Run one observation and return its result. If it fails, disable the probe and return `None`."""
        if probe in self.problems:
            return None
        try:
            if self._is_observing:  # inside another observation
                return observe(*args)
            with without_torch_function():
                if not self.originals.is_bound:
                    return observe(*args)
                self._is_observing = True
                state = self._state
                compiler = _set_eval_frame(None) if state.compiled else None
                sampled = state.sampled or state.evaluated
                self._began = 0.0 if sampled is None else time.perf_counter()
                try:
                    return self.originals.call(observe, *args)
                finally:
                    self._is_observing = False
                    if sampled is not None and sampled in (state.sampled, state.evaluated):
                        sampled.seconds += time.perf_counter() - self._began
                    if compiler is not None:
                        _set_eval_frame(compiler)
        except Unobservable as reason:  # it may be possible again later, without other threads
            if SOME_STEPS not in self.problems:
                self.problems[SOME_STEPS] = str(reason)
                print_line(f"surefoot: {SOME_STEPS} are not observed ({reason})")
            return None
        except Exception as error:
            if worker_died(error):  # torch raises this at any point of the program, and the script must receive it
                raise
            self.switch_off(probe, error)
            return None

    def is_observing(self) -> bool:
        """Whether an observation is in progress."""
        return self._is_observing

    def seconds_so_far(self) -> float:
        """The duration of the observation in progress, if it is part of a sampled step; otherwise 0."""
        return time.perf_counter() - self._began if self._is_observing and self._began else 0.0

    def always(self, act: Callable[..., Any], *args: Any) -> Any:
        """Run a function that protects the weights, and return its result. Its exceptions propagate.

        It runs with the original methods of torch, or with the current ones if other threads could notice a change.
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

        A device error is not a failure of the probe: the script's next call of the device raises it too, and the
        diagnosis at the end names it.
        """
        if note_failure(error) or (self.out_of_memory and isinstance(error, torch.OutOfMemoryError)):
            self._state.stop_sampling()
            return
        if os.environ.get("SUREFOOT_DEBUG"):
            print_line("".join(traceback.format_exception(error)))
        is_known, self.problems[probe] = probe in self.problems, f"{type(error).__name__}: {error}"
        if probe in _SAMPLING_PROBES:  # otherwise nothing would end the sampled step
            self._state.stop_sampling()
        if not is_known:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print_line(f"surefoot: stopped watching {probe} ({words}); the script is not affected")
