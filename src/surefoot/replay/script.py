"""Run the user's script up to its first step, as often as needed, without letting it continue.

The first runs are nested: when the step is complete, the next run of the script begins inside the call of `step` of the
last one, and the process ends (`os._exit`) in the innermost of them. So no `finally`, no `except` and no exit hook of
the script runs, and nothing of a half-trained model is saved. If the finder has to compare several operations and needs
a result back, a run has its own thread, which then stays blocked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surefoot.replay.locate.find import OriginSearch, first_bad, outcomes_of
from surefoot.replay.locate.names import Names
from surefoot.replay.locate.recorder import OperationRecorder
from surefoot.watch.run_script import Ending, Target, run

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from surefoot.replay.first_step import FirstStep
    from surefoot.replay.locate.memory_writes import MemoryWrite

PATIENCE_S = 600.0
"""How long a run in a thread of its own may take."""


@dataclass(frozen=True)
class _ActiveRecording:
    """What is held while a step is recorded."""

    names: Names
    """The names of the tensors that the step reaches."""
    recorder: OperationRecorder
    """Records the operations of the step."""
    one_thread: AbstractContextManager[Any]
    """Keeps backward on the thread that the recorder sees."""


class ScriptRuns:
    """The script, run repeatedly."""

    def __init__(self, target: Target, first_step: FirstStep) -> None:
        self._target, self._first_step = target, first_step

    def run(self, over: Callable[[], None], begins: Callable[[], None] = lambda: None) -> None:
        """Run the script; `over` is called where its first step ends, and never returns.

        Returns if the script never steps.
        """
        self._first_step.start()
        self._first_step.over, self._first_step.begins = over, begins
        run(self._target, Ending())

    def locate(self, report: Callable[[tuple[OriginSearch, MemoryWrite] | None], None]) -> None:
        """Find the first bad operation; `report` never returns."""

        def again(repair: Container[int]) -> OriginSearch:
            return self.again(lambda names: OperationRecorder(names, repair))

        self._recorded(
            OperationRecorder, lambda found: report(first_bad(lambda repair: again(repair) if repair else found))
        )

    def again(self, make: Callable[[Names], OperationRecorder]) -> OriginSearch:
        """One more run, with a recorder; its thread stays blocked at the end of the step."""
        answer: list[OriginSearch] = []
        done = threading.Event()

        def stay(found: OriginSearch) -> None:
            answer.append(found)
            done.set()
            threading.Event().wait()

        def work() -> None:
            try:
                self._recorded(make, stay)
            finally:
                done.set()

        threading.Thread(target=work, daemon=True).start()
        done.wait(PATIENCE_S)
        if answer:
            return answer[0]
        return OriginSearch(
            OperationRecorder(Names(lambda: None, nn.Module()), ()),
            [],
            RuntimeError("the script did not reach the step again"),
        )

    def _recorded(self, make: Callable[[Names], OperationRecorder], report: Callable[[OriginSearch], None]) -> None:
        """Run the script with a recorder on from the beginning of the step to its end."""
        recording: _ActiveRecording | None = None

        def begins() -> None:
            nonlocal recording
            objects = self._first_step.objects
            assert objects is not None
            model = objects.models[0] if len(objects.models) == 1 else nn.ModuleList(objects.models)
            names = Names(lambda: None, model, objects.optimizer)
            recording = _ActiveRecording(names, make(names), torch.autograd.set_multithreading_enabled(False))
            recording.recorder.__enter__()  # type: ignore[no-untyped-call]

        def over() -> None:
            assert recording is not None
            recorder = recording.recorder
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            objects = self._first_step.objects
            assert objects is not None
            losses = objects.losses()
            returned = {"loss": losses[-1], "others": losses[:-1]} if losses else None
            report(OriginSearch(recorder, outcomes_of(returned, recorder, recording.names), None))

        self.run(over, begins)
