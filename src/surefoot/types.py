"""The values that are passed between the stages: Signals, Verdict, Decision, Outcome, Incident.

Most of them exist twice: on the device while the step is being decided (fields are 0-d tensors, nothing is read),
and on the host a few steps later (fields are floats). The same class is used for both, so a detector written with
tensor operations can decide a step without a host sync, and one written with floats can judge it a few steps later.

`True` means anomalous, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

Scalar: TypeAlias = "float | Tensor"
Severity: TypeAlias = Literal["info", "warning", "error"]


class GradientNorms(NamedTuple):
    """The norm of all gradients together and of each one, on the device, before clipping."""

    total: Tensor
    each: Tensor


class NamedParameter(NamedTuple):
    """A parameter with its name in the user's model."""

    name: str
    parameter: Tensor


@dataclass(frozen=True)
class LayerStats:
    """Per-layer statistics of one step, one entry per parameter that had a gradient."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Number of dimensions of each parameter: 1 for a bias or a gain."""
    grad_norm: Tensor
    """L2 norm of the gradient, unscaled, before clipping; NaN if the gradient has a non-finite value."""
    grad_largest: Tensor | None
    """Largest absolute value among the finite entries of the gradient.

    `None` on a CPU without `log` and `watch`: it takes a pass over the gradients, and nothing would read it.
    """
    nonfinite: Tensor
    """The number of gradient entries that are NaN or Inf."""
    param_norm: Tensor | None = None
    update_norm: Tensor | None = None

    @property
    def without_gradient(self) -> Tensor:
        """Whether each gradient is exactly 0."""
        return (self.grad_norm if self.grad_largest is None else self.grad_largest) == 0

    @property
    def grad_to_param(self) -> Tensor | None:
        """Gradient norm over parameter norm; `None` unless parameters are watched."""
        return None if self.param_norm is None else self.grad_norm / self.param_norm

    @property
    def update_to_weight(self) -> Tensor | None:
        """Norm of the applied update over parameter norm; `None` unless updates are watched."""
        if self.param_norm is None or self.update_norm is None:
            return None
        return self.update_norm / self.param_norm

    def nonfinite_counts(self) -> dict[str, int]:
        """Name and count of every layer whose gradient has a non-finite value."""
        return {name: int(n) for name, n in zip(self.names, self.nonfinite.tolist(), strict=True) if n > 0}

    def weights(self) -> list[tuple[str, float]]:
        """Name and gradient norm of the weights (rank two and more) with a gradient, in order."""
        rows = zip(self.names, self.ranks, self.grad_norm.tolist(), self.without_gradient.tolist(), strict=True)
        return [(name, norm) for name, rank, norm, without in rows if rank >= 2 and not without]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dictionary per layer."""
        columns = {
            "grad_norm": self.grad_norm,
            "grad_largest": self.grad_largest,
            "nonfinite": self.nonfinite,
            "param_norm": self.param_norm,
            "grad_to_param": self.grad_to_param,
            "update_norm": self.update_norm,
            "update_to_weight": self.update_to_weight,
        }
        known = {key: values.tolist() for key, values in columns.items() if values is not None}
        for i, name in enumerate(self.names):
            yield {"name": name} | {key: values[i] for key, values in known.items()}

    def __str__(self) -> str:
        return format_table(list(self.rows()))


@dataclass(frozen=True)
class Signals:
    """The measurements of one optimizer step. `None`: not measured."""

    step: int
    """The optimizer step, counted from 0 over attempts: a skipped step has its own number."""
    loss: Scalar | None = None
    """Mean loss over the step's microbatches, unscaled."""
    grad_norm: Scalar | None = None
    """Global L2 norm of the gradients, unscaled, before clipping. NaN if any entry is NaN or Inf."""
    nonfinite: Scalar | None = None
    """The number of gradient entries that are NaN or Inf."""
    clip_factor: Scalar = 1.0
    """The factor of clipping; 1 if it did nothing."""
    lr: float | None = None
    """Learning rate of the first parameter group, with any back-off applied."""
    loss_scale: Scalar = 1.0
    layers: LayerStats | None = None
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    """The user's own signals, passed to `TrainingStabilizer.observe`."""
    param_norm: Scalar | None = None
    """Global L2 norm of the parameters, which is measured occasionally."""

    def get(self, name: str) -> Scalar | None:
        """A signal by name, surefoot's or the user's; `None` if there is none."""
        value = self.extra.get(name, getattr(self, name, None))
        return value if isinstance(value, (Real, Tensor)) else None  # type: ignore[return-value]

    @property
    def device(self) -> torch.device | None:
        """The device of the signals; `None` if they are floats on the host."""
        for value in (self.grad_norm, self.loss, *self.extra.values()):
            if isinstance(value, Tensor):
                return value.device
        return None


