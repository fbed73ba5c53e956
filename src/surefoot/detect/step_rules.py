"""The rules that judge one step: `NonFinite`, `Explosion`, `Spike`, `Setback`, `LostProgress` and `Limit`.

They use only tensor operations, so they can judge a step on the device before it is applied, without a host sync. Each
keeps a baseline of fixed size that a rejected value never enters: a maximum that decays slowly (`fade`), or a window of
the last accepted values. Rejected values are counted, and a level that lasts is accepted as the new one (`forgive`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from surefoot.core.settings import check_types
from surefoot.errors import require
from surefoot.types import Signals, Verdict

if TYPE_CHECKING:
    from surefoot.types import Scalar


_QUARTERS = np.array((0.25, 0.5, 0.75))

Array: TypeAlias = Any
"""A numpy array or a torch tensor."""


class Library:
    """The functions that step rules use, from numpy or from torch on one device.

    A rule is written once against what the two share (`where`, `maximum`, `isfinite`, …); the methods cover
    differences. Floats use numpy: a handful of numbers is an order of magnitude cheaper there.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.functions: Any = np if device is None else torch

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.functions, name)
        if self.device is None:
            setattr(self, name, function)  # found directly from now on; a function of torch may be replaced
        return function

    def scalar(self, value: Scalar | None) -> Array:
        """A signal as a 0-d array without reading it; NaN if it was not measured."""
        value = torch.nan if value is None else value
        if self.device is None:
            return np.float64(value)
        if isinstance(value, torch.Tensor):
            return value.detach().to(device=self.device, dtype=torch.float32)
        return torch.full((), value, dtype=torch.float32, device=self.device)  # a fill: `torch.tensor` would sync

    def own(self, array: Array) -> Array:
        """A part of the state, in this library and on this device, without copying if possible."""
        if self.device is None:
            return array.cpu().numpy() if isinstance(array, torch.Tensor) else array
        return torch.as_tensor(array, dtype=torch.float32, device=self.device)

    def is_finite(self, values: Array) -> Array:
        """False for NaN and Inf; two kernels where `torch.isfinite` launches four."""
        return abs(values) < np.inf

    def sort_rows(self, rows: Array) -> Array:
        """Each row in ascending order, NaN last."""
        return np.sort(rows, axis=1) if self.device is None else torch.sort(rows, dim=1).values

    def pick(self, rows: Array, places: Array) -> Array:
        """The entries of each row at `places`, rounded to integer positions."""
        if self.device is None:
            return np.take_along_axis(rows, np.rint(places).astype(np.int64), axis=1)
        return rows.gather(1, places.round().to(torch.int64))

    def quarters(self) -> Array:
        """One, two and three quarters."""
        return _QUARTERS if self.device is None else torch.linspace(0.25, 0.75, 3, device=self.device)


_ON_HOST = Library(None)


def library_of(signals: Signals) -> Library:
    """The library for the signals of this step."""
    return _ON_HOST if signals.device is None else Library(signals.device)


def limited(values: Array, low: float, high: float = np.inf) -> Array:
    """The values within the limits; `clip` of numpy takes three times as long."""
    if isinstance(values, torch.Tensor):
        return values.clip(low) if high == np.inf else values.clip(low, high)
    raised = np.maximum(values, low)
    return raised if high == np.inf else np.minimum(raised, high)


def fade(steps: Array, half_life_steps: float) -> Array:
    """The decay factor of a record per step: it halves over the half-life, or while the run doubles in length."""
    return limited(steps / (steps + 1), 0.5 ** (1 / half_life_steps))


def forgive(refused: Array, outlier: Array, forgiven: float) -> Array:
    """The count of refusals after an accepted step: 0 after an outlier (a new level), else reduced by `forgiven`."""
    return limited(refused - forgiven, 0.0) * ~outlier


