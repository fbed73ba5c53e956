"""The public surface for type checkers; `__init__.py` loads the same names when they are first used."""

from surefoot.act.clip import (
    AdaptiveGradientClipper,
    ClipByNorm,
    ClipByQuantile,
    ClipByZScore,
    Clipper,
    ClipPerTensor,
)
from surefoot.act.loss_scale import DynamicLossScaler
from surefoot.act.shape import AdaptiveUnitClip, CentralizeGradients, ClipByValue, Shaper
from surefoot.build import (
    ConvGroupNorm,
    PreNormMLP,
    ScaledResidual,
    Standardizer,
    advise_normalization,
    clip_advice,
    decay_groups,
    find_fully_masked,
    find_lr,
    init_for,
    mask_fill_value,
    masked_softmax,
    normalize_images,
    seed_everything,
    seed_worker,
    suggest_lr,
    warmup_constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_stable_decay,
    warmup_step,
)
from surefoot.decide.recovery import Escalation, TrainingRecovery
from surefoot.detect.checker import StabilityChecker
from surefoot.detect.combine import after_warmup, all_of, any_of, sustained
from surefoot.detect.monitors import (
    ClippingSaturated,
    LossStabilityMonitor,
    NoLearning,
    Oscillation,
    Plateau,
    Vanishing,
)
from surefoot.detect.step_rules import Explosion, NonFinite, Setback, Spike
from surefoot.doctor.checks import Check, Examination
from surefoot.doctor.notebook import debug_training_stability
from surefoot.errors import (
    CheckpointError,
    FolderInUse,
    RankFailed,
    SettingError,
    SurefootError,
    TrainingHalted,
    UsageError,
)
from surefoot.guard.presets import for_deep_cnn, for_fine_tuning, for_gan, for_rl, for_rnn, for_transformer
from surefoot.guard.stabilizer import TrainingStabilizer
from surefoot.guard.standalone import Running, clip_gradients
from surefoot.keep.checkpoint.manager import CheckpointManager
from surefoot.observe.monitor import GradientMonitor
from surefoot.observe.parameters import parameter_report
from surefoot.observe.tensors import Watch
from surefoot.record.incidents.retention import IncidentKeeper
from surefoot.record.limits import LogLimits
from surefoot.record.log import RunLog
from surefoot.record.reading import RunTables, load_run
from surefoot.record.sinks.mlflow import MLflowSink
from surefoot.record.sinks.tensorboard import TensorBoardSink
from surefoot.record.sinks.wandb import WandbSink
from surefoot.record.sinks.webhook import Webhook
from surefoot.replay.export.export import Reproduction, export_reproduction
from surefoot.replay.locate.find import find_nonfinite
from surefoot.replay.locate.result import NonFiniteOrigin
from surefoot.report.terminal.progress import Progress
from surefoot.types import Decision, Detector, Incident, Layers, Outcome, Signals, StepRecord, Verdict

__version__: str

__all__ = [
    "AdaptiveGradientClipper",
    "AdaptiveUnitClip",
    "CentralizeGradients",
    "Check",
    "CheckpointError",
    "CheckpointManager",
    "ClipByNorm",
    "ClipByQuantile",
    "ClipByValue",
    "ClipByZScore",
    "ClipPerTensor",
    "Clipper",
    "ClippingSaturated",
    "ConvGroupNorm",
    "Decision",
    "Detector",
    "DynamicLossScaler",
    "Escalation",
    "Examination",
    "Explosion",
    "FolderInUse",
    "GradientMonitor",
    "Incident",
    "IncidentKeeper",
    "Layers",
    "LogLimits",
    "LossStabilityMonitor",
    "MLflowSink",
    "NoLearning",
    "NonFinite",
    "NonFiniteOrigin",
    "Oscillation",
    "Outcome",
    "Plateau",
    "PreNormMLP",
    "Progress",
    "RankFailed",
    "Reproduction",
    "RunLog",
    "RunTables",
    "Running",
    "ScaledResidual",
    "Setback",
    "SettingError",
    "Shaper",
    "Signals",
    "Spike",
    "StabilityChecker",
    "Standardizer",
    "StepRecord",
    "SurefootError",
    "TensorBoardSink",
    "TrainingHalted",
    "TrainingRecovery",
    "TrainingStabilizer",
    "UsageError",
    "Vanishing",
    "Verdict",
    "WandbSink",
    "Watch",
    "Webhook",
    "advise_normalization",
    "after_warmup",
    "all_of",
    "any_of",
    "clip_advice",
    "clip_gradients",
    "debug_training_stability",
    "decay_groups",
    "export_reproduction",
    "find_fully_masked",
    "find_lr",
    "find_nonfinite",
    "for_deep_cnn",
    "for_fine_tuning",
    "for_gan",
    "for_rl",
    "for_rnn",
    "for_transformer",
    "init_for",
    "load_run",
    "mask_fill_value",
    "masked_softmax",
    "normalize_images",
    "parameter_report",
    "seed_everything",
    "seed_worker",
    "suggest_lr",
    "sustained",
    "warmup_constant",
    "warmup_cosine",
    "warmup_inverse_sqrt",
    "warmup_linear",
    "warmup_stable_decay",
    "warmup_step",
]
