"""`StabilizerCallback` for Lightning.

    L.Trainer(callbacks=[sf.trainers.lightning.StabilizerCallback("runs/exp1")])

The guard is attached to the optimizers when training starts. The loss is that of `on_before_backward`, the mean over
the microbatches of a step. `gradient_clip_val` works as before. The state of the guard is part of the callback's state
in every checkpoint. Manual optimization and several optimizers are supported.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision

from surefoot.errors import UsageError
from surefoot.trainers.deep_probes import DeepProbes
from surefoot.trainers.guarded_training import GuardedTraining, GuardOptions, notice_replaced, warn_of_another_training
from surefoot.trainers.watched_engine import WatchedEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from torch import Tensor

    from surefoot.record.log import RunLog

logger = logging.getLogger("surefoot")

ENGINES = {"DeepSpeedStrategy": "DeepSpeed"}
"""Strategies that run the step themselves, so that there is no torch optimizer to guard."""
LOSS_FROM = "Call `self.manual_backward(loss)` instead of `loss.backward()`."


def _nothing() -> None:
    """No module has been trained yet."""


class StabilizerCallback(Callback):  # type: ignore[misc]
    """Guards a Lightning `Trainer`: broken steps are skipped, damaged weights return to earlier ones, all of it logged.

    Args:
        log: the run folder, or a `RunLog`.
        options: the fields of `GuardOptions`, as `clip`, `checker`, `escalation`, `recovery` or `mode`.
    """

    def __init__(self, log: str | PathLike[str] | RunLog | None = None, **options: Any) -> None:
        self._options = GuardOptions.of(log, options)
        self.training: GuardedTraining | WatchedEngine | None = None
        """The guard, from the beginning of the last training on."""
        self._saved: dict[str, Any] | None = None
        self._at_end: dict[str, Any] = {}
        self._trained: Callable[[], Any] = _nothing
        """The module of the last training."""
        self._steps = 0
        self._probes = DeepProbes()

    # ---- begin and end ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Drop a state that was loaded for another purpose, as by `test(ckpt_path="best")`.

        The first epoch begins to draw its batches, and a checkpoint is loaded, before `on_train_start`.
        """
        self._saved = None
        self._probes.end(None)  # of a training that did not begin
        if stage == "fit" and type(trainer.strategy).__name__ not in ENGINES:
            self._probes = DeepProbes.begin(self._options, [pl_module])

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Called by the `Trainer` of Transformers, which has a callback of its own."""
        raise UsageError("this callback is for Lightning: use `sf.trainers.transformers.StabilizerCallback`.")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the guard, and continue from its state in the checkpoint that training resumes from."""
        carried, self._steps, self._at_end = self._at_end, trainer.global_step, {}
        engine = ENGINES.get(type(trainer.strategy).__name__)
        if engine is not None:
            self.training = WatchedEngine(self._options, engine, trainer.global_step)
            return
        self._refuse_two_clippers(trainer)
        before = self.training if isinstance(self.training, GuardedTraining) else None
        training = GuardedTraining(
            self._options, [trainer.strategy.model], trainer.optimizers, "Lightning", LOSS_FROM, observes_others=True
        )
        self.training, training.probes = training, self._probes
        self._follow_clipping(training, trainer.precision_plugin)
        if self._saved is not None:
            training.load_state_dict(self._saved)
        elif trainer.ckpt_path is not None:
            logger.warning(
                "surefoot: the checkpoint has no state of the guard, so its detectors start without history."
            )
        elif trainer.global_step and carried and self._trained() is pl_module:
            training.load_state_dict(carried)  # a second `fit` continues where the first has ended
        else:
            warn_of_another_training(before, self._options)
        self._saved, self._trained = None, weakref.ref(pl_module)
        self._probes.follow(training.attachments, [each.scheduler for each in trainer.lr_scheduler_configs])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "training": None, "_trained": _nothing, "_probes": DeepProbes()}

    def _refuse_two_clippers(self, trainer: Any) -> None:
        if self._options.clip is not None and trainer.gradient_clip_val:
            raise UsageError(
                f"`gradient_clip_val={trainer.gradient_clip_val:g}` and `clip={self._options.clip!r}` would clip the "
                "gradients twice. Remove `gradient_clip_val` from the Trainer, or `clip` from the callback."
            )

    def _follow_clipping(self, training: GuardedTraining, precision: Any) -> None:
        """Do the clipping of `gradient_clip_val` and `self.clip_gradients`, until training ends.

        A method that a plugin overrides is unchanged, such as the norm over shards of `FSDPPrecision`.
        """

        reference: Callable[[], Any] = weakref.ref(precision)

        def by_norm(own: Callable[..., Any], optimizer: Any, clip_val: float) -> None:
            training.clip_norm(reference().main_params(optimizer), clip_val)
            if training.watches:  # only measured
                own(optimizer, clip_val)

        def by_value(own: Callable[..., Any], optimizer: Any, clip_val: float) -> None:
            training.clips_value(list(reference().main_params(optimizer)), clip_val)
            own(optimizer, clip_val)

        if type(precision).clip_grad_by_norm is Precision.clip_grad_by_norm:
            training.replaced.follow(precision, "clip_grad_by_norm", by_norm)
        if type(precision).clip_grad_by_value is Precision.clip_grad_by_value:
            training.replaced.follow(precision, "clip_grad_by_value", by_value)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach the guard, write the log, and report the diagnosis."""
        self._at_end = self.state_dict()  # for `trainer.save_checkpoint` after training
        if self.training is not None:
            self.training.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, for a training that was interrupted or has failed."""
        try:
            self._at_end = self.state_dict()  # a checkpoint may be saved after the exception
        except Exception as error:  # after a device error, the device cannot be read any more
            logger.warning("surefoot: the state of the guard could not be read: %s: %s", type(error).__name__, error)
        if self.training is not None:
            self.training.finish(error=exception)
        self._probes.end(None)  # if the training had not begun

    # ---- steps ------------------------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Read the loss of a microbatch, which Lightning has divided for accumulation."""
        if self.training is not None:
            divided = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            loss = loss.detach()
            if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
                loss = loss / scaler._scale.to(loss.device)  # Lightning has already scaled it
            self.training.add_loss(loss * divided if divided > 1 else loss, is_propagated=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Detach the guard before a pass without backward, by which weight averaging ends: its step is empty."""
        training = self.training
        if getattr(trainer.fit_loop, "_skip_backward", False) and isinstance(training, GuardedTraining):
            self._at_end = self.state_dict()
            for attachment in training.attachments:
                attachment.detach()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Count a step that the loss scaler has skipped without calling the optimizer, and log surefoot's numbers."""
        training, stepped = self.training, trainer.global_step != self._steps
        self._steps = trainer.global_step
        if training is None or not stepped:
            return
        if isinstance(training, WatchedEngine):
            training.stepped()
            return
        notice_replaced(training, trainer.optimizers, "Lightning")
        if len(training.attachments) == 1 and training.is_attached:
            training.count_if_skipped(getattr(trainer.precision_plugin, "scaler", None))
        if (
            trainer.log_every_n_steps
            and self._steps % trainer.log_every_n_steps == 0
            and (numbers := training.numbers())
        ):
            pl_module.log_dict(numbers)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that Lightning saves with every checkpoint."""
        if isinstance(self.training, GuardedTraining) and self.training.is_attached:
            return self.training.state_dict()
        return self._at_end

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state; it is loaded when training starts, because there is no optimizer yet."""
        self._saved = state_dict
