"""surefoot keeps PyTorch training on its feet.

It sits beside a training loop, sees trouble before it reaches the weights, recovers by itself, and explains the cause
with evidence. This is the whole public surface. A name is loaded when it is first used, so that the command line can
answer without importing torch; `__init__.pyi` says the same to type checkers.
"""

from __future__ import annotations

from importlib import import_module

from surefoot.core import version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = version.VERSION

_NAMES_BY_MODULE = {
    "act.clip": "AdaptiveGradientClipper ClipByNorm ClipByQuantile ClipByZScore ClipPerTensor Clipper",
    "act.loss_scale": "DynamicLossScaler",
    "act.shape": "AdaptiveUnitClip CentralizeGradients ClipByValue Shaper",
    "build": "ConvGroupNorm PreNormMLP ScaledResidual Standardizer advise_normalization clip_advice decay_groups "
    "find_fully_masked find_lr init_for mask_fill_value masked_softmax normalize_images seed_everything "
    "seed_worker suggest_lr warmup_constant warmup_cosine warmup_inverse_sqrt warmup_linear "
    "warmup_stable_decay warmup_step",
    "decide.recovery": "Escalation TrainingRecovery",
    "detect.checker": "StabilityChecker",
    "detect.combine": "after_warmup all_of any_of sustained",
    "detect.monitors": "ClippingSaturated LossStabilityMonitor NoLearning Oscillation Plateau Vanishing",
    "detect.step_rules": "Explosion NonFinite Setback Spike",
    "doctor.checks": "Check Examination",
    "doctor.notebook": "debug_training_stability",
    "replay.export.export": "Reproduction export_reproduction",
    "replay.locate.find": "find_nonfinite",
    "replay.locate.result": "NonFiniteOrigin",
    "errors": "CheckpointError FolderInUse RankFailed SettingError SurefootError TrainingHalted UsageError",
    "keep.checkpoint.manager": "CheckpointManager",
    "observe.monitor": "GradientMonitor",
    "observe.parameters": "parameter_report",
    "observe.tensors": "Watch",
    "record.incidents.retention": "IncidentKeeper",
    "guard.presets": "for_deep_cnn for_fine_tuning for_gan for_rl for_rnn for_transformer",
    "record.limits": "LogLimits",
    "record.log": "RunLog",
    "record.reading": "RunTables load_run",
    "record.sinks.mlflow": "MLflowSink",
    "record.sinks.tensorboard": "TensorBoardSink",
    "record.sinks.wandb": "WandbSink",
    "record.sinks.webhook": "Webhook",
    "report.terminal.progress": "Progress",
    "guard.stabilizer": "TrainingStabilizer",
    "guard.standalone": "Running clip_gradients",
    "types": "Decision Detector Incident Layers Outcome Signals StepRecord Verdict",
}
_MODULE_OF = {name: f"surefoot.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
