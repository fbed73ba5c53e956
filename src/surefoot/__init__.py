"""surefoot keeps PyTorch training on its feet.

It sits beside a training loop, sees trouble before it reaches the weights, recovers by itself, and explains the cause
with evidence. This module is the whole public surface.
"""

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
from surefoot.decide.escalation import Escalation
from surefoot.detect.checker import StabilityChecker
from surefoot.detect.clipping import ClippingSaturated
from surefoot.detect.combine import after_warmup, all_of, any_of, sustained
from surefoot.detect.explode import Explosion
from surefoot.detect.loss_stability import LossStabilityMonitor
from surefoot.detect.nonfinite import NonFinite
from surefoot.detect.oscillate import Oscillation
from surefoot.detect.plateau import NoLearning, Plateau
from surefoot.detect.spike import Spike
from surefoot.detect.vanish import Vanishing
from surefoot.errors import SettingError, SurefootError, TrainingHalted, UsageError
from surefoot.observe.monitor import GradientMonitor
from surefoot.observe.parameters import parameter_report
from surefoot.observe.watch import Watch
from surefoot.stabilizer import TrainingStabilizer
from surefoot.standalone import Running, clip_gradients
from surefoot.types import Decision, Detector, Incident, Layers, Outcome, Signals, StepRecord, Verdict

__version__ = "0.1.0"

__all__ = [
    "AdaptiveGradientClipper",
    "AdaptiveUnitClip",
    "CentralizeGradients",
    "ClipByNorm",
    "ClipByQuantile",
    "ClipByValue",
    "ClipByZScore",
    "ClipPerTensor",
    "Clipper",
    "ClippingSaturated",
    "Decision",
    "Detector",
    "DynamicLossScaler",
    "Escalation",
    "Explosion",
    "GradientMonitor",
    "Incident",
    "Layers",
    "LossStabilityMonitor",
    "NoLearning",
    "NonFinite",
    "Oscillation",
    "Outcome",
    "Plateau",
    "Running",
    "SettingError",
    "Shaper",
    "Signals",
    "Spike",
    "StabilityChecker",
    "StepRecord",
    "SurefootError",
    "TrainingHalted",
    "TrainingStabilizer",
    "UsageError",
    "Vanishing",
    "Verdict",
    "Watch",
    "after_warmup",
    "all_of",
    "any_of",
    "clip_gradients",
    "parameter_report",
    "sustained",
]
