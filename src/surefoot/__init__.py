"""surefoot keeps PyTorch training stable.

It observes a training run, skips steps that would damage the weights, recovers from damage, and reports the cause with
evidence. The most common names are here; four namespaces contain the rest:

* `surefoot.build`: what a model, its data and its schedule need before the first step (blocks, masks, initialisation);
* `surefoot.trainers`: the guard inside Transformers, TRL, Lightning, Accelerate and Ignite, in one line each;
* `surefoot.presets`: a configured `TrainingStabilizer` by kind of model (`for_transformer`, `for_gan`, ...);
* `surefoot.types`: the values that detectors and clippers take and return, and the protocols they implement.

A name is loaded when it is first used, so that the command line works without importing torch; `__init__.pyi`
declares the same names for type checkers.
"""

from __future__ import annotations

import sys
from importlib import import_module

from surefoot.core import end_of_run, version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

__version__ = version.VERSION

_NAMES_BY_MODULE = {
    "act.clip": "AdaptiveGradientClipper ClipByNorm ClipByQuantile ClipByZScore ClipPerTensor",
    "act.loss_scale": "DynamicLossScaler",
    "act.shape": "AdaptiveUnitClip CentralizeGradients ClipByValue",
    "build": "Standardizer decay_groups find_lr init_for seed_everything seed_worker suggest_lr warmup_constant "
    "warmup_cosine warmup_inverse_sqrt warmup_linear warmup_stable_decay warmup_step",
    "decide.recovery": "Escalation TrainingRecovery",
    "detect.checker": "StabilityChecker",
    "detect.combine": "after_warmup all_of any_of sustained",
    "detect.monitors": "ClippingSaturated LossStabilityMonitor NoLearning Oscillation Plateau Vanishing",
    "detect.recorded_losses": "judge_losses",
    "detect.step_rules": "Explosion LostProgress NonFinite Setback Spike",
    "diagnose.findings": "Diagnosis Finding",
    "doctor.checks": "Check Examination",
    "doctor.examine": "debug_training_stability",
    "replay.export.export": "Reproduction export_reproduction",
    "replay.locate.find": "find_nonfinite",
    "replay.locate.result": "NonFiniteOrigin",
    "errors": "CheckpointError FolderInUse RankFailed SettingError SurefootError TrainingHalted UsageError",
    "keep.checkpoint.manager": "CheckpointManager",
    "observe.monitor": "GradientMonitor",
    "observe.parameters": "parameter_report",
    "observe.tensors": "LayerMetrics",
    "record.incidents.bundle": "IncidentKeeper",
    "guard.attach": "Attachment attach",
    "record.limits": "LogLimits",
    "record.log": "RunLog",
    "record.messages": "LayerRows Sink StepRow",
    "record.reading": "RunTables load_run",
    "record.sinks.mlflow": "MLflowSink",
    "record.sinks.tensorboard": "TensorBoardSink",
    "record.sinks.wandb": "WandbSink",
    "record.progress_alarms": "ProgressAlarms",
    "record.sinks.webhook": "WebhookSink",
    "report.terminal.progress": "ProgressSink",
    "guard.stabilizer": "TrainingStabilizer",
    "guard.standalone": "Stateful clip_gradients",
    "types": "Incident LayerStats Outcome Signals Verdict",
}
_MODULE_OF = {name: f"surefoot.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
_NAMESPACES = {name: f"surefoot.{name}" for name in ("build", "diagnose", "trainers", "types")} | {
    "presets": "surefoot.guard.presets"
}
"""Modules that are available as attributes. `surefoot.diagnose` can be called: `diagnose(folder)`."""

__all__ = sorted([*_MODULE_OF, "diagnose"])


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        value = import_module(_NAMESPACES[name])
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}{_in_build(name)}")
    globals()[name] = value
    return value


def _in_build(name: str) -> str:
    """The way out for a name that is in `surefoot.build` only."""
    if name.startswith("_") or "torch" not in sys.modules:  # a question such as `hasattr` must not import torch
        return ""
    return f"; use `surefoot.build.{name}`" if hasattr(import_module("surefoot.build"), name) else ""


def _conclude(folder: Path) -> tuple[str, str]:
    text: tuple[str, str] = import_module("surefoot.commands.finished_run").conclude(folder)
    return text


end_of_run.conclude = _conclude


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_NAMESPACES})