@dataclass(frozen=True)
class NonFinite:
    """The loss or some gradient entry is NaN or Inf.

    A gradient norm that overflowed to Inf while every entry is finite is not this: see `Explosion`.
    """

    judges_loss: bool = field(default=True, repr=False)
    """Whether a non-finite loss counts. Without agreement between ranks it must not: each has its own loss."""

    def __post_init__(self) -> None:
        check_types(self)

    def init(self) -> tuple[()]:
        """No state."""
        return ()

    def update(self, state: tuple[()], signals: Signals) -> tuple[tuple[()], Verdict]:
        """Judge one step. Values that were not measured count as healthy."""
        xp = library_of(signals)
        broken = xp.scalar(0.0) > 0
        if self.judges_loss and signals.loss is not None:
            broken = broken | ~xp.is_finite(xp.scalar(signals.loss))
        if signals.nonfinite is not None:
            broken = broken | (xp.scalar(signals.nonfinite) > 0)
        elif signals.grad_norm is not None:
            broken = broken | ~xp.is_finite(xp.scalar(signals.grad_norm))
        return state, Verdict("nonfinite", broken, severity="error")


OVERFLOW = 1.8e19
"""A gradient whose square overflows fp32 would put an Inf into second moments, permanently."""
EARLIEST = 3
"""The number of accepted steps with a gradient before any comparison is made."""
EXPLOSION_FORGIVEN = 0.05
"""The amount by which one healthy step reduces the count of refusals of `Explosion`."""
LEVEL_STEPS = 6
"""The number of directly consecutive refusals of `Explosion` after which the norm is a new level, if its patience is
longer. `TrainingRecovery` needs five to judge whether the weights are damaged."""


class ExplosionState(NamedTuple):
    """Decaying maximum, number of accepted steps with a gradient, number of (nearly) consecutive refusals."""

    peak: Array
    accepted: Array
    refused: Array


