"""A script's first step, put in place of the captured one.

The script runs as it is. `Stage` hears when it makes a stabilizer, when a batch is handed to it, when it runs backward
and when it steps, and does four things there:

- the first batch that is drawn for training is the captured one, and so on for every microbatch. Right before, weights,
  moments and schedule become the captured ones, and right after, the random streams;
- where no batch was captured, one step of the script's own goes by first, since only between two steps is it known
  where the data begin. Then the streams are put where the captured step began, and the model's inputs are replaced if
  they still come out different;
- when the last captured microbatch has run backward, the step is over: nothing is applied;
- from then on the script does not go on. It is not told to stop either, which would run its `finally` and `except`
  clauses: `over` is called from inside its own call of `step`, and never returns there.

Run logs, checkpoints and incidents of the script's own are turned off or sent to a folder that is thrown away.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from surefoot.diagnose.replay.state import fits, put_in_place
from surefoot.errors import UsageError
from surefoot.lifeline import _Drawn
from surefoot.record.incidents.contents import prints_of
from surefoot.record.incidents.draws import listen
from surefoot.record.incidents.keeper import IncidentKeeper
from surefoot.record.incidents.reading import number
from surefoot.record.incidents.values import decode, tensors_in
from surefoot.record.log import RunLog
from surefoot.stabilizer import TrainingStabilizer
from surefoot.state import unpack
from surefoot.streams import set_streams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from surefoot.record.incidents.reading import StoredIncident


class Stage:
    """The hooks, and where the script stands. Installed once; `start` begins a new run of the script."""

    def __init__(self, incident: StoredIncident, scratch: Path) -> None:
        if missing := incident.missing("models", "window"):
            raise UsageError(f"the incident {incident.folder} lacks {' and '.join(missing)}: it cannot be replayed")
        self._incident, self._scratch = incident, scratch
        window = incident.state["window"]
        self._microbatches: list[dict[str, Any]] = window["microbatches"]
        self._start = window["start"]
        if not self._microbatches:
            raise UsageError(f"the incident {incident.folder} holds neither batch nor inputs: it cannot be replayed")
        self._fed_by_us = bool(self._microbatches) and all(m["drawn"] or m["given"] for m in self._microbatches)
        self.over: Callable[[], None] = lambda: None
        """Called when the step is complete; must not return."""
        self.begins: Callable[[], None] = lambda: None
        """Called when the step begins, the state in place."""
        self.start()
        self._install()

    def start(self) -> None:
        """The script begins anew."""
        self.stabilizer: TrainingStabilizer | None = None
        self.notes: list[str] = []
        self.steps_seen = 0
        self.draws_seen = 0
        self._ready = False  # the captured state is in place
        self._number = 0  # which microbatch is under way
        self._given = 0  # how many of its batches have been handed out
        self._last_fed: Any = None
        self._calls = 0
        self._is_over = False

    # ---- what the script does -------------------------------------------------------------------------------------

    def made(self, stabilizer: TrainingStabilizer) -> None:
        """A stabilizer is there; it is the one we want if the captured weights fit its models."""
        if self.stabilizer is not None or not fits(stabilizer._capture._run.models, self._incident.state["models"]):
            return
        self.stabilizer = stabilizer
        if not self._fed_by_us:
            for model in stabilizer._capture._run.models:
                model.register_forward_pre_hook(self._replace_inputs, with_kwargs=True)

    def loader_drew(self, batch: Any) -> Any:
        """A loader hands out a batch: the captured one instead, if it is for the step."""
        return self._feed(batch, "drawn")

    def _feed(self, batch: Any, kind: str) -> Any:
        if self.stabilizer is None or self._is_over or not self._fed_by_us or batch is self._last_fed:
            return batch
        models = self.stabilizer._capture._run.models
        if not torch.is_grad_enabled() or not any(model.training for model in models):
            return batch
        self.draws_seen += 1
        microbatch = self._microbatches[self._number]
        captured = microbatch["drawn"] if kind == "drawn" else [microbatch["given"]]
        if self._given >= len(captured) or captured[0] is None:
            return batch
        self._begin_if_needed()
        with _disable_current_modes():  # what is done here is no operation of the script's
            fed = decode(captured[self._given], batch)
            if microbatch["streams"] is not None:
                set_streams(microbatch["streams"])
        self._given += 1
        self._last_fed = fed
        return fed

    def _begin_if_needed(self) -> None:
        if self._ready:
            return
        self._ready = True
        assert self.stabilizer is not None
        stabilizer = self.stabilizer
        run = stabilizer._capture._run
        self.notes += put_in_place(self._incident, run.models, run.optimizer, run.scheduler)
        self._set_scale(stabilizer)
        stabilizer._layout.drop_gradients()
        self.begins()

    def _set_scale(self, stabilizer: TrainingStabilizer) -> None:
        judge, used = stabilizer._judge, self._incident.facts["configuration"].get("loss_scale")
        if judge.scaler is None or used is None:
            return
        saved = (self._incident.state.get("scaler") or {}).get("state")
        if saved:
            judge.scale_state = unpack(judge.scaler.init(), saved)
        judge.scaler.scale_of(judge.scale_state).fill_(number(used))

    def _replace_inputs(self, module: Any, args: Any, kwargs: Any) -> Any:
        """The model is called: with what it was called with, where the script made something else."""
        if not self._ready or self._is_over or not torch.is_grad_enabled():
            return None
        captured = self._microbatches[self._number]["calls"]
        number_of_call, self._calls = self._calls, self._calls + 1
        if number_of_call >= len(captured):
            return None
        with _disable_current_modes():
            wanted = decode(captured[number_of_call], (args, kwargs))
            if _equal(wanted, (args, kwargs)):
                return None
        self.notes.append("the script made other inputs for the model than the captured ones, which took their place")
        return wanted

    def stepping(self, stabilizer: TrainingStabilizer, closure: Any) -> bool:
        """The script calls `step`. Returns whether it may; it does not come back from the last one."""
        if stabilizer is not self.stabilizer or self._is_over:
            return True
        if not self._ready and self._fed_by_us:  # a step with data of its own, before any batch for training
            self.steps_seen += 1
            return True
        if not self._ready:
            return True
        if closure is not None:
            stabilizer._window.evaluate(closure)
        if self._number + 1 < len(self._microbatches):
            return True
        self._is_over = True
        stabilizer._capture.close_microbatch()
        self.over()
        return False

    def stepped(self, stabilizer: TrainingStabilizer, complete: bool) -> None:
        """`step` has returned: the next microbatch, or, where no batch is fed, the moment to begin."""
        if stabilizer is not self.stabilizer or self._is_over:
            return
        if self._ready:
            self._number, self._given, self._calls = self._number + 1, 0, 0
        elif not self._fed_by_us and complete:
            self._begin_if_needed()
            if self._start is not None:
                set_streams(self._start)

    # ---- what it left ---------------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name, as they were judged."""
        assert self.stabilizer is not None
        named, gradients = self.stabilizer._layout.with_gradient()
        return {name: gradient for (name, _), gradient in zip(named, gradients, strict=True)}

    def losses(self) -> list[Tensor]:
        """Every loss of the step."""
        window = self._window()
        return [] if window is None else [loss for each in window.microbatches for loss in each.losses]

    def _window(self) -> Any:
        assert self.stabilizer is not None
        notes = self.stabilizer._capture.notes
        return None if notes is None else notes.window(self.stabilizer.steps)

    def prints(self) -> dict[str, Any]:
        """Everything that is compared with the record."""
        return prints_of(self._window(), None, self.gradients(), {})

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        listen(self)
        scratch, stage = self._scratch, self

        def wrapped(owner: Any, name: str) -> Callable[[Any], None]:
            original = getattr(owner, name)

            def put(make: Any) -> None:
                setattr(owner, name, functools.wraps(original)(make(original)))

            return put

        def init(original: Any) -> Any:
            def made(self: Any, *args: Any, **kwargs: Any) -> None:
                quiet = {"log": None, "checkpoints": None, "incidents": IncidentKeeper(scratch)}
                original(self, *args, **{**kwargs, **quiet})
                self._capture.note_everything()
                stage.made(self)

            return made

        def step(original: Any) -> Any:
            def stepping(self: Any, closure: Any = None) -> Any:
                if stage.stepping(self, closure):
                    outcome = original(self, closure)
                    stage.stepped(self, not outcome.accumulating)
                    return outcome
                return None

            return stepping

        def flush(original: Any) -> Any:
            def flushing(self: Any) -> Any:
                return original(self) if stage.stepping(self, None) else None

            return flushing

        def pieces(original: Any) -> Any:
            def run(self: Any, loss_fn: Any, batch: Any, *, weight: Any = None) -> Any:
                return original(self, loss_fn, stage._feed(batch, "given"), weight=weight)

            return run

        def drawn(original: Any) -> Any:
            return lambda self: stage.loader_drew(original(self))

        def logged(original: Any) -> Any:
            return lambda self, folder, **settings: original(self, scratch / "log", **{**settings, "sinks": ()})

        wrapped(TrainingStabilizer, "__init__")(init)
        wrapped(TrainingStabilizer, "step")(step)
        wrapped(TrainingStabilizer, "flush")(flush)
        wrapped(TrainingStabilizer, "run_microbatches")(pieces)
        wrapped(TrainingStabilizer, "restore")(lambda _: lambda self, which="latest": None)
        wrapped(TrainingStabilizer, "save")(lambda _: lambda self, metric=None: None)
        wrapped(_Drawn, "__next__")(drawn)
        wrapped(RunLog, "__init__")(logged)


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = list(tensors_in(one)), list(tensors_in(other))
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )
