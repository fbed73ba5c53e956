"""`GuardedWorker` for the training function of Ray Train's `TorchTrainer`.

    with sf.trainers.ray.GuardedWorker(model, optimizer, "surefoot") as guard:
        loss_fn = guard.watched(loss_fn)
        ...
        guard.report({"loss": loss.item()}, checkpoint)  # in place of `ray.train.report`

Every worker runs the training function, with the user's own loop. The guard is attached to the optimizer of each
worker; under DDP the workers decide together. It gets the loss from the loss function, and `report` does two things
more than Ray's: it adds the guard's numbers to the metrics, and the guard's state to the checkpoint. Ray restarts all
workers after one has died; they continue from that state.

Clipping in the loop is the user's own: use `sf.clip_gradients`, or pass a `clip` to the worker.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train
from pyarrow.fs import LocalFileSystem
from ray.train import Checkpoint, CheckpointUploadMode

from surefoot.decide.agreement import Ranks, find_group
from surefoot.record.log import RunLog
from surefoot.trainers.guarded_training import (
    GuardedTraining,
    GuardOptions,
    home_of,
    load_from,
    observed_by,
    require_guard,
    save_into,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from torch import Tensor, nn
    from torch.optim.optimizer import Optimizer

logger = logging.getLogger("surefoot")

LOSS_FROM = "Wrap the loss function by `guard.watched(loss_fn)`, or call `guard.observe(loss)` before the step."


class GuardedWorker:
    """Guards the optimizer of one Ray Train worker, from its construction to the end of the `with` block.

    Create it after model and optimizer have been loaded from the checkpoint, if there is one: the state of the guard in
    that checkpoint is loaded too.

    Args:
        model: the result of `ray.train.torch.prepare_model`.
        optimizer: the optimizer that trains it.
        log: the run folder, or a `RunLog`. A relative path is a folder next to the checkpoints of the run if these are
            on a file system of this machine. Every worker writes into its own folder in it.
        scaler: the `GradScaler` of the loop, if it has one.
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
        checkpoint = ray.train.get_checkpoint()  # raises outside of a training function, where nothing is attached yet
        settings = GuardOptions.of(log if log is None or isinstance(log, RunLog) else _run_folder(log), options)
        self._workers = Ranks(find_group([model]), home_of([model]))
        """The workers that report together, which may decide separately."""
        self.training = GuardedTraining(settings, [model], [optimizer], "the training function", LOSS_FROM)
        require_guard(self.training)
        if scaler is not None:
            self._follow_scaler(scaler)
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                load_from(self.training, Path(folder))

    def __enter__(self) -> GuardedWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Detach the guard, write the log, and report the diagnosis. Called at the end of the `with` block."""
        self.training.finish()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def watched(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap the loss function, so that the guard gets its results."""
        return observed_by(self.observe, loss_fn)

    def observe(self, loss: Tensor) -> None:
        """Pass the loss of a microbatch to the guard, not divided for accumulation, before the step."""
        if self.training.is_attached and loss.requires_grad:
            self.training.add_loss(loss)

    def _follow_scaler(self, scaler: Any) -> None:
        """Count the steps that the scaler skips without calling the optimizer; `update` is called after each step."""
        update = scaler.update

        def followed(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            self.training.count_if_skipped(scaler)
            return result

        self.training.replaced.put(scaler, "update", followed)

    # ---- reporting --------------------------------------------------------------------------------------------------

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None, **options: Any) -> None:
        """Call `ray.train.report` with the guard's numbers among the metrics and its state in the checkpoint.

        Takes the arguments of `ray.train.report`. Each worker has its own state: one without a checkpoint reports only
        its state if another worker has one, and Ray puts the files of all workers into one folder.
        """
        mode = options.get("checkpoint_upload_mode", CheckpointUploadMode.SYNC)
        is_saved = self._workers.any(checkpoint is not None) and self.training.is_attached
        own: Path | None = None
        if is_saved and checkpoint is None and mode is not CheckpointUploadMode.NO_UPLOAD:
            own = Path(tempfile.mkdtemp(prefix="surefoot-"))
            checkpoint = Checkpoint.from_directory(own)
        if is_saved and checkpoint is not None:
            if isinstance(checkpoint.filesystem, LocalFileSystem):
                save_into(self.training, Path(checkpoint.path))
            else:
                logger.warning(
                    "surefoot: the checkpoint %s is not on a file system of this machine, so it does not contain the "
                    "state of the guard: its detectors start without history when the run is resumed.",
                    checkpoint.path,
                )
        try:
            ray.train.report(metrics | self.training.numbers(), checkpoint, **options)
        finally:
            if own is not None and mode is CheckpointUploadMode.SYNC:  # otherwise Ray deletes it after the upload
                shutil.rmtree(own, ignore_errors=True)


def _run_folder(log: str | PathLike[str]) -> Path:
    """The log folder of a worker. Its working directory belongs to Ray, and is deleted with the session."""
    folder = Path(log)
    if folder.is_absolute():
        return folder
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:  # without workers, the working directory is the user's
        return folder.absolute()
    if isinstance(storage.storage_filesystem, LocalFileSystem):
        return Path(storage.experiment_fs_path) / folder
    logger.warning(
        "surefoot: the storage of this run is not on a file system of this machine, so the log is written to %s. To "
        "write it elsewhere, pass an absolute path.",
        folder.absolute(),
    )
    return folder.absolute()