@dataclass(frozen=True)
class Explosion:
    """The gradient norm exceeds `factor` times the largest norm accepted so far.

    The reference is the largest accepted norm, decaying slowly, and not an average: gradient norms have heavy tails,
    especially with small batches and nearly solved tasks, and a rule that compares with the middle of the distribution
    raises false alarms in the tail. Compared with the maximum, a healthy stream has to exceed its own record many times
    over in one step. An anomalous value does not raise the reference; values that continue are a new level, not
    outliers, and are accepted.

    - A gradient no larger than the weights is ordinary in size, however unusual for the run: before its first reward,
      an exploring policy has gradients of almost nothing, and the first real one is expected. So the norm must also
      exceed `min_to_weights` times the norm of the parameters, if that is known.
    - In the first `min_steps` steps, when there is hardly a record, `early_factor` is used instead of `factor`. After
      that it falls with the square of the number of steps, until it is `factor`: the largest of 25 values with a heavy
      tail is often exceeded a hundred times over, the largest of 100 hardly ever.
    - The record decays over `half_life_steps`, but no faster than the run gets longer: a run of `n` steps has to allow
      for the hard example that occurs once in `n` steps, which a fixed half-life would have forgotten by then.
    - A gradient of exactly 0 (a hinge loss with its margin kept, a reward not yet found) does not indicate the size of
      gradients, so it neither counts as a step nor lets the record decay.
    - Refusals need not be strictly consecutive to count as a level: a healthy step reduces the count by a twentieth, so
      an "outlier" that is more than one step in twenty is accepted in the end, and a bad batch once an epoch is not.
    - Six that directly follow each other are enough: the weights do not change between them, so the data or the loss
      has changed, or the weights were damaged before, and then refusing further steps would not help. If a clipper
      limits the gradients, or `TrainingRecovery` returns from damaged weights, the second one is a new level already
      (`expects_levels`), except above `early_factor` times the record, where other data hardly ever is.
    """

    factor: float = 50.0
    """The factor above the decaying maximum that is anomalous."""
    half_life_steps: float = 2_000.0
    """The maximum halves over this many steps, so that an unstable start is forgotten, or over the length of the run so
    far, whichever is longer."""
    min_to_weights: float = 1.0
    """… and the multiple of the norm of the parameters that must be exceeded."""
    min_steps: int = 20
    """The number of accepted steps with a gradient from which `early_factor` falls to `factor`."""
    early_factor: float = 1_000.0
    """The factor until then, from the third step on. Before that only an overflow of the squared norm is anomalous."""
    patience: int = 10
    """After this many (nearly) consecutive refusals, or six directly consecutive ones, the norm is a new level and
    accepted."""
    signal: str = "grad_norm"
    """The signal that is judged."""
    expects_levels: bool = field(default=False, repr=False)
    """Whether the second of two directly consecutive ones is a new level already. A guard with a clipper or with
    recovery sets it."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.factor > 1, f"`factor` must be above 1; got {self.factor}. Every step would be anomalous.")
        require(self.half_life_steps > 0, f"`half_life_steps` must be positive; got {self.half_life_steps}.")
        require(
            self.early_factor >= self.factor,
            f"`early_factor` must be at least `factor`; got {self.early_factor} and {self.factor}.",
        )
        require(self.min_to_weights >= 0, f"`min_to_weights` must not be negative; got {self.min_to_weights}.")
        require(self.min_steps >= 1, f"`min_steps` must be at least 1; got {self.min_steps}.")
        require(self.patience >= 1, f"`patience` must be at least 1; got {self.patience}.")

    def init(self) -> ExplosionState:
        """No maximum."""
        return ExplosionState(np.zeros(()), np.zeros(()), np.zeros(()))

    def update(self, state: ExplosionState, signals: Signals) -> tuple[ExplosionState, Verdict]:
        """Judge one step."""
        xp = library_of(signals)
        value = xp.scalar(signals.get(self.signal))
        peak, accepted, refused = (xp.own(part) for part in state)
        early = self.early_factor * (self.min_steps / (accepted + _TINY)) ** 2
        factor = limited(early, self.factor, self.early_factor)
        beyond = (value > factor * peak) & (peak > 0) & (accepted >= EARLIEST)
        if signals.param_norm is not None:
            beyond = beyond & (value > self.min_to_weights * xp.scalar(signals.param_norm))
        overflowing = value > OVERFLOW
        # A whole number of refusals: none was taken back, so they directly follow each other.
        needed = float(LEVEL_STEPS)
        if self.expects_levels:
            needed = xp.where(value <= self.early_factor * peak, 1.0, needed)
        lasts = (refused >= needed) & (refused % 1 == 0)
        anomalous = overflowing | (beyond & (refused < self.patience) & ~lasts)
        healthy = xp.is_finite(value) & ~anomalous
        informative = healthy & (value > 0)
        next_state = ExplosionState(
            xp.where(informative, xp.maximum(peak * fade(accepted, self.half_life_steps), value), peak),
            accepted + informative,
            # A norm that overflowed cannot be accepted as a level, so it does not count towards one.
            xp.where(healthy, forgive(refused, beyond, EXPLOSION_FORGIVEN), refused + (anomalous & ~overflowing)),
        )
        return next_state, Verdict("explosion", anomalous, severity="error")


@dataclass(frozen=True)
class Limit:
    """A signal is above a limit that the user has set, independent of earlier steps."""

    signal: Literal["grad_norm", "grad_ratio", "loss"]
    """`grad_ratio` is the gradient norm over the norm of the parameters, if that is known and not 0."""
    highest: float
    """The largest accepted value."""

    @property
    def name(self) -> str:
        """The name of its verdicts, and of the refusals it causes."""
        return f"limit.{self.signal}"

    def init(self) -> tuple[()]:
        """No state."""
        return ()

    def update(self, state: tuple[()], signals: Signals) -> tuple[tuple[()], Verdict]:
        """Judge one step. Values that were not measured count as healthy."""
        xp = library_of(signals)
        if self.signal == "grad_ratio":
            weights = xp.scalar(signals.param_norm)
            beyond = (xp.scalar(signals.grad_norm) > self.highest * weights) & (weights > 0)
        else:
            beyond = xp.scalar(signals.get(self.signal)) > self.highest
        return state, Verdict(self.name, beyond, severity="error")


IQR_OF_NORMAL = 1.349
SPIKE_FORGIVEN = 0.001
"""The amount by which one healthy step reduces the count of refusals of `Spike`."""
_TINY = 1e-30
"""Prevents a division by a spread of 0; representable in fp32 and negligible for any real spread."""


class SpikeState(NamedTuple):
    """A row per signal."""

    window: Array
    """The last accepted values, oldest first; NaN where there is none yet."""
    accepted: Array
    """The number of accepted values other than 0."""
    furthest: Array
    """Decaying maximum of the distance from the median."""
    highest: Array
    """… and of the distance above it."""
    refused: Array


@dataclass(frozen=True)
class Spike:
    """Every one of `signals` is far above its own recent past at the same step.

    For each signal the last `window_steps` accepted values give a median and a spread (the interquartile range over
    1.349, which is the standard deviation of a normal distribution and does not see the tails). A value is an outlier
    when it is

    - more than `threshold` spreads above the median, and
    - further above the median than `factor` times the furthest the run has been from its median, a maximum that fades
      slowly. A run with heavy tails has shown them before; this is what keeps it from being flagged; and
    - further than the highest it has been above its median, times how heavy that tail is. The number of spreads the
      record lies out tells: with a power law, the gap to the next record is a power of it. The square root is taken, up
      to `max_tail_factor`. Only values above the median count here: a loss that falls fast has no heavy upper tail; and
    - more than `min_rise` of the median itself, so that a stream that hardly varies has no spikes of rounding noise.

    The step is anomalous when every named signal is an outlier at once: one signal alone is an alarm at most, never a
    reason to act. A refused value enters neither the window nor the maximum, each signal by itself; a level that stays
    for `patience` steps is accepted as the new one. With several signals, an outlier directly after a refused one is
    accepted: a bad batch is followed by an ordinary one, while other data, another loss or a first reward is a new
    level, which the next step shows. A rule for one signal is an alarm, and whether it lasts is for `sustained` to say.

    Values that are exactly 0 have no scale: a reward not yet found or a kept margin is followed by a first real value
    without being its baseline. They enter the window, but neither count as steps nor let the maximum fade. The maximum
    fades, and refusals add up, as in `Explosion`, for the same reasons.
    """

    signals: tuple[str, ...] = ("loss", "grad_norm")
    """The signals that are judged; all of them must be outliers."""
    window_steps: int = 128
    """The number of accepted steps in the recent past."""
    threshold: float = 10.0
    """Robust z-score beyond which a value is an outlier."""
    factor: float = 5.0
    """… and the factor by which its distance must exceed the largest so far."""
    max_tail_factor: float = 50.0
    """… and the maximum of that factor for a heavy upper tail."""
    min_rise: float = 0.1
    """… and the minimum distance, as a share of the median's size."""
    half_life_steps: float = 2_000.0
    """The largest distance halves over this many steps, or over the length of the run so far, if that is more."""
    min_steps: int = 50
    """The number of accepted values other than 0 before there is a verdict."""
    patience: int = 3
    """After this many refusals within about a thousand steps, values of that kind belong to the run and are accepted:
    unlike an explosion, a spike of ordinary size that recurs is something to learn from."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            not isinstance(self.signals, str),
            f"`signals` is a tuple of names; got the string {self.signals!r}. Write `Spike(({self.signals!r},))`.",
        )
        require(len(self.signals) > 0, "`signals` is empty; name at least one, such as ('loss', 'grad_norm').")
        require(
            self.window_steps >= 4,
            f"`window_steps` must be at least 4 to have quartiles; got {self.window_steps}. "
            "For a limit without history use `Explosion`.",
        )
        require(self.threshold > 0, f"`threshold` must be positive; got {self.threshold}.")
        require(self.factor >= 1, f"`factor` must be at least 1; got {self.factor}.")
        require(self.max_tail_factor >= 1, f"`max_tail_factor` must be at least 1; got {self.max_tail_factor}.")
        require(self.min_rise >= 0, f"`min_rise` must not be negative; got {self.min_rise}.")
        require(self.half_life_steps > 0, f"`half_life_steps` must be positive; got {self.half_life_steps}.")
        require(self.min_steps >= 4, f"`min_steps` must be at least 4 to have quartiles; got {self.min_steps}.")
        require(self.patience >= 1, f"`patience` must be at least 1; got {self.patience}.")

    def init(self) -> SpikeState:
        """An empty window per signal."""
        rows = len(self.signals)
        return SpikeState(np.full((rows, self.window_steps), np.nan), *(np.zeros(rows) for _ in range(4)))

    def update(self, state: SpikeState, signals: Signals) -> tuple[SpikeState, Verdict]:
        """Judge one step."""
        xp = library_of(signals)
        values = xp.stack([xp.scalar(signals.get(name)) for name in self.signals])
        window, accepted, furthest, highest, refused = (xp.own(part) for part in state)
        low, median, high = quartiles(xp, window)
        distance, spread = values - median, (high - low) / IQR_OF_NORMAL
        tail = limited(xp.sqrt(highest / (spread + _TINY)), 1.0, self.max_tail_factor)
        bar = xp.maximum(self.threshold * spread, self.factor * furthest)
        bar = xp.maximum(xp.maximum(bar, tail * highest), self.min_rise * xp.abs(median))
        finite = xp.is_finite(values)
        outlier = (distance > bar) & (accepted >= self.min_steps) & finite
        # A whole number of refusals: the last one is the step before, since a healthy step takes back a fraction.
        lasts = (refused > 0) & (refused % 1 == 0) & (len(self.signals) > 1)
        taken = finite & (~outlier | lasts | (refused >= self.patience))
        informative = taken & (values != 0)
        moved = xp.concatenate([window[:, 1:], values[:, None]], 1)
        kept = fade(accepted, self.half_life_steps)
        next_state = SpikeState(
            xp.where(taken[:, None], moved, window),
            accepted + informative,
            xp.where(informative, xp.fmax(furthest * kept, xp.abs(distance)), furthest),  # ignores a NaN median
            xp.where(informative, xp.fmax(highest * kept, distance), highest),
            xp.where(taken, forgive(refused, outlier, SPIKE_FORGIVEN), refused + outlier),
        )
        return next_state, Verdict("spike", (outlier & ~taken).all(), severity="warning")


class Quartiles(NamedTuple):
    """For several rows of values, or for one."""

    low: Array
    median: Array
    high: Array


def quartiles(xp: Library, window: Array) -> Quartiles:
    """Lower quartile, median and upper quartile of the present values of each row.

    Computed by sorting, because `torch.nanmedian` has no deterministic form on CUDA.
    """
    filled = xp.is_finite(window).sum(1)
    places = limited(filled[:, None] - 1, 0) * xp.quarters()
    picked = xp.pick(xp.sort_rows(window), places)
    return Quartiles(picked[:, 0], picked[:, 1], picked[:, 2])


def _bar(xp: Library, highest: Array, found: Quartiles, threshold: float, lost: Array) -> Array:
    """The bar above which a loss is too high, for the two rules that detect a loss of progress.

    It is the highest of the past, `threshold` robust spreads above its median, and `lost` above its median.
    """
    bar = xp.maximum(highest, found.median + threshold * (found.high - found.low) / IQR_OF_NORMAL)
    return xp.maximum(bar, found.median + lost)


def _check_bar(threshold: float, share: float, accept_after: int) -> None:
    require(threshold > 0, f"`threshold` must be positive; got {threshold}.")
    require(share >= 0, f"`share` must not be negative; got {share}.")
    require(accept_after >= 1, f"`accept_after` must be at least 1; got {accept_after}.")


FIRST_STEPS = 5
"""The number of first accepted losses, whose mean is the start of the run."""


class SetbackState(NamedTuple):
    """The last accepted losses, the start of the run, the number of accepted, and of consecutive rejected losses."""

    window: Array
    start: Array
    accepted: Array
    run: Array


@dataclass(frozen=True)
class Setback:
    """The loss is above everything in the last window, and a good share of the gain is lost.

    A single high loss is weak evidence: a bad batch has it too. This rule therefore does not act by itself;
    `TrainingRecovery` counts for how many consecutive steps it holds. A loss is a setback if it is

    - above every accepted loss of the last `window_steps` steps, and
    - more than `threshold` spreads (robust, as in `Spike`) above their median, and
    - higher than the median by `share` of everything the run has gained since its first steps. This distinguishes a
      damaged model from a schedule that restarts, from dropout that is switched on, and from a slightly harder data
      set: those cost some of the gain, and the run recovers.

    Setbacks do not enter the window; a level that lasts for `accept_after` steps does, because recovery has had time to
    respond by then. Losses that are 0, negative or cross zero are judged by differences, never by ratios.
    """

    window_steps: int = 64
    """The number of accepted steps that the loss is compared with."""
    threshold: float = 3.0
    """The number of spreads above the median of the window."""
    share: float = 0.3
    """… and the share of the gain (first losses minus the median of the window) that must be lost."""
    min_steps: int = 32
    """The number of accepted losses before there is a verdict."""
    accept_after: int = 100
    """After this many consecutive steps, the level is the run's new one."""
    signal: str = "loss"
    """The signal that is judged."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.window_steps >= 8, f"`window_steps` must be at least 8 to have quartiles; got {self.window_steps}."
        )
        _check_bar(self.threshold, self.share, self.accept_after)
        require(
            8 <= self.min_steps <= self.window_steps,
            f"`min_steps` must lie between 8 and `window_steps`; got {self.min_steps} of {self.window_steps}.",
        )

    def init(self) -> SetbackState:
        """An empty window."""
        return SetbackState(np.full((1, self.window_steps), np.nan), *(np.zeros(()) for _ in range(3)))

    def update(self, state: SetbackState, signals: Signals) -> tuple[SetbackState, Verdict]:
        """Judge one step."""
        xp = library_of(signals)
        value = xp.scalar(signals.get(self.signal))
        window, start, accepted, run = (xp.own(part) for part in state)
        found = Quartiles(*(row[0] for row in quartiles(xp, window)))
        highest = xp.where(xp.is_finite(window), window, -np.inf).max()
        bar = _bar(xp, highest, found, self.threshold, self.share * xp.maximum(start - found.median, 0 * start))
        finite = xp.is_finite(value)
        above = (value > bar) & (accepted >= self.min_steps) & finite
        taken = finite & (~above | (run >= self.accept_after))
        moved = xp.concatenate([window[:, 1:], value.reshape(1, 1)], 1)
        first = taken & (accepted < FIRST_STEPS)
        next_state = SetbackState(
            xp.where(taken, moved, window),
            xp.where(first, (start * accepted + value) / (accepted + 1), start),
            accepted + taken,
            xp.where(above, run + 1, xp.where(finite, 0 * run, run)),
        )
        return next_state, Verdict("setback", above & ~taken, severity="warning")


EARLY_STEPS = 32
"""The number of losses after the first ones, within which a very high first loss is expected to fall."""


class LostProgressState(NamedTuple):
    """A row per horizon, the shorter one first, except for the last losses."""

    recent: Array
    """The last losses, oldest first, accepted or not; NaN where there is none yet."""
    trail: Array
    """The levels of the last blocks, accepted or not."""
    levels: Array
    """The accepted levels, oldest first."""
    start: Array
    """Mean of the first losses."""
    early: Array
    """The highest of the losses after those."""
    seen: Array
    """The number of losses. After the early ones, it counts cyclically over the blocks of the longer horizon, because a
    count in fp32 stops at 16.8 million."""
    above: Array
    """The number of consecutive levels that were too high."""


@dataclass(frozen=True)
class LostProgress:
    """The mean loss over several steps is too high, and a good share of the gain is lost.

    `Setback` compares single losses, and the noise of small batches hides much from it: its bar is the highest of the
    last losses. This rule compares levels. A level is the mean of the middle half of the last `block_steps` losses, so
    that neither a bad batch nor a heavy tail moves it, and for the longer horizon the mean of the last `longer` of
    these. It is too high if it is

    - above the highest of the last half of the accepted levels, and
    - more than `threshold` spreads (robust, as in `Spike`) of those levels above their median, so that the noise of the
      run sets the bar, averaged like the level itself, and
    - higher than the median by `share` of everything the run has gained since its start, which is the mean of its first
      losses, or the highest loss after those if that is lower: a very high first loss says nothing about later
      progress.

    A run that has gained nothing yet has nothing to lose and is not judged. This rule does not decide whether the
    weights are the cause: a new data set raises the level too. It refuses nothing; `TrainingRecovery` counts how long
    it holds and checks how far the weights have moved. Levels that are too high are not accepted; after `accept_after`
    consecutive blocks they are the run's new ones.
    """

    block_steps: int = 8
    """The number of steps for a level of the shorter horizon."""
    longer: int = 4
    """The number of these for a level of the longer horizon."""
    blocks: int = 16
    """The number of accepted levels that a level is compared with."""
    threshold: float = 4.0
    """The number of spreads above their median."""
    share: float = 0.3
    """… and the share of the gain (start minus that median) that must be lost."""
    min_blocks: int = 4
    """The number of accepted levels before there is a verdict."""
    accept_after: int = 12
    """After this many consecutive blocks, the level is the run's new one."""
    signal: str = "loss"
    """The signal that is judged."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.block_steps >= 4, f"`block_steps` must be at least 4 to have a middle; got {self.block_steps}.")
        require(self.longer >= 1, f"`longer` must be at least 1; got {self.longer}.")
        require(self.blocks >= 4, f"`blocks` must be at least 4 to have quartiles; got {self.blocks}.")
        _check_bar(self.threshold, self.share, self.accept_after)
        require(
            2 <= self.min_blocks <= self.blocks,
            f"`min_blocks` must lie between 2 and `blocks`; got {self.min_blocks} of {self.blocks}.",
        )

    def init(self) -> LostProgressState:
        """No losses."""
        return LostProgressState(
            np.full((1, self.block_steps), np.nan),
            np.full((1, self.longer), np.nan),
            np.full((2, self.blocks), np.nan),
            np.zeros(()),
            np.full((), -np.inf),
            np.zeros(()),
            np.zeros(2),
        )

    def update(self, state: LostProgressState, signals: Signals) -> tuple[LostProgressState, Verdict]:
        """Judge one step."""
        xp = library_of(signals)
        value = xp.scalar(signals.get(self.signal))
        recent, trail, levels, start, early, seen, above = (xp.own(part) for part in state)
        finite = xp.is_finite(value)
        recent = xp.where(finite, _shifted(xp, recent, value.reshape(1, 1)), recent)
        first = finite & (seen < FIRST_STEPS)
        start = xp.where(first, (start * seen + value) / (seen + 1), start)
        early = xp.where(finite & ~first & (seen < EARLY_STEPS), xp.maximum(early, value), early)
        seen = seen + finite
        quarter = self.block_steps // 4
        level = xp.sort_rows(recent)[:, quarter : self.block_steps - quarter].mean()  # NaN until there are enough
        ends = finite & (seen % self.block_steps == 0)
        trail = xp.where(ends, _shifted(xp, trail, level.reshape(1, 1)), trail)
        level = xp.stack([level, trail.mean()])
        around = self.block_steps * self.longer
        ends = xp.stack([ends, ends & (seen % around == 0)])
        seen = xp.where(seen >= EARLY_STEPS + around, seen - around, seen)
        high = self._is_high(xp, level, levels, xp.minimum(start, early))
        lasting = above >= self.accept_after
        taken = ends & xp.is_finite(level) & (~high | lasting)
        next_state = LostProgressState(
            recent,
            trail,
            xp.where(taken[:, None], _shifted(xp, levels, level[:, None]), levels),
            start,
            early,
            seen,
            xp.where(ends, xp.where(high, above + 1, 0 * above), above),
        )
        return next_state, Verdict("lost_progress", (high & ~lasting).any(), severity="warning")

    def _is_high(self, xp: Library, level: Array, levels: Array, start: Array) -> Array:
        found = quartiles(xp, levels)
        known = xp.is_finite(levels)
        last = xp.where(known, levels, -np.inf)[:, self.blocks // 2 :]
        gain = start - found.median
        bar = _bar(xp, xp.amax(last, 1), found, self.threshold, self.share * gain)
        return (level > bar) & (gain > 0) & (known.sum(1) >= self.min_blocks)


def _shifted(xp: Library, rows: Array, values: Array) -> Array:
    """The rows with one more value each at their end, and without their first."""
    return xp.concatenate([rows[:, 1:], values], 1)