@dataclass(frozen=True)
class Verdict:
    """A judgement of one step's signals. `anomalous` has the same polarity everywhere: True means a problem."""

    detector: str
    anomalous: Any
    """A bool, or a 0-d bool tensor while it is on the device."""
    severity: Severity = "warning"
    summary: str = ""
    """One sentence with numbers; empty if healthy, and on the device, where numbers are not read."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Verdict, ...] = ()
    """The verdicts that this one was combined from."""

    def leaves(self) -> Iterator[Verdict]:
        """The verdicts of single detectors in this one; the verdict itself if it is one."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


@runtime_checkable
class Detector(Protocol):
    """Two pure functions and a state of fixed size. `state` is the result of `init`."""

    def init(self) -> Any:
        """The state before the first step."""

    def update(self, state: Any, signals: Signals) -> tuple[Any, Verdict]:
        """Judge one step; returns the next state and the verdict."""


@runtime_checkable
class Clipper(Protocol):
    """Two pure functions and a state of fixed size."""

    def init(self, count: int) -> Any:
        """The state before the first step, for `count` gradients."""

    def update(self, state: Any, norms: GradientNorms) -> tuple[Any, Tensor]:
        """The next state, and the factor for the gradients."""


@runtime_checkable
class Shaper(Protocol):
    """Changes the gradients of parameters in place."""

    def shape(self, parameters: Sequence[NamedParameter]) -> None:
        """Change `.grad` of every parameter that has one."""


class LossScaler(Protocol):
    """The interface of a loss scaler."""

    @property
    def floor(self) -> float:
        """The smallest scale."""

    def init(self) -> Any:
        """The state before the first step."""

    def scale_of(self, state: Any) -> Tensor:
        """The factor for the loss."""

    def update(self, state: Any, overflow: Tensor) -> Any:
        """The next state, after a step whose gradients did or did not overflow."""


Action: TypeAlias = Literal[
    "none", "skip", "back_off", "roll_back", "repeat", "reset_moments", "take_back", "halt", "undone"
]

_DONE: dict[Action, str] = {
    "none": "left alone",
    "skip": "step skipped",
    "back_off": "step skipped, learning rate cut",
    "roll_back": "back to an earlier state, learning rate cut",
    "repeat": "back to an earlier moment, steps repeated",
    "reset_moments": "optimizer state cleared, learning rate cut",
    "take_back": "the return was undone",
    "halt": "halted",
    "undone": "undone: its step was repeated",
}


@dataclass(frozen=True)
class Decision:
    """The response to a verdict."""

    action: Action = "none"
    reason: str = ""
    lr_factor: float = 1.0
    """The factor for the learning rate from now on. The user's schedule is not changed."""
    before: int | None = None
    """For a return: the step that the restored state must be older than."""
    only_if_moved: bool = False
    """For a return: whether it is made only if the weights had moved further than usual."""
    only_repeat: bool = False
    """For a return: whether it is made only if it repeats the steps since, because a problem recurred in a repeat."""
    is_test: bool = False
    """For a return: whether it only repeats the steps since, once and unchanged, to see whether the problem recurs."""
    through: int | None = None
    """For a return: the last step of a series of bad batches, which are left out if the steps since are repeated."""
    limits_rate: bool = False
    """For a return: whether a learning rate that was raised before the problem is limited to the one before."""


