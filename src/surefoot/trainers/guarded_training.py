"""The guard inside a framework's training loop: the part that all adapters share.

The framework owns the loop. `GuardedTraining` attaches the guard to its optimizers (`guard/attach.py`), and an adapter
passes on what only the framework knows: the loss of every microbatch, its clipping, the location of its checkpoints.
Two methods of the framework are replaced while it trains, on the one object and not in its class: the method that clips
(by one with the same bits that does not change broken gradients), and, if there is no callback for it, the one that
gets the loss (`replacements.py`).
"""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from surefoot.act.torch_clip import any_nonfinite, clip_grad_norm, norm_and_factor
from surefoot.core import end_of_run
from surefoot.core.console import print_if_not_logged
from surefoot.core.device import has_streams
from surefoot.decide.agreement import Ranks, find_group, rank_and_world_size
from surefoot.decide.recovery import Escalation, TrainingRecovery
from surefoot.errors import CheckpointError, SettingError, UsageError
from surefoot.guard.attach import account_of, attach_with
from surefoot.guard.context import GuardSettings
from surefoot.guard.validation import split_clip
from surefoot.keep.checkpoint import storage
from surefoot.keep.snapshots import bytes_for_copies
from surefoot.trainers.deep_probes import DeepProbes
from surefoot.trainers.replacements import Replacements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    from torch import nn
    from torch.optim.optimizer import Optimizer
    from torch.utils.hooks import RemovableHandle

    from surefoot.detect.checker import StabilityChecker
    from surefoot.guard.attach import Attachment
    from surefoot.guard.context import Mode
    from surefoot.guard.step_decision import StepDecision
    from surefoot.observe.tensors import LayerMetrics
    from surefoot.record.incidents.bundle import IncidentKeeper
    from surefoot.record.log import RunLog
    from surefoot.types import Clipper, Incident, Scalar, Shaper, StepRecord

logger = logging.getLogger("surefoot")

SHARE_OF_HOST = 0.25
"""The share of the free host memory that earlier states may take by default."""
STATE_FOLDER = "surefoot"
"""The name of the guard's state in a checkpoint that is a folder."""


@dataclass(frozen=True)
class GuardOptions:
    """The settings of every adapter."""

    log: str | PathLike[str] | RunLog | None = None
    """The run folder that steps and events are written to, or a `RunLog`, which may have sinks."""
    mode: Mode = "guard"
    """`"guard"` skips broken steps. `"watch"` changes nothing."""
    clip: Clipper | Shaper | Sequence[Clipper | Shaper] | None = None
    """A clipper of surefoot, instead of the framework's own setting."""
    checker: StabilityChecker | None = None
    """The detectors and their thresholds."""
    escalation: Escalation | None = field(default_factory=Escalation)
    """Budgets for skipped steps; `None` skips indefinitely."""
    recovery: TrainingRecovery | Literal["auto"] | None = "auto"
    """Returns to earlier weights, kept in memory. `"auto"`: if there is one optimizer and the copies fit in memory."""
    incidents: IncidentKeeper | str | Path | None = None
    """A run folder or a keeper for what `surefoot replay` needs of refused steps."""
    watch: LayerMetrics | None = None
    """What to measure per layer beyond the gradients."""
    on_step: Callable[[StepRecord], None] | None = None
    on_event: Callable[[Incident], None] | None = None
    diagnose: bool = True
    """Whether the run is diagnosed when training ends."""
    probes: bool = True
    """Whether sampled steps are observed in depth for the diagnosis, as `surefoot run` does.

    Needs a `log`, and `diagnose`. Not available with Accelerate and Ray Train, where the loop is the user's.
    """

    @staticmethod
    def of(log: str | PathLike[str] | RunLog | None, options: Mapping[str, Any]) -> GuardOptions:
        """The settings that a user has given by name."""
        names = [each.name for each in fields(GuardOptions) if each.name != "log"]
        if unknown := [name for name in options if name not in names]:
            raise SettingError(f"unknown option `{unknown[0]}`. The options are {', '.join(names)}.")
        return GuardOptions(log, **options)

    def __post_init__(self) -> None:
        if self.recovery is not None and self.recovery != "auto" and not isinstance(self.recovery, TrainingRecovery):
            raise SettingError(f"`recovery` must be a TrainingRecovery, 'auto' or None; got {self.recovery!r}.")
        split_clip(self.clip)  # an error at the user's line, not when training begins
        for name in ("on_step", "on_event"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise SettingError(f"`{name}` must be a function; got {function!r}.")


class LossWindow:
    """The losses of the microbatches since the last step, from which the loss of the next one is computed."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._microbatches = 0
        self.was_propagated = False
        """Whether a backward has run on one of them, so that `zero_grad` ends the window."""

    def __len__(self) -> int:
        return self._microbatches

    def add(self, loss: Tensor, *, is_share: bool, is_propagated: bool) -> Tensor:
        """Add the loss of a microbatch; returns that of the step so far.

        It is their mean, or their sum if each `is_share`, that is, already divided for accumulation.
        """
        if is_propagated:
            self.was_propagated = True
        elif loss.requires_grad:
            loss.register_hook(self._propagated)  # type: ignore[no-untyped-call]
        loss = loss.detach()
        loss = (loss if loss.numel() == 1 else loss.mean()).float()
        self._sum = loss if self._sum is None else self._sum + loss
        self._microbatches += 1
        return self._sum if is_share or self._microbatches == 1 else self._sum / self._microbatches

    def clear(self) -> None:
        """The next loss is the first one of a step."""
        self._sum, self._microbatches, self.was_propagated = None, 0, False

    def _propagated(self, gradient: Tensor) -> None:
        self.was_propagated = self._microbatches > 0


def _settings(options: GuardOptions, recovery: TrainingRecovery | None) -> GuardSettings:
    """The settings that all optimizers of a training share."""
    return GuardSettings(
        mode=options.mode, clip=options.clip, checker=options.checker, escalation=options.escalation,
        recovery=recovery, incidents=options.incidents, log=options.log, watch=options.watch,
    )  # fmt: skip


class GuardedTraining:
    """The guard of one training run, with one attachment per optimizer."""

    def __init__(
        self,
        options: GuardOptions,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        framework: str,
        loss_from: str = "",
        *,
        observes_others: bool = False,
    ) -> None:
        """`loss_from` is how the user passes losses to the guard, if that is needed, for a warning.

        With `observes_others`, optimizers of other models are observed if there are no own: the diagnosis names them.
        """
        self.given = {weakref.ref(each) for each in optimizers}
        """The optimizers of the framework when training began; empty once it has others."""
        if options.mode == "guard":
            options, optimizers = _what_to_guard(options, optimizers, models, framework, observes_others)
        self._options, self._framework, self._loss_from, self._is_over = options, framework, loss_from, False
        self.probes = DeepProbes()
        """The observations at sampled steps, if an adapter sets them; they end with the training."""
        self.watches = options.mode == "watch"
        """Whether nothing may be changed, so that only the framework's own methods act."""
        self._latest: StepRecord | None = None
        self._counts = dict.fromkeys(("skipped", "clipped", "overflows", "alarms"), 0)
        self.ranks = Ranks(find_group(models) if options.mode == "guard" else None, home_of(models))
        """The processes that decide together: only this one if nothing is decided."""
        recovery = _recovery(options, models, optimizers, self.ranks)
        self._needs_loss = recovery is not None and bool(loss_from)
        settings = replace(_settings(options, recovery), on_event=self._happened)

        def decided(number: int, decision: StepDecision, refused: bool) -> None:
            self.probes.decided(number, decision)  # an adapter sets them later

        self.attachments: list[Attachment] = []
        self.replaced = Replacements()
        self.hooks: list[RemovableHandle] = []
        """Hooks of the framework that end with the training."""
        try:
            for number, optimizer in enumerate(optimizers):
                own = replace(settings, on_step=partial(self._stepped, number), on_decision=partial(decided, number))
                self.attachments.append(attach_with(list(models), optimizer, own))
        except BaseException:
            self.finish(diagnose=False)  # no optimizer stays guarded by a training that does not begin
            raise
        self._counted = [0] * len(self.attachments)
        """The number of steps of each optimizer when the framework last reported a step."""
        self._window, self._window_began = LossWindow(), 0
        for attachment in self.attachments:
            _follow_zero_grad(self.replaced, self._window, attachment, self.attachments)

    # ---- input from the framework -----------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of optimizer steps so far, over all optimizers, including skipped ones."""
        return sum(attachment.steps for attachment in self.attachments)

    @property
    def is_attached(self) -> bool:
        """Whether steps still go through the guard, which then has a state."""
        return all(attachment.attached for attachment in self.attachments)

    def add_loss(self, loss: Tensor, *, is_share: bool = False, is_propagated: bool = False) -> None:
        """The loss of one microbatch, whose backward runs now if `is_propagated`, and otherwise at any time.

        Several of them make the loss of the step: their mean, or their sum if each `is_share`, already divided. Losses
        whose gradients were deleted belong to a step that was left out.
        """
        self._needs_loss = False
        window = self._window
        if self._window_began != self.steps:
            self._window_began = self.steps
            window.clear()
        elif window.was_propagated and not any(map(_has_gradient, self.attachments)):
            window.clear()
            _forget_gradients(*self.attachments)
        whole = window.add(loss, is_share=is_share, is_propagated=is_propagated)
        for attachment in self.attachments:
            if (account := account_of(attachment)) is not None:
                account.observe(whole, {})  # whatever the framework calls backward on

    def observe(self, signals: Mapping[str, Scalar]) -> None:
        """Record signals of the framework with the next step."""
        given: dict[str, Any] = dict(signals)
        for attachment in self.attachments:
            attachment.observe(**given)

    def count_if_skipped(self, scaler: Any, number: int = 0) -> None:
        """The framework has taken a step: count it if a loss scaler skipped it before surefoot's hooks."""
        if scaler is None or number >= len(self.attachments):
            return
        attachment = self.attachments[number]
        if attachment.steps == self._counted[number]:  # its scale has been lowered since
            attachment.skipped_by_scaler(float(scaler.get_scale()) / float(scaler.get_backoff_factor()))
        self._counted[number] = attachment.steps

    # ---- the framework's clipping -----------------------------------------------------------------------------------

    def clip_norm(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, *, is_last: bool = True
    ) -> Tensor:
        """Do the framework's clipping, with the same bits; returns the norm before it. In watch mode, only measure.

        Gradients with a non-finite norm are unchanged, and every step is judged by its gradients before clipping. A
        clip that is not the last one before the step is ignored.
        """
        given = listed(parameters)
        clip = norm_and_factor if self.watches else clip_grad_norm
        norm, factor = clip(given, float(max_norm), float(norm_type))
        if factor is not None:
            _refuse_two_clippers(self._options.clip, self._framework, f"clips gradients to the norm {max_norm:g}")
            if is_last:
                self.clipped(given, factor)
        return norm

    def clips_value(self, parameters: Sequence[Tensor], value: float) -> None:
        """The framework is about to clip these gradients by value: record whether they are finite before."""
        _refuse_two_clippers(self._options.clip, self._framework, f"clips gradients to the value {value:g}")
        numbers = {id(parameter) for parameter in parameters}
        for attachment in self.attachments:
            own = [each.grad for each in _trained(attachment) if each.grad is not None and id(each) in numbers]
            account = account_of(attachment)
            if own and account is not None:
                account.was_broken(any_nonfinite(own))

    def clipped(self, parameters: Sequence[Tensor], factor: Tensor) -> None:
        """The framework has multiplied the gradients of these parameters by `factor`."""
        numbers = set(map(id, parameters))
        for attachment in self.attachments:
            own = _trained(attachment)
            if not numbers.issuperset(map(id, own)):  # parameters without a gradient may be missing
                own = [each for each in own if each.grad is not None]
                if not numbers.issuperset(map(id, own)):
                    continue
            if any(each.grad is not None for each in own):
                attachment.observe(clip_factor=factor)

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of the guards, for a checkpoint: tensors and plain values. Empty after they are detached.

        Waits until the run log is written: a run that continues from the checkpoint does not repeat these steps.
        """
        if not self.is_attached:
            return {"guards": []}
        states = [attachment.state_dict() for attachment in self.attachments]
        for attachment in self.attachments:
            if attachment.log is not None:
                attachment.log.flush()
        return {"guards": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved run stopped; load model and optimizer first."""
        if not self.is_attached:
            return
        saved = state["guards"]
        if len(saved) != len(self.attachments):
            logger.warning(
                "surefoot: the checkpoint has the state of %d guarded optimizers, and there are %d: the detectors "
                "start without history.",
                len(saved),
                len(self.attachments),
            )
            return
        for attachment, each in zip(self.attachments, saved, strict=True):
            attachment.load_state_dict(each)
        self._counted = [attachment.steps for attachment in self.attachments]

    # ---- numbers, and the end ---------------------------------------------------------------------------------------

    def _stepped(self, number: int, record: StepRecord) -> None:
        self.probes.stepped(number, record)
        self._latest = record
        if self._needs_loss:
            self._needs_loss = False
            logger.warning(
                "surefoot: the loss of the first step is not known, and without losses the guard does not notice that "
                "they stay high and does not return to earlier weights. %s",
                self._loss_from,
            )
        self._counts["skipped"] += record.skipped
        self._counts["overflows"] += record.overflow
        factor = record.signals.clip_factor
        self._counts["clipped"] += bool(not record.skipped and factor is not None and factor < 1.0)
        if self._options.on_step is not None:
            self._options.on_step(record)

    def _happened(self, incident: Incident) -> None:
        self._counts["alarms"] += 1
        if self._options.on_event is not None:
            self._options.on_event(incident)

    def numbers(self) -> dict[str, float]:
        """The numbers for the framework's loggers: of the last step whose numbers have arrived. Does not wait."""
        if self._latest is None:
            return {}
        signals: Any = self._latest.signals
        found = {"loss": signals.loss, "grad_norm": signals.grad_norm, "clip_factor": signals.clip_factor}
        found |= {"lr": signals.lr, **self._counts}
        return {f"surefoot/{name}": float(value) for name, value in found.items() if value is not None}

    def finish(self, diagnose: bool = True, error: BaseException | None = None) -> None:
        """Training has ended, perhaps by an error: detach, write the log, and report the diagnosis."""
        logs = [attachment.log for attachment in self.attachments]
        log = logs[0] if logs else None
        self.probes.end(log, error)
        self.replaced.undo()
        while self.hooks:
            self.hooks.pop().remove()
        if self._is_over:
            return
        self._is_over = True
        for attachment in self.attachments:
            attachment.detach()
        given = self._options.log
        if log is None or log is given:  # the user closes their own log
            return
        log.close()
        if diagnose and self._options.diagnose and log.folder.is_dir():  # otherwise the log has reported the reason
            report_diagnosis(log.folder)


def notice_replaced(training: GuardedTraining, optimizers: Iterable[Optimizer], framework: str) -> None:
    """Warn once if the framework steps with optimizers that it had not when training began."""
    if training.given and not all(weakref.ref(each) in training.given for each in optimizers):
        training.given.clear()
        logger.warning(
            "surefoot: %s has other optimizers since step %d than at the beginning: their steps are not guarded.",
            framework,
            training.steps,
        )


def report_diagnosis(folder: Path) -> None:
    """Diagnose the run in a folder on the first rank, and log the result."""
    if end_of_run.conclude is None or rank_and_world_size()[0] != 0:
        return
    try:
        verdict, text = end_of_run.conclude(folder)
    except Exception as error:
        logger.warning("surefoot: no diagnosis: %s: %s", type(error).__name__, error)
    else:
        is_quiet = verdict in ("healthy", "unknown")
        logger.log(logging.INFO if is_quiet else logging.WARNING, "%s", text)
        if is_quiet:
            print_if_not_logged(logger, f"{text.splitlines()[0]} · details: surefoot report {folder}")


def _trained(attachment: Attachment) -> list[Tensor]:
    groups = [] if attachment.optimizer is None else attachment.optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def _has_gradient(attachment: Attachment) -> bool:
    return any(parameter.grad is not None for parameter in _trained(attachment))


def _forget_gradients(*attachments: Attachment) -> None:
    for attachment in attachments:
        account = account_of(attachment)
        if account is not None:
            account.forget()


def _follow_zero_grad(
    replaced: Replacements, window: LossWindow, attachment: Attachment, all_of_them: Sequence[Attachment]
) -> None:
    """End the window of losses if the user drops gradients without a step, as after a norm that is too large."""

    def followed(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if window.was_propagated:
            _forget_gradients(attachment)
            if not any(_has_gradient(each) for each in all_of_them if each is not attachment):
                window.clear()
        return own(*args, **kwargs)

    replaced.follow(attachment.optimizer, "zero_grad", followed)


def _refuse_two_clippers(ours: object, framework: str, what: str) -> None:
    if ours is not None:
        raise UsageError(
            f"{framework} {what}, and surefoot was given `clip={ours!r}`: gradients would be clipped twice. Remove one "
            "of them."
        )


def save_into(training: GuardedTraining, checkpoint: Path) -> None:
    """Write the state into the folder of a checkpoint. Does not raise: the framework's checkpoint is complete."""
    folder = checkpoint / _state_folder()
    try:
        shutil.rmtree(folder, ignore_errors=True)
        storage.write(folder, training.state_dict(), {}, step=training.steps, unchecked=["guards"])
    except (OSError, CheckpointError, UsageError) as error:
        logger.warning("surefoot: the state of the guard was not saved in %s: %s", checkpoint, error)


def load_from(training: GuardedTraining, checkpoint: Path) -> None:
    """Continue from the state that `save_into` has written. Without it the rules start again, with one warning.

    Ranks judge steps together, so all of them continue, or none.
    """
    folder = checkpoint / _state_folder()
    state, problem = None, "another rank could not read it"
    try:
        state = storage.read(folder)[1]
    except (OSError, CheckpointError) as error:
        problem = str(error)
    is_missing = training.ranks.any(state is None)
    if state is not None and not is_missing:
        try:
            training.load_state_dict(state)
        except (CheckpointError, KeyError, SettingError) as error:
            is_missing, problem = True, str(error)
    if is_missing:
        logger.warning(
            "surefoot: %s has no readable state of the guard, so its detectors start without history: %s",
            checkpoint,
            problem,
        )
        return
    for attachment in training.attachments:
        if attachment.log is not None:
            summary = f"continues from the checkpoint of step {attachment.steps:,}"
            attachment.log.event("resume", attachment.steps, summary, evidence={"checkpoint": str(checkpoint)})


def require_guard(training: GuardedTraining) -> None:
    """Refuse a model and optimizers of the user that do not belong together."""
    if not training.attachments:
        raise SettingError("no optimizer trains a parameter of the model. Pass the model that it trains.")


def warn_of_another_training(before: GuardedTraining | None, options: GuardOptions) -> None:
    """One callback guards the training of another model: its rows replace those of the first in the run folder."""
    if before is not None and before.steps and isinstance(options.log, (str, os.PathLike)):
        logger.warning(
            "surefoot: the callback has guarded another training of %s steps, whose rows in %s are replaced. Use a "
            "callback with a folder of its own for each training.",
            f"{before.steps:,}",
            options.log,
        )


def observed_by(observe: Callable[[Tensor], None], loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a loss function; `observe` is called with its results."""

    @wraps(loss_fn)
    def observed(*args: Any, **kwargs: Any) -> Tensor:
        loss = loss_fn(*args, **kwargs)
        observe(loss)
        return loss

    return observed


def listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """Parameters as a list, in any form that `torch.nn.utils` accepts."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _state_folder() -> str:
    rank, count = rank_and_world_size()
    return STATE_FOLDER if count == 1 else f"{STATE_FOLDER}-rank{rank}-of-{count}"


def _what_to_guard(
    options: GuardOptions,
    optimizers: Sequence[Optimizer],
    models: Sequence[nn.Module],
    framework: str,
    observes_others: bool,
) -> tuple[GuardOptions, Sequence[Optimizer]]:
    """The optimizers of the models; if there are none and `observes_others`, the others with the options to observe."""
    own = _of_the_models(optimizers, models, framework)
    others = [each for each in optimizers if any(group["params"] for group in each.param_groups)]
    if others and not own and observes_others:
        return replace(options, mode="watch", clip=None, recovery=None), others
    return options, own


def _of_the_models(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], framework: str) -> list[Optimizer]:
    """The optimizers that train a parameter of the models, which can be guarded."""
    own = {id(parameter) for model in models for parameter in model.parameters()}
    found = [
        optimizer
        for optimizer in optimizers
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    ]
    if len(found) < len(optimizers):
        logger.warning(
            "surefoot: %d of the %d optimizers of %s train no parameter of the model. Their steps are not guarded.",
            len(optimizers) - len(found),
            len(optimizers),
            framework,
        )
    return found


def _recovery(
    options: GuardOptions, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], ranks: Ranks
) -> TrainingRecovery | None:
    if options.recovery != "auto":
        if options.recovery is not None and len(optimizers) > 1:
            raise SettingError(
                f"`recovery` returns a model to earlier weights, and {len(optimizers)} optimizers train this one: use "
                "`recovery=None`."
            )
        return options.recovery
    if options.mode != "guard" or len(optimizers) != 1:
        return None
    recovery = TrainingRecovery()
    if not ranks.any(not _copies_fit(models, optimizers[0], recovery.keep)):  # on every rank, or on none
        return recovery
    logger.warning(
        "surefoot: %d copies of the model and its optimizer state do not fit into memory, so recovery is disabled: bad "
        "steps are still skipped, but damaged weights are not restored. To enable it anyway, pass "
        "`recovery=sf.TrainingRecovery(keep=1)`.",
        recovery.keep,
    )
    return None


def home_of(models: Sequence[nn.Module]) -> torch.device:
    """The device of the parameters."""
    return next((parameter.device for model in models for parameter in model.parameters()), torch.device("cpu"))


def _copies_fit(models: Sequence[nn.Module], optimizer: Optimizer, keep: int) -> bool:
    """Whether copies fit into the device's memory, or into a share of the free host memory."""
    tensors = {id(each): each for model in models for each in (*model.parameters(), *model.buffers())}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    size = sum(each.nbytes for each in tensors.values()) + 2 * sum(each.nbytes for each in trained)
    home = trained[0].device if trained else None
    if home is not None and has_streams(home) and keep * size <= bytes_for_copies([home]):
        return True
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return True
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each of these processes keeps copies
    return bool(here * keep * size <= SHARE_OF_HOST * free)
