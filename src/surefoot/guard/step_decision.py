"""Decides one step from the statistics of its gradients: apply or skip it, and the factor for the gradients.

`StepPolicy` holds the step rules, the clipper and the loss scaler with their states; `StepDecider` advances all of them
by one step and returns a `StepDecision`. When steps are decided on the device, all values are tensors and none is read;
when the host decides, they are floats. `StepNumbers` brings the numbers of a decided step to the host, where they
become a `StepRecord`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from surefoot.act.apply import NO_OUTER_SCALING, OuterScaling
from surefoot.act.loss_scale import TorchLossScaler
from surefoot.core.device_copies import AsyncCopy, begin_reading
from surefoot.core.state_tree import choose, grown, leaves, pack, settings_of, unpack, with_leaves
from surefoot.core.state_tree import on_device as to_device
from surefoot.decide.agreement import agree_and_average
from surefoot.detect.step_rules import LostProgress, Setback
from surefoot.guard.changed_settings import log_changed_parts
from surefoot.observe.tensors import TensorStatistics, total_norm
from surefoot.types import GradientNorms, LayerStats, Scalar, Signals, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist

    from surefoot.act.apply import SettingsOfStep
    from surefoot.act.loss_scale import GradScalerState
    from surefoot.core.state_tree import Packed
    from surefoot.detect.combine import Combined
    from surefoot.guard.replica_check import ReplicaCheck
    from surefoot.observe.triton_pass import PlacedTensors
    from surefoot.types import Clipper, Detector, LossScaler, NamedParameter, OptimizerSetting

log = logging.getLogger("surefoot")

_HEAD = ("loss", "grad_norm", "nonfinite", "clip_factor", "loss_scale")
BROKEN_SETTING = "nonfinite-setting"
"""The reason for refusing a step because of a setting of the optimizer."""
BROKEN_SEARCH = "nonfinite-search"
"""The reason for refusing a step whose optimizer evaluated the loss several times and left non-finite parameters."""


@dataclass(frozen=True)
class StepInput:
    """What is known about a step before it is decided."""

    step: int
    statistics: TensorStatistics | PlacedTensors
    """The statistics of the gradients in memory, which are still scaled, or what is needed to measure them."""
    loss: Tensor | None
    divisor: Scalar
    """The divisor that accumulation leaves for the gradients."""
    own: Mapping[str, Scalar]
    """The user's own signals."""
    param_norm: Tensor
    """The norm of the parameters, which is measured occasionally."""
    broken_setting: Scalar
    """1 if a setting of the optimizer is not finite, else 0; a tensor when steps are decided on the device."""
    positions: Tensor | None = None
    """The positions of the gradients among all parameters, if some have none."""
    outer: OuterScaling = NO_OUTER_SCALING
    """The loss scale of a `GradScaler` that steps the optimizer itself, and its `found_inf`."""
    clipped: Tensor | None = None
    """The factor by which the caller has clipped the gradients: they are judged as before clipping."""
    was_broken: Tensor | None = None
    """Whether a gradient was not finite before the caller clipped by value, which makes an Inf finite."""


@dataclass(frozen=True)
class StepDecision:
    """The decision about a step. Flags are tensors on the device, or bools on the host."""

    skip: Any
    overflow: Any
    flags: tuple[Any, ...]
    """One flag per step rule, one for the optimizer's settings, then one per notice."""
    loss: Scalar | None
    grad_norm: Scalar
    nonfinite: Scalar
    clip_factor: Scalar
    loss_scale: Scalar
    statistics: TensorStatistics
    """The norm of the unscaled gradients."""
    divide: Tensor | None
    """The divisor that the gradients still need, without an outer loss scale."""
    factor: Tensor | None
    """The clipper's factor, one for all or per tensor."""

    def packed(self) -> Tensor:
        """All numbers of the step in one vector on the device, for one copy."""
        scalars = [self.skip, self.overflow, *self.flags, *(getattr(self, name) for name in self.head)]
        device = self.statistics.norm.device
        numbers = [value if isinstance(value, Tensor) else torch.full((), value, device=device) for value in scalars]
        parts = [torch.stack([number.to(torch.float32) for number in numbers]), *self.statistics.columns()]
        return torch.cat(parts).float()

    @property
    def head(self) -> tuple[str, ...]:
        """The scalars that were measured."""
        return tuple(name for name in _HEAD if getattr(self, name) is not None)


class StepPolicyState(TypedDict):
    """The stored state of a `StepPolicy`."""

    settings: dict[str, str]
    """The settings of the parts."""
    rules: Packed
    setback: Packed
    lost_progress: Packed
    clip: Packed
    scaler: Packed
    grad_scaler: GradScalerState | None
    """The state of the user's own `GradScaler`."""


class StepPolicy:
    """Step rules, the two rules for recovery, clipper and loss scaler, each with its state."""

    def __init__(
        self,
        rules: Combined | None,
        setback: Detector | None,
        clipper: Clipper | None,
        scaler: LossScaler | None,
        *,
        count: int,
        home: torch.device,
        on_device: bool,
        lost_progress: Detector | None = None,
    ) -> None:
        """Start with fresh states.

        Args:
            rules: the rules that may refuse a step.
            setback: detects for recovery, from single losses, that the model has lost much of its progress.
            clipper: limits the gradients.
            scaler: scales the loss.
            count: the number of parameters of the optimizer.
            home: the device of the first parameter.
            on_device: whether states are tensors on that device, rather than floats.
            lost_progress: detects the same from mean losses.
        """
        self.rules, self.setback, self.lost_progress = rules, setback, lost_progress
        self.clipper, self.scaler = clipper, scaler
        self.home, self.on_device = home, on_device
        self.count = count
        """The number of parameters of the optimizer."""
        self.rules_state = self._placed(rules.init()) if rules else ()
        self.setback_state = self._placed(_initial(setback))
        self.lost_progress_state = self._placed(_initial(lost_progress))
        self.clip_state = self._fresh_clip_state()
        with home:
            self.scale_state = to_device(scaler.init(), home) if scaler else ()

    def _fresh_clip_state(self) -> Any:
        """A new state in fp32 on the model's device, regardless of torch's defaults."""
        with self.home:
            return to_device(self.clipper.init(self.count), self.home) if self.clipper else ()

    def _placed(self, state: Any) -> Any:
        return to_device(state, self.home) if self.on_device else state

    def grow(self, count: int) -> None:
        """Make room for parameters that were appended; their history is empty."""
        self.count = count
        self.clip_state = grown(self.clip_state, self._fresh_clip_state())

    @property
    def states(self) -> tuple[Any, Any, Any, Any, Any]:
        """The states of the rules, the two rules for recovery, the clipper and the scaler."""
        return self.rules_state, self.setback_state, self.lost_progress_state, self.clip_state, self.scale_state

    @states.setter
    def states(self, states: tuple[Any, Any, Any, Any, Any]) -> None:
        self.rules_state, self.setback_state, self.lost_progress_state, self.clip_state, self.scale_state = states

    def live_states(self) -> list[Any]:
        """The states of the parts, and the tensors of a `GradScaler` of the user."""
        scaler = self.scaler
        own = [scaler.scaler._scale, scaler.scaler._growth_tracker] if isinstance(scaler, TorchLossScaler) else []
        return [self.states, own]

    def put_back(self, saved: list[Any]) -> None:
        """Restore copies of `live_states`; tensors are written in place, as a recorded CUDA graph requires."""
        states, own = saved
        live = leaves(self.states)
        for now, then in zip([*live, *self.live_states()[1]], [*leaves(states), *own], strict=True):
            now.copy_(then)
        self.states = with_leaves(states, iter(live))

    def restart_levels(self) -> None:
        """The data has changed: the two rules for recovery start again, and judge by the losses from now on."""
        fresh = self._placed((_initial(self.setback), _initial(self.lost_progress)))
        live = leaves((self.setback_state, self.lost_progress_state))
        if self.on_device:  # in place, as a recorded CUDA graph requires
            for now, then in zip(live, leaves(fresh), strict=True):
                now.copy_(then)
            return
        self.setback_state, self.lost_progress_state = fresh

    def loss_scale(self) -> Tensor | None:
        """The factor for the loss before backward."""
        return self.scaler.scale_of(self.scale_state) if self.scaler else None

    def set_loss_scale(self, used: float, saved: Any) -> None:
        """Continue with a recorded loss scale; `saved` is the packed state of the scaler, if it had one."""
        if self.scaler is None:
            return
        if saved:
            self.scale_state = unpack(self.scaler.init(), saved)
        self.scaler.scale_of(self.scale_state).fill_(used)

    def settings(self) -> dict[str, str]:
        """The settings of the parts, which decide whether a saved state still fits."""
        parts = {
            "rules": self.rules,
            "setback": self.setback,
            "lost_progress": self.lost_progress,
            "clip": self.clipper,
            "scaler": self.scaler,
        }
        return {name: settings_of(part) for name, part in parts.items()}

    def state_dict(self, live: bool = False) -> StepPolicyState:
        """The states of the parts as tensors and plain values; with `live`, tensors are not copied."""
        return {
            "settings": self.settings(),
            "rules": pack(self.rules_state, live),
            "setback": pack(self.setback_state, live),
            "lost_progress": pack(self.lost_progress_state, live),
            "clip": pack(self.clip_state, live),
            "scaler": pack(self.scale_state, live),
            "grad_scaler": self.scaler.state(live) if isinstance(self.scaler, TorchLossScaler) else None,
        }

    def load_state_dict(self, state: StepPolicyState) -> None:
        """Continue from a saved state. A part whose settings have changed starts again."""
        same = {part: state["settings"].get(part) == now for part, now in self.settings().items()}
        log_changed_parts(state["settings"], self.settings())
        if self.rules and same["rules"]:
            self.rules_state = self._placed(unpack(self.rules.init(), state["rules"]))
        if self.setback and same["setback"]:
            self.setback_state = self._placed(unpack(self.setback.init(), state["setback"]))
        if self.lost_progress and same["lost_progress"]:
            self.lost_progress_state = self._placed(unpack(self.lost_progress.init(), state["lost_progress"]))
        if self.clipper and same["clip"]:
            fresh = self._fresh_clip_state()
            loaded = to_device(unpack(fresh, state["clip"]), self.home)
            fits = [part.shape for part in leaves(loaded)] == [part.shape for part in leaves(fresh)]
            self.clip_state = loaded if fits else fresh  # a history per tensor is only useful for the same tensors
        if self.scaler and same["scaler"]:
            self.scale_state = to_device(unpack(self.scaler.init(), state["scaler"]), self.home)
        if isinstance(self.scaler, TorchLossScaler) and state["grad_scaler"] is not None:
            self.scaler.load(state["grad_scaler"])