@dataclass(frozen=True)
class Incident:
    """An event that needs attention: its step, its kind and the numbers."""

    step: int
    kind: str
    """`nonfinite`, `explosion`, `spike`, …: the detector that raised it, or a cause code."""
    severity: Severity
    summary: str
    action: Action = "none"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    signals: Signals | None = None

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.summary} ({_DONE[self.action]})"


class OptimizerSetting(NamedTuple):
    """A setting of an optimizer: parameter group, key and value."""

    group: int
    key: str
    value: float

    def __str__(self) -> str:
        return f"{self.key} of parameter group {self.group} is {self.value:g}"


@dataclass(frozen=True)
class StepRecord:
    """One step on the host, when its numbers have arrived."""

    signals: Signals
    skipped: bool
    """Whether the weights, the moments and the step count were left unchanged."""
    reasons: tuple[str, ...] = ()
    """The detectors that refused the step."""
    overflow: bool = False
    """Whether fp16 gradients overflowed, which skips the step and lowers the loss scale, but is not an incident."""
    notices: tuple[str, ...] = ()
    """Further facts about the step. `setback`, `lost_progress` and `stop` are shared with all ranks. The batches of a
    step that is `left_out` were drawn but not trained on, when steps were repeated."""
    settings: tuple[OptimizerSetting, ...] = ()
    """Non-finite settings of the optimizer on this rank: such a step is not applied."""


class Outcome:
    """The result of one call of `step`. Reading a value waits for the device; creating the outcome does not."""

    def __init__(self, step: int, read: Callable[[], StepRecord] | None) -> None:
        self.step = step
        self._read = read

    @property
    def accumulating(self) -> bool:
        """Whether this call only completed a microbatch, before the optimizer step."""
        return self._read is None

    @property
    def record(self) -> StepRecord:
        """The complete record of the step."""
        if self._read is None:
            raise UsageError(f"step {self.step} is still accumulating: it has no numbers yet. See `accumulating`.")
        return self._read()

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        return not self.accumulating and not self.record.skipped

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped."""
        return not self.accumulating and self.record.skipped

    @property
    def clipped(self) -> bool:
        """Whether the gradient was clipped."""
        return not self.accumulating and bool(self.record.signals.clip_factor < 1.0)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The detectors that refused the step."""
        return () if self.accumulating else self.record.reasons

    @property
    def loss(self) -> float | None:
        """Mean loss over the step's microbatches."""
        return self.record.signals.loss  # type: ignore[return-value]

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm before clipping."""
        return self.record.signals.grad_norm  # type: ignore[return-value]

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step; 1 without loss scaling."""
        return float(self.record.signals.loss_scale)

    @property
    def layers(self) -> LayerStats | None:
        """Per-layer statistics."""
        return self.record.signals.layers

    def __repr__(self) -> str:
        if self.accumulating:
            return f"Outcome(step={self.step}, accumulating)"
        record = self.record
        why = [", ".join(record.reasons) or "overflow", *map(str, record.settings)]
        state = f"skipped: {', '.join(why)}" if record.skipped else "applied"
        numbers = ", ".join(f"{key}={format_number(record.signals.get(key))}" for key in ("loss", "grad_norm"))
        return f"Outcome(step={self.step}, {state}, {numbers})"


def format_number(value: object) -> str:
    """Four significant digits, or plain text for a value that is not a float."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Align rows of equal keys under their names; `None` is shown as "none"."""
    if not rows:
        return "(nothing)"
    head = list(rows[0])
    cells = [["none" if row[key] is None else format_number(row[key]) for key in head] for row in rows]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    lines = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)
