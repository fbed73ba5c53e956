"""`StabilizerHandler` for Ignite.

    handler = sf.trainers.ignite.StabilizerHandler(model, optimizer, log="runs/exp1")
    trainer = create_supervised_trainer(model, optimizer, handler.watched(loss_fn))
    handler.attach(trainer)

An engine calls a user's function for every iteration, and knows the loss only after the step. So the handler gets it
from the loss function: `watched(loss_fn)`, or `observe(loss)` in your own function. Clipping in such a function is
yours, too: use `sf.clip_gradients`, or pass a `clip` to the handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ignite.engine import Events

from surefoot.errors import UsageError
from surefoot.trainers.deep_probes import DeepProbes
from surefoot.trainers.guarded_training import GuardedTraining, GuardOptions, observed_by, require_guard

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from torch import Tensor, nn
    from torch.optim.optimizer import Optimizer

    from surefoot.record.log import RunLog


LOSS_FROM = "Wrap the loss function by `handler.watched(loss_fn)`, or call `handler.observe(loss)` before the step."


class StabilizerHandler:
    """Guards the optimizer of an Ignite engine while it runs. Can be saved in a `Checkpoint` like a model.

    Args:
        model: the model that the optimizer trains.
        optimizer: the optimizer that the engine's function steps.
        log: the run folder, or a `RunLog`.
        scaler: the `GradScaler` of the engine's function, if it has one.
        options: the fields of `GuardOptions`, as `clip`, `checker`, `escalation`, `recovery` or `mode`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        log: str | PathLike[str] | RunLog | None = None,
        *,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        self._options = GuardOptions.of(log, options)
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self.training: GuardedTraining | None = None
        """The guard, from the beginning of the last run on."""
        self._saved: dict[str, Any] | None = None

    def attach(self, engine: Any) -> None:
        """Guard the steps of an engine, from the beginning of each run to its end."""
        engine.add_event_handler(Events.STARTED, self._begin)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._stepped)
        for event in (Events.COMPLETED, Events.TERMINATE):
            engine.add_event_handler(event, self._end)
        engine.add_event_handler(Events.EXCEPTION_RAISED, self._failed)

    def watched(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap the loss function, so that the guard gets its results."""
        return observed_by(self.observe, loss_fn)

    def observe(self, loss: Tensor) -> None:
        """Pass the loss of a microbatch to the guard, not divided for accumulation, before the step."""
        if self.training is not None and self.training.is_attached and loss.requires_grad:
            self.training.add_loss(loss)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _begin(self, engine: Any) -> None:
        self._end(engine)
        self.training = GuardedTraining(
            self._options, [self._model], [self._optimizer], "the engine's function", LOSS_FROM
        )
        require_guard(self.training)
        if self._saved is not None:
            self.training.load_state_dict(self._saved)
            self._saved = None
        self.training.probes = DeepProbes.begin(self._options, [self._model])
        self.training.probes.follow(self.training.attachments)

    def _stepped(self, engine: Any) -> None:
        training = self.training
        if training is None or not training.is_attached:
            return
        if self._scaler is not None:
            training.count_if_skipped(self._scaler)
        engine.state.metrics.update(training.numbers())

    def _end(self, engine: Any, error: BaseException | None = None) -> None:
        if self.training is not None and self.training.is_attached:
            self._saved = self.training.state_dict()  # the engine may run again, or its end may be saved
            self.training.finish(error=error)

    def _failed(self, engine: Any, error: BaseException) -> None:
        self._end(engine, error)
        if len(engine._event_handlers[Events.EXCEPTION_RAISED]) == 1:  # as Ignite does without a handler
            raise error

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """For `Checkpoint({"model": model, "optimizer": optimizer, "surefoot": handler}, ...)`."""
        if self.training is not None and self.training.is_attached:
            return self.training.state_dict()
        if self._saved is None:
            raise UsageError("the handler has no state yet: it is attached when its engine runs.")
        return self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state; it is loaded when the engine runs."""
        self._saved = state_dict