def _initial(rule: Detector | None) -> Any:
    return rule.init() if rule is not None else ()


class StepDecider:
    """Decides steps in order, and advances the policy's states."""

    def __init__(
        self, policy: StepPolicy, group: dist.ProcessGroup | None, replicas: ReplicaCheck | None = None
    ) -> None:
        self.policy, self.group, self._replicas = policy, group, replicas
        self._home, self._tensors = policy.home, policy.on_device
        self.rule_names: tuple[str, ...] = ()
        """The names of the rules that may refuse a step, in the order of the flags, from the last step's verdicts."""
        self.notice_names = (*self._recovery_rules(), *(["stop"] if group is not None else []))
        """The names of the flags after those: they refuse nothing, but are shared with all ranks."""
        self.stop_wanted = False
        """Whether this rank was requested to stop."""

    def decide(
        self, given: StepInput, reshape: Callable[[Tensor | None], TensorStatistics] | None = None
    ) -> StepDecision:
        """Advance everything by one step.

        `reshape` changes the gradients in place between the step rules and the clipper. It gets the divisor that must
        be applied first, and the clipper uses the statistics that it returns.
        """
        divide, outer_scale = self._divide_by(given.divisor), given.outer.scale
        unscale = outer_scale if divide is None else divide if outer_scale is None else divide * outer_scale
        statistics = given.statistics
        if not isinstance(statistics, TensorStatistics):
            statistics = statistics.measure()
        if unscale is not None:
            statistics = statistics.rescaled(1 / unscale)
        clipped = None if given.clipped is None else _known_factor(given.clipped)
        if clipped is not None:
            statistics = statistics.rescaled(1 / clipped)
        signals = self._signals(given, statistics)
        skip, overflow, flags = self._verdict(signals, given)
        seen = statistics
        if reshape is not None and (self._tensors or not skip):  # refused gradients stay unchanged
            seen, divide = reshape(unscale), None
        factor = self._clip(seen, given.positions, skip)
        smallest: Scalar = 1.0 if factor is None else factor.min()
        if factor is None and clipped is not None:
            smallest = clipped
        used = self._advance_scale(overflow, outer_scale if given.outer.is_loss_scale else None)
        if not self._tensors:
            smallest, used = float(smallest), float(used)
        return StepDecision(
            skip,
            overflow,
            flags,
            signals.loss,
            signals.grad_norm,  # type: ignore[arg-type]
            signals.nonfinite,  # type: ignore[arg-type]
            smallest,
            used,
            statistics,
            divide,
            factor,
        )

    def _divide_by(self, divisor: Scalar) -> Tensor | None:
        """The loss scale times the divisor of accumulation; `None` if that is 1."""
        scale = self.policy.loss_scale()
        if scale is not None:
            return scale * divisor
        if isinstance(divisor, Tensor):
            return divisor.to(self._home)  # in float64 for a model in float64
        return None if divisor == 1 else torch.full((), divisor, dtype=torch.float32, device=self._home)

    def _signals(self, given: StepInput, statistics: TensorStatistics) -> Signals:
        total, broken = total_norm(statistics.norm), statistics.nonfinite.sum()
        if given.was_broken is not None:  # count at least one non-finite entry
            broken = torch.maximum(broken, given.was_broken.to(broken.dtype))
        if self._tensors:
            loss = None if given.loss is None else given.loss.to(self._home)
            return Signals(given.step, loss, total, broken, extra=given.own, param_norm=given.param_norm)
        own = {name: float(value) for name, value in given.own.items()}
        loss_now = None if given.loss is None else float(given.loss)
        return Signals(given.step, loss_now, float(total), float(broken), extra=own, param_norm=float(given.param_norm))

    def _verdict(self, signals: Signals, given: StepInput) -> tuple[Any, Any, tuple[Any, ...]]:
        """Apply the step rules and let the ranks agree: skip, overflow, and a flag per rule and notice."""
        flags: list[Any] = []
        before: tuple[Any, ...] = self.policy.rules_state
        self.rule_names = (BROKEN_SETTING,)
        if self.policy.rules is not None:
            self.policy.rules_state, verdict = self.policy.rules.update(self.policy.rules_state, signals)
            flags = [part.anomalous for part in verdict.parts]
            self.rule_names = (*(part.detector for part in verdict.parts), BROKEN_SETTING)
        overflow = self._overflow(signals, given.outer)
        flags, notices, overflow = self._agree([*flags, given.broken_setting > 0], overflow, signals)
        skip = overflow | self.left_out_by(given.outer)
        for flag in flags:
            skip = skip | flag
        if self._tensors or skip:  # a step refused by one rule must not enter the baselines of the others
            self.policy.rules_state = tuple(
                choose(skip > flag, old, new)  # refused, but not by this rule
                for flag, old, new in zip(flags[:-1], before, self.policy.rules_state, strict=True)
            )
        return skip, overflow, (*flags, *notices)

    def left_out_by(self, outer: OuterScaling) -> Any:
        """Whether other code has already decided that the step is skipped."""
        if outer.found_inf is None:
            return False
        return outer.found_inf > 0 if self._tensors else bool(outer.found_inf > 0)

    def _recovery_rules(self) -> dict[str, Detector]:
        """The rules for the recovery, which refuse nothing, by name."""
        rules = {"setback": self.policy.setback, "lost_progress": self.policy.lost_progress}
        return {name: rule for name, rule in rules.items() if rule is not None}

    def _recovery_notices(self, signals: Signals) -> list[Any]:
        """The verdict of each of these rules on the step."""
        notices = []
        for name, rule in self._recovery_rules().items():
            state, verdict = rule.update(getattr(self.policy, f"{name}_state"), signals)
            setattr(self.policy, f"{name}_state", state)
            notices.append(verdict.anomalous)
        return notices

    def _overflow(self, signals: Signals, outer: OuterScaling) -> Any:
        overflow: Any = signals.nonfinite > 0  # type: ignore[operator]
        if self.policy.scaler is None and (outer.scale is None or not outer.is_loss_scale):
            overflow = overflow & False  # the gradients are not scaled: a smaller scale would not help
        if self.policy.scaler is not None or outer.is_loss_scale:
            overflow = overflow | self.left_out_by(outer)
        if signals.loss is not None:  # a smaller scale would not cure a broken loss
            overflow = overflow & (abs(signals.loss) < torch.inf)  # type: ignore[operator]
        return overflow

    def _agree(self, flags: list[Any], overflow: Any, signals: Signals) -> tuple[list[Any], list[Any], Any]:
        """Flags and overflow, true if they are on any rank, and the notices between them."""
        if self.group is None:
            return flags, self._recovery_notices(signals), overflow
        # With many ranks one always has a difficult batch: the mean loss shows whether the model has lost progress.
        alone = [] if self._averages_loss else self._recovery_notices(signals)
        shared_flags = [*flags, overflow, *alone, self.stop_wanted]
        replica = self._replicas.numbers(signals.step) if self._replicas is not None else None
        shared, mean = agree_and_average(shared_flags, signals.loss, self._home, self.group, replica)
        if self._replicas is not None and replica is not None:
            self._replicas.take(signals.step, replica)
        agreed, loss = (list(shared.unbind()), mean) if self._tensors else (shared.tolist(), float(mean))
        count = len(flags)
        together = self._recovery_notices(replace(signals, loss=loss)) if self._averages_loss else []
        return agreed[:count], [*together, *agreed[count + 1 :]], agreed[count]

    @property
    def _averages_loss(self) -> bool:
        """Whether the rules for recovery read only the mean loss, so that their result is equal on every rank."""
        rules = self._recovery_rules().values()
        return all(isinstance(rule, Setback | LostProgress) and rule.signal == "loss" for rule in rules)

    def _clip(self, statistics: TensorStatistics, positions: Tensor | None, skip: Any) -> Tensor | None:
        """The clipper's factor. A refused step does not enter its history."""
        if self.policy.clipper is None:
            return None
        each = statistics.norm
        if positions is not None:
            each = each.new_zeros(self.policy.count).index_copy(0, positions, each)
        state, factor = self.policy.clipper.update(
            self.policy.clip_state, GradientNorms(total_norm(statistics.norm), each)
        )
        if self._tensors or skip:
            state = choose(skip, self.policy.clip_state, state)
        self.policy.clip_state = state
        return factor if positions is None or factor.ndim == 0 else factor[positions]

    def _advance_scale(self, overflow: Any, outer_scale: Tensor | None) -> Scalar:
        """Update the loss scale; returns the one that this step used."""
        if self.policy.scaler is None:
            return 1.0 if outer_scale is None else outer_scale.clone()
        policy, scaler = self.policy, self.policy.scaler
        used = scaler.scale_of(policy.scale_state).clone()
        policy.scale_state = scaler.update(policy.scale_state, torch.as_tensor(overflow, device=self._home))
        return used


def _known_factor(factor: Tensor) -> Tensor:
    """The factor by which gradients were multiplied; 1 if they cannot be divided by it. Reads nothing."""
    inverse = (1 / factor).to(torch.float32)
    return torch.where(torch.isfinite(inverse) & (inverse > 0), factor, 1.0)


# ---- bringing the result to the host --------------------------------------------------------------------------------


class LayerNames(NamedTuple):
    """The names and numbers of dimensions of the parameters that had a gradient. Keeps no parameter alive."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, named: Sequence[NamedParameter]) -> LayerNames:
        """Those of the given parameters."""
        return cls(tuple(name for name, _ in named), tuple(parameter.ndim for _, parameter in named))


class StepNumbers:
    """The result of one step, read on demand, once."""

    def __init__(
        self, source: StepRecord | ArrivingNumbers, on_arrival: Callable[[StepRecord], None] | None = None
    ) -> None:
        self._source, self._on_arrival = source, on_arrival

    def record(self) -> StepRecord:
        """The record on the host. Waits for the device if the numbers have not arrived."""
        if not isinstance(self._source, StepRecord):
            self._source = self._source.record()
            told, self._on_arrival = self._on_arrival, None
            if told is not None:
                told(self._source)
        return self._source


def record_on_host(
    decision: StepDecision,
    rules: Sequence[str],
    notices: Sequence[str],
    named: LayerNames,
    watched: Mapping[str, Tensor],
    settings: SettingsOfStep,
    **facts: Any,
) -> StepRecord:
    """The record of a step that was decided on the host."""
    layers = _layers(named, *decision.statistics, **watched)
    numbers = {name: getattr(decision, name) for name in decision.head}
    signals = Signals(layers=layers, **numbers, **facts)
    return _record(signals, decision.skip, decision.overflow, rules, notices, decision.flags, settings.all_broken(()))


class ArrivingNumbers:
    """A step that was decided on the device, whose numbers are being copied."""

    def __init__(
        self,
        decision: StepDecision,
        vector: Tensor,
        rules: Sequence[str],
        notices: Sequence[str],
        named: LayerNames,
        watched: Mapping[str, Tensor],
        own: Mapping[str, Scalar],
        settings: SettingsOfStep,
        **facts: Any,
    ) -> None:
        self._head, self._flag_count = decision.head, len(decision.flags)
        self._rules, self._notices = rules, notices
        self._named, self._watched, self._facts = named, tuple(watched), facts
        self._own_floats = {name: value for name, value in own.items() if not isinstance(value, Tensor)}
        self._own_tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        self._settings = settings
        parts = [vector, *(column.to(vector) for column in watched.values())]
        parts += [value.to(vector).reshape(1) for value in self._own_tensors.values()]
        parts += [] if settings.values is None else [settings.values.to(vector)]
        self._reading: AsyncCopy = begin_reading(vector if len(parts) == 1 else torch.cat(parts))

    def record(self) -> StepRecord:
        """Wait for the numbers and build the record."""
        vector = self._reading.wait()
        scalar_count = 2 + self._flag_count + len(self._head)
        columns, count = 3 + len(self._watched), len(self._named.names)
        sizes = scalar_count, columns * count, len(vector) - scalar_count - columns * count
        scalars, table, rest = torch.split_with_sizes(vector, sizes)
        skip, overflow, *known = scalars.tolist()
        flags, numbers = known[: self._flag_count], known[self._flag_count :]
        own, own_count, values = self._own_floats, len(self._own_tensors), rest.tolist() if len(rest) else []
        if own_count:
            own = own | dict(zip(self._own_tensors, values[:own_count], strict=True))
        settings = self._settings.all_broken(values[own_count:])
        norm, largest, nonfinite, *watched = table.view(columns, count).unbind(0)
        layers = _layers(self._named, norm, largest, nonfinite, **dict(zip(self._watched, watched, strict=True)))
        signals = Signals(layers=layers, **dict(zip(self._head, numbers, strict=True)), extra=own, **self._facts)
        return _record(signals, skip > 0, overflow > 0, self._rules, self._notices, flags, settings)


def _record(
    signals: Signals,
    skip: Any,
    overflow: Any,
    rules: Sequence[str],
    notices: Sequence[str],
    flags: Sequence[Any],
    settings: tuple[OptimizerSetting, ...],
) -> StepRecord:
    reasons = tuple(name for name, flag in zip(rules, flags[: len(rules)], strict=True) if flag)
    raised = tuple(name for name, flag in zip(notices, flags[len(rules) :], strict=True) if flag)
    return StepRecord(signals, bool(skip), reasons, bool(overflow), raised, settings)


def _layers(named: LayerNames, norm: Tensor, largest: Tensor | None, nonfinite: Tensor, **more: Any) -> LayerStats:
    return LayerStats(*named, norm, largest, nonfinite, **more)
