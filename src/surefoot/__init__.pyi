"""The public names for type checkers; `__init__.py` loads the same names when they are first used."""

from surefoot import build as build
from surefoot import trainers as trainers
from surefoot import types as types
from surefoot.act.clip import AdaptiveGradientClipper, ClipByNorm, ClipByQuantile, ClipByZScore, ClipPerTensor
from surefoot.act.loss_scale import DynamicLossScaler
from surefoot.act.shape import AdaptiveUnitClip, CentralizeGradients, ClipByValue
from surefoot.build import (
    Standardizer,
    decay_groups,
    find_lr,
    init_for,
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
from surefoot.detect.recorded_losses import judge_losses
from surefoot.detect.step_rules import Explosion, LostProgress, NonFinite, Setback, Spike
from surefoot.diagnose.engine import diagnose_folder as diagnose
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.doctor.checks import Check, Examination
from surefoot.doctor.examine import debug_training_stability
from surefoot.errors import (
    CheckpointError,
    FolderInUse,
    RankFailed,
    SettingError,
    SurefootError,
    TrainingHalted,
    UsageError,
)
from surefoot.guard import presets as presets
from surefoot.guard.attach import Attachment, attach
from surefoot.guard.stabilizer import TrainingStabilizer
from surefoot.guard.standalone import Stateful, clip_gradients
from surefoot.keep.checkpoint.manager import CheckpointManager
from surefoot.observe.monitor import GradientMonitor
from surefoot.observe.parameters import parameter_report
from surefoot.observe.tensors import LayerMetrics
from surefoot.record.incidents.bundle import IncidentKeeper
from surefoot.record.limits import LogLimits
from surefoot.record.log import RunLog
from surefoot.record.messages import LayerRows, Sink, StepRow
from surefoot.record.progress_alarms import ProgressAlarms
from surefoot.record.reading import RunTables, load_run
from surefoot.record.sinks.mlflow import MLflowSink
from surefoot.record.sinks.tensorboard import TensorBoardSink
from surefoot.record.sinks.wandb import WandbSink
from surefoot.record.sinks.webhook import WebhookSink
from surefoot.replay.export.export import Reproduction, export_reproduction
from surefoot.replay.locate.find import find_nonfinite
from surefoot.replay.locate.result import NonFiniteOrigin
from surefoot.report.terminal.progress import ProgressSink
from surefoot.types import Incident, LayerStats, Outcome, Signals, Verdict

__version__: str

__all__ = [
    "AdaptiveGradientClipper",
    "AdaptiveUnitClip",
    "Attachment",
    "CentralizeGradients",
    "Check",
    "CheckpointError",
    "CheckpointManager",
    "ClipByNorm",
    "ClipByQuantile",
    "ClipByValue",
    "ClipByZScore",
    "ClipPerTensor",
    "ClippingSaturated",
    "Diagnosis",
    "DynamicLossScaler",
    "Escalation",
    "Examination",
    "Explosion",
    "Finding",
    "FolderInUse",
    "GradientMonitor",
    "Incident",
    "IncidentKeeper",
    "LayerMetrics",
    "LayerRows",
    "LayerStats",
    "LogLimits",
    "LossStabilityMonitor",
    "LostProgress",
    "MLflowSink",
    "NoLearning",
    "NonFinite",
    "NonFiniteOrigin",
    "Oscillation",
    "Outcome",
    "Plateau",
    "ProgressAlarms",
    "ProgressSink",
    "RankFailed",
    "Reproduction",
    "RunLog",
    "RunTables",
    "Setback",
    "SettingError",
    "Signals",
    "Sink",
    "Spike",
    "StabilityChecker",
    "Standardizer",
    "Stateful",
    "StepRow",
    "SurefootError",
    "TensorBoardSink",
    "TrainingHalted",
    "TrainingRecovery",
    "TrainingStabilizer",
    "UsageError",
    "Vanishing",
    "Verdict",
    "WandbSink",
    "WebhookSink",
    "after_warmup",
    "all_of",
    "any_of",
    "attach",
    "clip_gradients",
    "debug_training_stability",
    "decay_groups",
    "diagnose",
    "export_reproduction",
    "find_lr",
    "find_nonfinite",
    "init_for",
    "judge_losses",
    "load_run",
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
