"""Whether, when and where a run had a non-finite loss or gradient."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from surefoot.record.facts import NonFiniteGradientEvent, NonFiniteLossEvent

if TYPE_CHECKING:
    from surefoot.diagnose.curves import LossCurve
    from surefoot.diagnose.findings import Evidence
    from surefoot.record.facts import NonFiniteLoss, RunFacts


def details(loss: NonFiniteLoss) -> Evidence:
    """What is known about a non-finite loss, as evidence."""
    return {key: value for key, value in loss.to_json().items() if key != "event"}


class NonFiniteValues:
    """The first losses and gradients of a run that are not finite."""

    def __init__(self, facts: RunFacts, curve: LossCurve) -> None:
        self._facts, self._curve = facts, curve

    @cached_property
    def loss(self) -> NonFiniteLoss | None:
        """The first non-finite loss and its origin.

        On a GPU the first may arrive too late for its origin, and a later one in time: if that one does not only come
        from parameters that were already broken, it is used.
        """
        events = [event for event in self._facts.events if isinstance(event, NonFiniteLossEvent)]
        in_time = [event for event in events if event.kind not in ("unknown", "parameter")]
        found = next(iter([*in_time, *events]), None)
        return found if found is not None else self._facts.discarded_loss

    @property
    def loss_step(self) -> int:
        """The step of that loss; the number of steps if it is not known."""
        if self.loss is not None and self.loss.step is not None:
            return int(self.loss.step)
        return self._curve.first_bad if self._curve.first_bad is not None else self._facts.steps

    @cached_property
    def gradients(self) -> list[NonFiniteGradientEvent]:
        """The steps whose gradients were not finite."""
        return [event for event in self._facts.events if isinstance(event, NonFiniteGradientEvent)]

    @property
    def in_crash(self) -> bool:
        """Whether the call that raised had a non-finite argument: BCE refuses a NaN, and so do distributions."""
        crash = self._facts.crash
        if crash is None:
            return False
        given = crash.arguments.input if crash.arguments is not None else None
        of_distribution = "found invalid values" in crash.message and "nan" in crash.message
        return of_distribution or (given is not None and bool(given.nonfinite))

    @cached_property
    def seen(self) -> bool:
        """Whether a loss or a gradient was ever not finite."""
        in_loss = self._curve.first_bad is not None or self.loss is not None
        return in_loss or self.in_crash or bool(self.gradients)

    @cached_property
    def first_step(self) -> int | None:
        """The first step at which a loss or a gradient was not finite."""
        steps = [self._curve.first_bad, *(event.step for event in self.gradients)]
        return min((step for step in steps if step is not None), default=None)
