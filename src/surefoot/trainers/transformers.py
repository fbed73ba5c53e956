"""`StabilizerCallback` for `transformers.Trainer`, and for the trainers of TRL, which are based on it.

    Trainer(model, args, train_dataset=data, callbacks=[sf.trainers.transformers.StabilizerCallback("runs/exp1")])

The guard is attached to the optimizer when training begins. Callbacks get neither the trainer nor the loss, so the
trainer is found on the call stack, and the loss is read where its Accelerator runs backward. `max_grad_norm` works as
before. The state of the guard is written into `checkpoint-N/surefoot` and read from there on resume.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from surefoot.core.user_code import variables
from surefoot.errors import UsageError
from surefoot.record.policy_signals import kind_of, logged_name
from surefoot.trainers.accelerator_methods import engine_of, follow_clipping, follow_losses
from surefoot.trainers.deep_probes import DeepProbes
from surefoot.trainers.guarded_training import (
    GuardedTraining,
    GuardOptions,
    load_from,
    save_into,
    warn_of_another_training,
)
from surefoot.trainers.watched_engine import WatchedEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from surefoot.record.log import RunLog

logger = logging.getLogger("surefoot")

LOSS_FROM = "In your own `training_step`, call `self.accelerator.backward(loss)` instead of `loss.backward()`."


def _refuse_lightning(*_: Any, **__: Any) -> None:
    raise UsageError("this callback is for Transformers: use `sf.trainers.lightning.StabilizerCallback`.")


class StabilizerCallback(TrainerCallback):  # type: ignore[misc]
    """Guards a `Trainer`: broken steps are skipped, damaged weights return to earlier ones, and all of it is logged.

    Args:
        log: the run folder, or a `RunLog`.
        options: the fields of `GuardOptions`, as `clip`, `checker`, `escalation`, `recovery` or `mode`.
    """

    state_key = "StabilizerCallback"
    setup = on_exception = _refuse_lightning  # what a Lightning `Trainer` calls

    def __init__(self, log: str | PathLike[str] | RunLog | None = None, **options: Any) -> None:
        self._options = GuardOptions.of(log, options)
        self.training: GuardedTraining | WatchedEngine | None = None
        """The guard, from the beginning of the last training on."""
        self._trainer: Trainer | None = None
        self._begin: Callable[[], None] | None = None
        """Attaches the guard after the other callbacks have run `on_train_begin`."""
        self._saved_in: Path | None = None
        """The checkpoint that already contains the state of the guard, before `on_save`."""
        self._ended: tuple[weakref.ref[Any], dict[str, Any]] | None = None
        """The model of the last training and the state of the guard at its end."""
        self._trainer_makes_optimizer = False
        """Whether the trainer was made with this callback and without an optimizer of the user."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The trainer has been made: record whether its user has passed an optimizer."""
        self._trainer_makes_optimizer = kwargs.get("optimizer") is None

    # ---- begin and end ----------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the guard after the other callbacks have run `on_train_begin`: one of them may raise."""
        trainer, resumed_from = _find_trainer(self)
        if self._trainer is not None and _is_running(self._trainer):
            raise UsageError(
                "this `StabilizerCallback` guards a Trainer whose training has not ended, and a second Trainer uses it "
                "too. Give each Trainer a callback of its own."
            )
        if self.training is not None:
            self.training.finish(diagnose=False)  # a training that raised has not ended it
        callbacks = trainer.callback_handler.callbacks
        if len({id(each) for each in callbacks if isinstance(each, StabilizerCallback)}) > 1:
            raise UsageError("the Trainer has several `StabilizerCallback`s: remove all but one from its `callbacks`.")
        callbacks[:] = [each for each in callbacks if not isinstance(each, _AfterOthers) or each.owner is not self]
        self._begin = partial(self._attach, trainer, resumed_from, args, state)
        callbacks.append(_AfterOthers(self, callbacks))  # the handler calls it last

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the guard if that has not been done."""
        self.begin()

    def begin(self) -> None:
        """Attach the guard to the training that is about to begin, if there is one."""
        begin, self._begin = self._begin, None
        if begin is None:
            return
        try:
            begin()
        except BaseException:
            if self.training is not None:
                self.training.finish(diagnose=False)
            self._trainer = None
            raise

    def _attach(
        self, trainer: Any, resumed_from: str | PathLike[str] | None, args: TrainingArguments, state: TrainerState
    ) -> None:
        """Attach the guard, and continue from its state in the checkpoint that training resumes from."""
        engine = engine_of(trainer.accelerator)
        if engine is not None:
            self.training = WatchedEngine(self._options, engine, state.global_step)
            follow_losses(self.training, trainer.accelerator, is_share=True)
            return
        _refuse_clip_beside_max_grad_norm(self._options.clip, args.max_grad_norm)
        before = self.training if isinstance(self.training, GuardedTraining) else None
        training = GuardedTraining(
            self._options,
            [trainer.model_wrapped],
            [trainer.optimizer],
            "transformers.Trainer",
            LOSS_FROM,
            observes_others=True,
        )
        self.training, self._trainer = training, trainer
        follow_losses(training, trainer.accelerator, is_share=True)
        follow_clipping(training, trainer.accelerator)
        self._add_to_logs(training, trainer)
        self._end_with_errors(training, trainer)
        self._save_with_random_state(training, trainer)
        if state.global_step:
            load_from(training, Path(resumed_from) if resumed_from else self._checkpoint(args, state))
            if self._trainer_makes_optimizer and type(trainer).create_optimizer is Trainer.create_optimizer:
                _warn_of_another_rate(args.learning_rate, getattr(_schedule(trainer), "base_lrs", []))
        elif self._ended is not None and self._ended[0]() is trainer.model:
            training.load_state_dict(self._ended[1])  # a second `train` continues with the model of the first
        else:
            warn_of_another_training(before, self._options)
        self._ended = None
        training.probes = DeepProbes.begin(self._options, [trainer.model_wrapped])
        training.probes.follow(training.attachments, [_schedule(trainer)])

    def _end_with_errors(self, training: GuardedTraining, trainer: Trainer) -> None:
        """End the guard when an epoch or a callback raises: the trainer calls no callback then."""

        def ending_with(method: Callable[..., Any]) -> Callable[..., Any]:
            def followed(*args: Any, **kwargs: Any) -> Any:
                try:
                    return method(*args, **kwargs)
                except BaseException as error:
                    training.finish(error=error)
                    self._trainer = None
                    raise

            return followed

        for owner, name in ((trainer, "_run_epoch"), (trainer.callback_handler, "call_event")):
            if hasattr(owner, name):  # neither is part of the documented interface
                training.replaced.put(owner, name, ending_with(getattr(owner, name)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "training": None, "_trainer": None, "_begin": None, "_saved_in": None, "_ended": None}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach the guard, write the log, and report the diagnosis."""
        if isinstance(self.training, GuardedTraining) and self.training.is_attached and self._trainer is not None:
            self._ended = weakref.ref(self._trainer.model), self.training.state_dict()
        if self.training is not None:
            self.training.finish()
        self._trainer = None

    # ---- steps ------------------------------------------------------------------------------------------------------

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a step that the loss scaler has skipped without calling the optimizer."""
        if isinstance(self.training, WatchedEngine):
            self.training.stepped()
        elif self.training is not None and self._trainer is not None:
            self.training.count_if_skipped(self._trainer.accelerator.scaler)

    def _save_with_random_state(self, training: GuardedTraining, trainer: Trainer) -> None:
        """Save the guard's state with the random state, before `trainer_state.json` completes the checkpoint.

        A process that is killed between that file and `on_save` would leave a checkpoint without it.
        """
        save = getattr(trainer, "_save_rng_state", None)  # not part of the documented interface
        if save is None:
            return

        def followed(output_dir: str) -> None:
            save(output_dir)
            save_into(training, Path(output_dir))
            self._saved_in = Path(output_dir)

        training.replaced.put(trainer, "_save_rng_state", followed)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the state of the guard into the checkpoint that was just saved, if it is not there already."""
        if isinstance(self.training, GuardedTraining) and not args.save_only_model:
            folder = self._checkpoint(args, state)
            if folder.is_dir() and folder != self._saved_in:
                save_into(self.training, folder)
        self._saved_in = None

    def _checkpoint(self, args: TrainingArguments, state: TrainerState) -> Path:
        folder = args.output_dir if self._trainer is None else self._trainer._get_output_dir(trial=None)
        return Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"

    # ---- logs -------------------------------------------------------------------------------------------------------

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record what TRL logs about a policy, with the next step."""
        if isinstance(self.training, GuardedTraining):
            self.training.observe(policy_signals(logs or {}))

    def _add_to_logs(self, training: GuardedTraining, trainer: Trainer) -> None:
        """Add surefoot's numbers to what the trainer logs: callbacks would add them too late."""
        log = trainer.log

        def followed(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if "loss" in logs:
                logs |= training.numbers()
            return log(logs, *args, **kwargs)

        training.replaced.put(trainer, "log", followed)


class _AfterOthers(TrainerCallback):  # type: ignore[misc]
    """The last callback of the handler while training begins."""

    def __init__(self, owner: StabilizerCallback, callbacks: list[Any]) -> None:
        self.owner, self._callbacks = owner, callbacks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The other callbacks have not raised."""
        self._callbacks.remove(self)
        self.owner.begin()


def _refuse_clip_beside_max_grad_norm(ours: object, max_grad_norm: float | None) -> None:
    if ours is not None and max_grad_norm:
        raise UsageError(
            f"`max_grad_norm={max_grad_norm:g}` and `clip={ours!r}` would clip the gradients twice. Set "
            "`max_grad_norm=0` in the training arguments, or remove `clip`."
        )


def _schedule(trainer: Any) -> Any:
    """The learning-rate schedule itself, which Accelerate may have wrapped."""
    return getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)


def _warn_of_another_rate(given: float, used: list[float]) -> None:
    """Log that a changed learning rate has no effect: the trainer loads the schedule of the checkpoint."""
    if used and not any(math.isclose(given, each) for each in used):
        logger.warning(
            "surefoot: `learning_rate=%g` has no effect: the resumed schedule is that of the checkpoint, for a rate of "
            "%g. To change it, train from the weights of the checkpoint without `resume_from_checkpoint`.",
            given,
            max(used),
        )


def policy_signals(logs: dict[str, float]) -> dict[str, float]:
    """What TRL logs about a policy, with one-word names."""
    return {
        logged_name(name): float(value)
        for name, value in logs.items()
        if isinstance(value, (int, float)) and not name.startswith(("eval_", "surefoot/")) and kind_of(name)
    }


def _is_running(trainer: Any) -> bool:
    """Whether a method of the trainer is being called: the training of another one began within it."""
    frame: Any = sys._getframe(1)
    while frame is not None and variables(frame).get("self") is not trainer:
        frame = frame.f_back
    return frame is not None


def _find_trainer(callback: StabilizerCallback) -> tuple[Any, str | PathLike[str] | None]:
    """The trainer that is calling this callback, and the checkpoint that it resumes from."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if handler is not None and any(each is callback for each in handler.callbacks):
            resumed_from = frame.f_locals.get("resume_from_checkpoint")
            return owner, resumed_from if isinstance(resumed_from, (str, PathLike)) else None
        frame = frame.f_back
    raise UsageError("`StabilizerCallback` works only in a `transformers.Trainer`: pass it in `callbacks=[...]`.")
