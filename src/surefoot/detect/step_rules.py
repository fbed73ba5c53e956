"""The rules that judge one step: `NonFinite`, `Explosion`, `Spike`, `Setback`, `LostProgress` and `Limit`.

They use tensor operations alone, so they can judge a step on the device before it is applied, without a host sync. Each
keeps a baseline of fixed size that a rejected value never enters: a record that fades slowly (`fade`), or a window of
the last accepted values. Rejected values add up, and a level that stays is accepted as the new one (`forgive`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from surefoot.errors import require
from surefoot.types import Signals, Verdict

if TYPE_CHECKING:
    from surefoot.types import Scalar


_QUARTERS = np.array((0.25, 0.5, 0.75))

Array: TypeAlias = Any
"""A numpy array or a torch tensor."""


class Library:
    """The functions step rules use, from numpy or from torch on one device.

    A rule is written once against what the two share (`where`, `maximum`, `isfinite`, …); the methods cover what they
    spell differently. Floats go through numpy: a handful of numbers is an order of magnitude cheaper there.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.functions: Any = np if device is None else torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functions, name)

    def scalar(self, value: Scalar | None) -> Array:
        """A signal as a 0-d array without reading it; NaN for what was not measured."""
        value = torch.nan if value is None else value
        if self.device is None:
            return np.float64(value)
        if isinstance(value, torch.Tensor):
            return value.detach().to(device=self.device, dtype=torch.float32)
        return torch.full((), value, dtype=torch.float32, device=self.device)  # a fill: `torch.tensor` would sync

    def own(self, array: Array) -> Array:
        """A part of the state, in this library and on this device. Moves nothing that is there already."""
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
        """The entries of each row at `places`, rounded to whole positions."""
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


def fade(steps: Array, half_life_steps: float) -> Array:
    """What a record is multiplied by each step: it halves over the half-life, or while the run doubles in length."""
    return (steps / (steps + 1)).clip(0.5 ** (1 / half_life_steps))


def forgive(refused: Array, outlier: Array, forgiven: float) -> Array:
    """The count of refusals after an accepted step: 0 after an outlier (a new level), else reduced by `forgiven`."""
    return (refused - forgiven).clip(0.0) * ~outlier


@dataclass(frozen=True)
class NonFinite:
    """The loss or some gradient entry is NaN or Inf.

    A gradient norm that overflowed to Inf while every entry is finite is not this: see `Explosion`.
    """

    judges_loss: bool = field(default=True, repr=False)
    """Whether a loss that is not finite counts. Without agreement between ranks it must not: each has its own loss."""

    def init(self) -> tuple[()]:
        """There is nothing to remember."""
        return ()

    def update(self, state: tuple[()], signals: Signals) -> tuple[tuple[()], Verdict]:
        """Judge one step. What nobody measured counts as healthy."""
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
"""A gradient whose square overflows fp32 would put an Inf into second moments that never leaves them."""
EARLIEST = 3
"""Accepted steps with a gradient before any comparison is made."""
EXPLOSION_FORGIVEN = 0.05
"""How much one healthy step reduces the count of refusals of `Explosion`."""


class ExplosionState(NamedTuple):
    """Fading maximum, how many steps with a gradient were accepted, how many were refused (nearly) in a row."""

    peak: Array
    accepted: Array
    refused: Array


@dataclass(frozen=True)
class Explosion:
    """The gradient norm exceeds `factor` times the largest norm accepted so far.

    The reference is the largest norm accepted so far, fading slowly, and not an average: gradient norms have heavy
    tails, small batches and nearly solved tasks more than others, and a rule that compares with the middle of the
    distribution raises false alarms in the tail. Compared with the maximum, a healthy stream has to exceed its own
    record many times over in one step. What is judged anomalous does not raise the reference; what keeps coming for
    `patience` steps is a new level, not an outlier, and is accepted.

    - A gradient no larger than the weights is ordinary in size, however unusual for the run: before its first reward, a
      policy that explores has gradients of next to nothing, and the first real one is what it has been waiting for. So
      the norm must also exceed `min_to_weights` times the norm of the parameters, where that is known.
    - In the first `min_steps` steps, when a record has hardly been set, `early_factor` takes the place of `factor`.
    - The record fades over `half_life_steps`, but no faster than the run gets longer: a run of `n` steps has to allow
      for the hard example that comes once in `n` steps, which a fixed half-life would have forgotten by then.
    - A gradient of exactly 0 (a hinge loss with its margin kept, a reward not yet found) says nothing about the size of
      gradients, so it neither counts as a step nor lets the record fade.
    - Refusals need not be strictly in a row to count as a level: a healthy step takes back a twentieth of one, so an
      "outlier" that is more than one step in twenty is accepted in the end, and a bad batch once an epoch is not.
    """

    factor: float = 50.0
    """How far beyond the fading maximum is anomalous."""
    half_life_steps: float = 2_000.0
    """The maximum halves over this many steps, so that a rough start is forgotten, or over as many as the run has
    behind it, whichever is longer."""
    min_to_weights: float = 1.0
    """… and beyond how many times the norm of the parameters."""
    min_steps: int = 20
    """Accepted steps with a gradient before `factor` holds."""
    early_factor: float = 1_000.0
    """What holds until then, from the third on. Before that only a norm whose square overflows fp32 is anomalous."""
    patience: int = 10
    """After so many refusals in a row, or nearly so, the norm is taken for a new level and accepted."""
    signal: str = "grad_norm"
    """Which number of the step is judged."""

    def __post_init__(self) -> None:
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
        """No maximum yet."""
        return ExplosionState(np.zeros(()), np.zeros(()), np.zeros(()))

    def update(self, state: ExplosionState, signals: Signals) -> tuple[ExplosionState, Verdict]:
        """Judge one step."""
        xp = library_of(signals)
        value = xp.scalar(signals.get(self.signal))
        peak, accepted, refused = (xp.own(part) for part in state)
        factor = xp.where(accepted >= self.min_steps, self.factor, self.early_factor)
        beyond = (value > factor * peak) & (peak > 0) & (accepted >= EARLIEST)
        if signals.param_norm is not None:
            beyond = beyond & (value > self.min_to_weights * xp.scalar(signals.param_norm))
        overflowing = value > OVERFLOW
        anomalous = overflowing | (beyond & (refused < self.patience))
        healthy = xp.is_finite(value) & ~anomalous
        informative = healthy & (value > 0)
        next_state = ExplosionState(
            xp.where(informative, xp.maximum(peak * fade(accepted, self.half_life_steps), value), peak),
            accepted + informative,
            # A norm that overflowed is no level that could be accepted, so it does not count towards one.
            xp.where(healthy, forgive(refused, beyond, EXPLOSION_FORGIVEN), refused + (anomalous & ~overflowing)),
        )
        return next_state, Verdict("explosion", anomalous, severity="error")


@dataclass(frozen=True)
class Limit:
    """A number of the step is above a limit that somebody has set, whatever the run has been like before."""

    signal: Literal["grad_norm", "grad_ratio", "loss"]
    """`grad_ratio` is the gradient norm over the norm of the parameters, once that is known and not 0."""
    highest: float
    """The largest value that is accepted."""

    @property
    def name(self) -> str:
        """What its verdicts, and the steps that it refuses, are called by."""
        return f"limit.{self.signal}"

    def init(self) -> tuple[()]:
        """There is nothing to remember."""
        return ()

    def update(self, state: tuple[()], signals: Signals) -> tuple[tuple[()], Verdict]:
        """Judge one step. What nobody measured counts as healthy."""
        xp = library_of(signals)
        if self.signal == "grad_ratio":
            weights = xp.scalar(signals.param_norm)
            beyond = (xp.scalar(signals.grad_norm) > self.highest * weights) & (weights > 0)
        else:
            beyond = xp.scalar(signals.get(self.signal)) > self.highest
        return state, Verdict(self.name, beyond, severity="error")


IQR_OF_NORMAL = 1.349
SPIKE_FORGIVEN = 0.001
"""How much one healthy step reduces the count of refusals of `Spike`."""
_TINY = 1e-30
"""Keeps a spread of 0 from dividing; representable in fp32 and lost in any real spread."""


class SpikeState(NamedTuple):
    """A row per signal."""

    window: Array
    """The last accepted values, oldest first; NaN where there is none yet."""
    accepted: Array
    """How many values other than 0 were accepted."""
    furthest: Array
    """Fading maximum of the distance from the median."""
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
    for `patience` steps is accepted as the new one.

    Values that are exactly 0 have no scale: a reward not yet found or a kept margin is followed by a first real value
    without being its baseline. They enter the window, but neither count as steps nor let the maximum fade. The maximum
    fades, and refusals add up, as in `Explosion`, for the same reasons.
    """

    signals: tuple[str, ...] = ("loss", "grad_norm")
    """Which numbers of the step are judged; all of them must be outliers."""
    window_steps: int = 128
    """How many accepted steps make up the recent past."""
    threshold: float = 10.0
    """Robust z-score beyond which a value is an outlier."""
    factor: float = 5.0
    """… and how many times further out than the run has been."""
    max_tail_factor: float = 50.0
    """… and how many times higher at most, when the tail is heavy."""
    min_rise: float = 0.1
    """… and by how much of the median's size."""
    half_life_steps: float = 2_000.0
    """The furthest distance halves over this many steps, or over as many as the run has behind it, if that is more."""
    min_steps: int = 50
    """Accepted values other than 0 before there is a verdict."""
    patience: int = 3
    """After so many refusals within about a thousand steps, values of that kind are the run's own and accepted: unlike
    an explosion, a spike of ordinary size that keeps coming back is something to learn from."""

    def __post_init__(self) -> None:
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
        tail = xp.sqrt(highest / (spread + _TINY)).clip(1.0, self.max_tail_factor)
        bar = xp.maximum(self.threshold * spread, self.factor * furthest)
        bar = xp.maximum(xp.maximum(bar, tail * highest), self.min_rise * xp.abs(median))
        finite = xp.is_finite(values)
        outlier = (distance > bar) & (accepted >= self.min_steps) & finite
        taken = finite & (~outlier | (refused >= self.patience))
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
    """Of several rows of values, or of one."""

    low: Array
    median: Array
    high: Array


def quartiles(xp: Library, window: Array) -> Quartiles:
    """Lower quartile, median and upper quartile of the values of each row that are there.

    By sorting, and not with `torch.nanmedian`, which has no deterministic form on CUDA.
    """
    filled = xp.is_finite(window).sum(1)
    places = (filled[:, None] - 1).clip(0) * xp.quarters()
    picked = xp.pick(xp.sort_rows(window), places)
    return Quartiles(picked[:, 0], picked[:, 1], picked[:, 2])


def _bar(xp: Library, highest: Array, found: Quartiles, threshold: float, lost: Array) -> Array:
    """What a loss must be above to be too high, for the two rules that look for a loss of what was gained.

    That is the highest of the past, `threshold` robust spreads above its median, and `lost` above its median.
    """
    bar = xp.maximum(highest, found.median + threshold * (found.high - found.low) / IQR_OF_NORMAL)
    return xp.maximum(bar, found.median + lost)


def _check_bar(threshold: float, share: float, accept_after: int) -> None:
    require(threshold > 0, f"`threshold` must be positive; got {threshold}.")
    require(share >= 0, f"`share` must not be negative; got {share}.")
    require(accept_after >= 1, f"`accept_after` must be at least 1; got {accept_after}.")


FIRST_STEPS = 5
"""The first accepted losses, whose mean is where the run started."""


class SetbackState(NamedTuple):
    """The last accepted losses, where the run started, how many were accepted, how many in a row were not."""

    window: Array
    start: Array
    accepted: Array
    run: Array


@dataclass(frozen=True)
class Setback:
    """The loss is above everything of the last window, and a good share of what was gained is gone.

    One high loss says little, a bad batch has it too. This rule therefore does not act by itself; `TrainingRecovery`
    counts how many steps in a row it holds. A loss is a setback when it lies

    - above every accepted loss of the last `window_steps` steps, and
    - more than `threshold` spreads (robust, as in `Spike`) above their median, and
    - higher than the median by `share` of everything the run has gained since its first steps. This is what tells a
      model that was damaged from a schedule that restarts, from dropout that is switched on, from a slightly harder
      data set: those cost some of the gain, and the run is on its way again.

    Values that are judged a setback do not enter the window; a level that stays for `accept_after` steps does, since
    whoever could have done something about it has had the time. Losses that are 0, negative or cross zero are judged by
    differences, never by ratios.
    """

    window_steps: int = 64
    """How many accepted steps the loss is compared with."""
    threshold: float = 3.0
    """How many spreads above the median of the window."""
    share: float = 0.3
    """… and how much of what was gained (first losses minus the median of the window) must be lost."""
    min_steps: int = 32
    """Accepted losses before there is a verdict."""
    accept_after: int = 100
    """After so many in a row, the level is the run's new one."""
    signal: str = "loss"
    """Which number of the step is judged."""

    def __post_init__(self) -> None:
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
"""Losses after the first ones, within which a very high first loss is expected to have fallen."""


class LostProgressState(NamedTuple):
    """A row per horizon, the shorter one first, except for the last losses."""

    recent: Array
    """The last losses, oldest first, whatever was made of them; NaN where there is none yet."""
    trail: Array
    """The levels of the last blocks, whatever was made of them."""
    levels: Array
    """The levels that were accepted, oldest first."""
    start: Array
    """Mean of the first losses."""
    early: Array
    """The highest of the losses after those."""
    seen: Array
    """How many losses there were. Once the early ones are past, the count goes around the blocks of the longer horizon,
    since one in fp32 stops at 16.8 million."""
    above: Array
    """How many levels in a row were too high."""


@dataclass(frozen=True)
class LostProgress:
    """The mean loss over several steps is too high, and a good share of what was gained is gone.

    `Setback` compares single losses, and the noise of small batches hides much from it: its bar is the highest of the
    last losses. This rule compares levels. A level is the mean of the middle half of the last `block_steps` losses, so
    that neither a bad batch nor a heavy tail moves it, and for the longer horizon the mean of the last `longer` of
    these. It is too high when it lies

    - above the highest of the last half of the accepted levels, and
    - more than `threshold` spreads (robust, as in `Spike`) of those levels above their median, so that the noise of the
      run sets the bar, averaged as the level itself is, and
    - higher than the median by `share` of everything the run has gained since its start. That is the mean of its first
      losses, or the highest loss after those if that is lower: a very high first loss says nothing about what was
      learned since.

    A run that has gained nothing yet has nothing to lose and is not judged. Whether the weights are to blame is not for
    this rule to say: a new data set raises the level too. It refuses nothing; `TrainingRecovery` counts how long it
    holds and looks at how far the weights have moved. Levels that are too high are not accepted; after `accept_after`
    blocks in a row they are the run's new ones.
    """

    block_steps: int = 8
    """Steps that make up a level of the shorter horizon."""
    longer: int = 4
    """How many of these make up a level of the longer horizon."""
    blocks: int = 16
    """How many accepted levels a level is compared with."""
    threshold: float = 4.0
    """How many spreads above the median of those."""
    share: float = 0.3
    """… and how much of what was gained (start minus that median) must be lost."""
    min_blocks: int = 4
    """Accepted levels before there is a verdict."""
    accept_after: int = 12
    """After so many blocks in a row, the level is the run's new one."""
    signal: str = "loss"
    """Which number of the step is judged."""

    def __post_init__(self) -> None:
        require(self.block_steps >= 4, f"`block_steps` must be at least 4 to have a middle; got {self.block_steps}.")
        require(self.longer >= 1, f"`longer` must be at least 1; got {self.longer}.")
        require(self.blocks >= 4, f"`blocks` must be at least 4 to have quartiles; got {self.blocks}.")
        _check_bar(self.threshold, self.share, self.accept_after)
        require(
            2 <= self.min_blocks <= self.blocks,
            f"`min_blocks` must lie between 2 and `blocks`; got {self.min_blocks} of {self.blocks}.",
        )

    def init(self) -> LostProgressState:
        """No losses yet."""
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
