"""Replaces a script's first step with the captured one.

The script runs unmodified. The hooks (`hooks`) call `FirstStep` when a batch is passed to the script, when it runs
backward and when it steps. `FirstStep` does four things:

- The first batch that is drawn for training is replaced with the captured one, and so on for every microbatch. Right
  before, the captured weights, moments and schedule are loaded, and right after, the random streams.
- If no batch was captured, one step of the script runs first, because only between two steps is it known where the data
  begin (the very first step begins with the first call of a model). Then the streams are set to where the captured step
  began, and the models' inputs are replaced if they still differ.
- When the last captured microbatch has run, the step is complete: nothing is applied.
- From then on the script does not continue. It is not stopped by an exception either, which would run its `finally` and
  `except` clauses: `over` is called inside its call of `step` or `backward`, and never returns.

An experiment (`continued_run`) lets the script apply the step and continue (`continues`), and may let it keep its own
batch (`gives`), use another one (`choose`), set other random streams (`place_streams`), or run the step again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from surefoot.core.random_state import set_streams
from surefoot.errors import UsageError
from surefoot.observe.parameters import Layout
from surefoot.record.incidents.contents import WindowState, prints_of
from surefoot.record.incidents.values import Encoded, decode, tensors_in
from surefoot.replay.state import put_in_place

if TYPE_CHECKING:
    from torch import Tensor, nn

    from surefoot.record.incidents.reading import StoredIncident
    from surefoot.record.incidents.step_capture import StepCapture
    from surefoot.record.incidents.summary import IncidentPrints


@dataclass(frozen=True)
class LiveObjects:
    """The objects that train in the script, and the results of a step."""

    models: Sequence[nn.Module]
    optimizer: Any
    scheduler: Any
    notes: StepCapture
    step: Callable[[], int]
    """The number of the current step, as the notes count."""
    set_scale: Callable[[], None]
    """Makes the loss scale the captured one."""

    @property
    def layout(self) -> Layout:
        """The optimizer's parameters, by name."""
        return Layout(self.models, self.optimizer)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name, as they are now."""
        named, gradients = self.layout.with_gradient()
        return {name: gradient for (name, _), gradient in zip(named, gradients, strict=True)}

    def losses(self) -> list[Tensor]:
        """Every loss of the step under way."""
        window = self.notes.window(self.step())
        return [] if window is None else [loss for each in window.microbatches for loss in each.losses]

    def prints(self) -> IncidentPrints:
        """Everything of the current step that is compared with the record."""
        return prints_of(self.notes.window(self.step()), None, self.gradients(), {})


class FirstStep:
    """Replaces the script's first step with the captured one. `start` begins a new run of the script."""

    def __init__(self, incident: StoredIncident) -> None:
        incident.check_replayable()
        self.incident = incident
        window: WindowState = incident.state["window"]
        self._microbatches = window["microbatches"]
        self._start = window["start"]
        if not self._microbatches:
            raise UsageError(
                f"the incident {incident.folder} contains neither batch nor inputs, so it cannot be replayed"
            )
        self.feeds = bool(self._microbatches[0]["drawn"] or self._microbatches[0]["given"])
        """Whether the batches were captured."""
        self.over: Callable[[], None] = lambda: None
        """Called when the step is complete; must not return."""
        self.begins: Callable[[], None] = lambda: None
        """Called when the step begins and the state is in place."""
        self.continues = False
        """Whether the script applies the step and continues after it."""
        self.gives = True
        """Whether the captured batch replaces the script's own."""
        self.choose: Callable[[Encoded], Encoded] = lambda plain: plain
        """Selects the part of a captured batch to use, as plain data."""
        self.place_streams: Callable[[Any], None] = set_streams
        """Sets the random streams for the step."""
        self.drawing: Callable[[Any], Any] = lambda batch: batch
        """Called with every batch that the script draws with gradients enabled; its result is used instead."""
        self.find_objects: Callable[[], LiveObjects | None] = lambda: None
        """Set by the hooks: searches for the objects that train, each time a batch is drawn."""
        self.runs = 0
        """How often the script was started."""
        self.start()

    def start(self) -> None:
        """The script starts again."""
        self.objects: LiveObjects | None = None
        self.notes: list[str] = []
        self.draws_seen = 0
        self.is_over = False
        self.ready = False
        """Whether the captured state is in place."""
        self._number = 0  # which microbatch is under way
        self._given = 0  # the number of its batches that have been returned
        self._calls = 0
        self._last_fed: Any = None
        self.runs += 1

    def use(self, objects: LiveObjects) -> None:
        """Found: what trains."""
        self.objects = objects
        if not self.feeds:  # before the hook that notes them
            for model in objects.models:
                model.register_forward_pre_hook(self.replace_inputs, with_kwargs=True, prepend=True)

    # ---- what the script does -------------------------------------------------------------------------------------

    def loader_drew(self, batch: Any) -> Any:
        """A loader returns a batch: it is replaced with the captured one if it is for the step."""
        return self.feed(self.drawing(batch) if torch.is_grad_enabled() else batch, "drawn")

    def feed(self, batch: Any, kind: str) -> Any:
        """The batch to use instead of `batch`."""
        if self.is_over or not self.feeds or batch is self._last_fed or not torch.is_grad_enabled():
            return batch
        if self.objects is None and (found := self.find_objects()) is not None:
            self.use(found)
        if self.objects is None or not any(model.training for model in self.objects.models):
            return batch
        self.draws_seen += 1
        microbatch = self._microbatches[min(self._number, len(self._microbatches) - 1)]
        given = microbatch["given"]
        captured = microbatch["drawn"] if kind == "drawn" else [] if given is None else [given]
        if self._given >= len(captured):
            return batch
        self.begin()
        fed = batch
        if self.gives:
            with _disable_current_modes():  # what is done here is no operation of the script's
                fed = decode(self.choose(captured[self._given]), batch)
                if microbatch["streams"] is not None:
                    self.place_streams(microbatch["streams"])
        self._given += 1
        self._last_fed = fed
        return fed

    def play_again(self, microbatch: int) -> None:
        """Use the batch of the captured step again for the next draw, from the captured state."""
        self.is_over = self.ready = False
        self._number, self._given, self._calls = microbatch, 0, 0

    def begin(self) -> None:
        """Load the captured state, once."""
        if self.ready or self.objects is None:
            return
        self.ready = True
        objects = self.objects
        self.notes += put_in_place(self.incident, objects.models, objects.optimizer, objects.scheduler)
        objects.set_scale()
        objects.layout.drop_gradients()
        self.begins()

    def replace_inputs(self, module: Any, args: Any, kwargs: Any) -> Any:
        """The model is called: use the captured inputs if the script made other ones."""
        if not self.ready or self.is_over or not self.gives or not torch.is_grad_enabled():
            return None
        microbatch = self._microbatches[min(self._number, len(self._microbatches) - 1)]
        captured = microbatch["calls"]
        number, self._calls = self._calls, self._calls + 1
        if number == 0 and microbatch["streams"] is not None:  # they were noted at this call
            with _disable_current_modes():
                self.place_streams(microbatch["streams"])
        if number >= len(captured):
            return None
        with _disable_current_modes():
            wanted = decode(captured[number], (args, kwargs))
            if _equal(wanted, (args, kwargs)):
                return None
        self.notes.append(
            "the script computed other model inputs than the captured ones; the captured inputs were used"
        )
        return wanted

    @property
    def is_last(self) -> bool:
        """Whether the current microbatch is the last captured one."""
        return self._number + 1 >= len(self._microbatches)

    def next_microbatch(self) -> None:
        """A microbatch is complete."""
        self._number, self._given, self._calls = self._number + 1, 0, 0

    def between_steps(self) -> None:
        """A step of the script is complete: if no batch is known, the captured step can begin."""
        if not self.feeds and not self.ready:
            self.begin()
            if self._start is not None and self.gives:
                self.place_streams(self._start)

    def finish(self) -> None:
        """The step is complete, and the script ends here."""
        self.is_over = True
        self.over()


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = list(tensors_in(one)), list(tensors_in(other))
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )
