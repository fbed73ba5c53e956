"""A step of an optimizer that evaluates the loss through a closure, such as L-BFGS."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surefoot.act.apply import ClosureRefused, LearningRateCut, StepCopy, withhold_gradients
from surefoot.errors import UsageError
from surefoot.guard.step_decision import BROKEN_SEARCH, StepNumbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.guard.guarded_optimizer import GuardedOptimizer, OpenStep, StepFacts


class ClosureStep:
    """A step of an optimizer that evaluates its closure several times and moves the parameters in between.

    The first evaluation is decided on. Later ones are the optimizer's own search: bad trial points are allowed if the
    step ends at a good one. A refused step leaves parameters and optimizer state unchanged.
    """

    def __init__(
        self,
        guarded: GuardedOptimizer,
        evaluate: Callable[..., Any],
        facts_now: Callable[[Any], StepFacts],
        *,
        raises: bool,
    ) -> None:
        """Copy everything that the step may change, and cut the learning rate for it.

        Args:
            guarded: the guard of the optimizer.
            evaluate: runs the user's closure.
            facts_now: returns the facts of the loop, given the result of the closure, or `None` before it.
            raises: whether a refused step ends with `ClosureRefused`, for a caller that expects it. Otherwise the
                gradients are hidden, and the optimizer completes the step with the loss it has.
        """
        self._guarded, self._evaluate, self._facts_now, self._raises = guarded, evaluate, facts_now, raises
        self._copy = StepCopy(guarded.layout.parameters, guarded.optimizer)
        self._evaluations = 0
        self.first: OpenStep | None = None
        self._first_loss: Any = None
        self.undo = ExitStack()
        self._lr_factor = guarded.lr_factor(facts_now(None))
        self._lr_cut = LearningRateCut(self.undo, guarded.optimizer, self._lr_factor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The closure that is passed to the optimizer; returns the result of the user's closure."""
        if self.first is not None and self.first.refused:
            return self._first_loss
        loss = self._evaluate(*args, **kwargs)
        step = self._guarded.evaluated(self._facts_now(loss), first=self.first is None)
        if step is None:
            if self._raises:
                raise UsageError("the closure computed no gradient: call `stabilizer.backward(loss)` in it.")
            return loss
        self._evaluations += 1
        if self.first is not None:
            return loss
        self.first, self._first_loss, step.lr_factor = step, loss, self._lr_factor
        if step.refused and self._raises:
            raise ClosureRefused
        if step.refused:
            parameters = [parameter for _, parameter in self._guarded.layout.parameters]
            withhold_gradients(self.undo, self._guarded.optimizer, parameters)
        return loss

    def raised(self) -> None:
        """The closure or the optimizer has raised, and the exception is about to end the step.

        Parameters stay as the optimizer left them, because closures may raise to end a step early. Non-finite ones are
        restored.
        """
        self.undo.close()
        if self._evaluations and self._guarded.measurer.parameters_broken():
            self._copy.restore()

    def end(self) -> StepNumbers | None:
        """Complete the optimizer's step. Returns `None` if no evaluation left a gradient."""
        with self.undo:
            self._lr_cut.keep_changes()
        if self.first is None:
            return None
        record = self._guarded.numbers(self.first).record()
        if self.first.refused:
            self._copy.restore()
        elif self._evaluations > 1 and self._guarded.measurer.parameters_broken():
            self._copy.restore()
            record = replace(record, skipped=True, reasons=("nonfinite", BROKEN_SEARCH))
        return StepNumbers(record)
