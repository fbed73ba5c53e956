"""`TrainingStabilizer`: everything between `loss.backward()` and `optimizer.step()`, in the user's own loop.

The one stateful shell, and the one file that knows every stage:

    tensors ─observe─▶ Signals ─detect─▶ Verdict ─decide─▶ Decision ─act─▶ Outcome

Each step the gradients are measured in one pass, judged, clipped, and applied or left out. On a GPU with a fused
optimizer all of that stays on the device: the host reads the step's numbers `lag_steps` later. On a CPU, where reading
is free, the host decides at once. An optimizer that is not fused costs one scalar sync a step on a GPU.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from surefoot.act.accumulate import AccumulationWindow
from surefoot.act.apply import can_fold, folded_step, lacks_momentum, scale_gradients, scaled_lr
from surefoot.act.closure import ClosureRefused, StepCopy
from surefoot.act.loss_scale import TorchLossScaler
from surefoot.decide.agreement import add_up, agree, average_gradients, find_group, set_gradient_sync
from surefoot.decide.escalation import Escalation
from surefoot.detect.checker import StabilityChecker
from surefoot.detect.combine import Combined
from surefoot.errors import TrainingHalted, UsageError, require
from surefoot.ledger import Ledger
from surefoot.numbers import Judgement, StepNumbers, collect, layers_of
from surefoot.observe.layout import Layout
from surefoot.observe.parameters import BackwardOrder
from surefoot.observe.seal import GradientSeal
from surefoot.observe.shards import combine_shards
from surefoot.observe.tensors import TensorMeter, TensorStatistics, dense_view, total_norm
from surefoot.observe.watch import UpdateMeter, Watch
from surefoot.settings import as_scaler, check_loss, check_settings, split_clip
from surefoot.state import choose, on_device, pack, pack_record, unpack, unpack_record
from surefoot.types import GradientNorms, Incident, Outcome, Scalar, Signals, StepRecord, format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from surefoot.act.clip import Clipper
    from surefoot.act.loss_scale import LossScaler
    from surefoot.act.shape import Shaper
    from surefoot.settings import Precision
    from surefoot.types import NamedParameter

_AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCHEMA = 1


class TrainingStabilizer:
    """Watches and protects a training loop: clip, skip, scale, accumulate, and say what happened.

    >>> import torch, surefoot as sf
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> stabilizer = sf.TrainingStabilizer(model, optimizer, clip=sf.ClipByNorm(1.0))
    >>> loss = model(torch.randn(8, 4)).square().mean()
    >>> stabilizer.backward(loss)
    >>> stabilizer.step().applied
    True
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        scheduler: Any = None,
        clip: Clipper | Shaper | Sequence[Clipper | Shaper] | None = None,
        precision: Precision | None = None,
        scaler: LossScaler | torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        checker: StabilityChecker | None = None,
        escalation: Escalation | None = Escalation(),  # noqa: B008 (frozen)
        watch: Watch = Watch(),  # noqa: B008 (frozen)
        decide_on: Literal["auto", "host", "device"] = "auto",
        lag_steps: int = 4,
        zero_grad: bool = True,
    ) -> None:
        """Set the stabilizer beside a loop.

        Args:
            model: the module the optimizer trains, or several.
            optimizer: any torch optimizer. Fused Adam, AdamW, SGD and Adagrad need no host sync.
            scheduler: stepped once per optimizer step, skipped ones included: the schedule follows the data.
            clip: a clipper, or shapers followed by a clipper.
            precision: what `autocast()` runs in; `"fp16"` brings a `DynamicLossScaler`. `None`: `autocast()` does
                nothing.
            scaler: loss scaling for fp16, ours or a `torch.amp.GradScaler` to drive.
            accumulate: microbatches per optimizer step.
            checker: the detectors and their thresholds.
            escalation: budgets for what is done about refused steps; `None` goes on skipping for ever.
            watch: what to measure beyond the gradients.
            decide_on: where a step is decided. `"host"` reads its numbers at once; `"device"` reads none until
                `lag_steps` later. `"auto"`: host on a CPU, device elsewhere.
            lag_steps: how many steps later the host looks at a step that was decided on the device.
            zero_grad: set gradients to `None` after each step.
        """
        models = [model] if isinstance(model, nn.Module) else list(model)
        check_settings(models, optimizer, scheduler, precision, scaler, accumulate, lag_steps)
        self.optimizer, self.scheduler = optimizer, scheduler
        self._models = models
        self._layout = Layout(models, optimizer)
        require(
            self._layout.known > 0,
            f"the optimizer's {len(self._layout.parameters)} parameters are none of the model's: "
            "it would train nothing of it. Build the optimizer from `model.parameters()`.",
        )
        self._home = self._layout.home
        self._on_device = decide_on == "device" or (decide_on == "auto" and self._home.type != "cpu")
        self._lag_steps = lag_steps if self._on_device else 0
        self._precision, self._watch, self._zero_grad = precision, watch, zero_grad
        self._group = find_group(models)
        self._window = AccumulationWindow(accumulate, across_ranks=self._group is not None)
        self._shapers, self._clipper = split_clip(clip)
        self._scaler = as_scaler(scaler, precision, self._home)
        self._checker = checker or StabilityChecker()
        rules = self._checker.step_rules
        self._rules = Combined(rules, "any") if rules else None
        self._meter = TensorMeter()
        self._order = BackwardOrder(self._layout.parameters)
        self._ledger = Ledger(
            self._checker, escalation, self._scaler.floor if self._scaler else None, self._order.first
        )
        self._rules_state = self._placed(self._rules.init()) if self._rules else ()
        self._clip_state = self._placed(self._clipper.init(len(self._layout.parameters))) if self._clipper else ()
        self._scale_state = on_device(self._scaler.init(), self._home) if self._scaler else ()
        self._lr_factor = 1.0
        self._steps = 0
        self._own_signals: dict[str, Scalar] = {}
        self._seal: GradientSeal | None = None
        self._pending: deque[StepNumbers] = deque()
        self._announce_gradient_sync()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """Run the forward pass in the chosen precision."""
        dtype = _AUTOCAST.get(self._precision or "")
        return nullcontext() if dtype is None else torch.autocast(self._home.type, dtype=dtype)

    def backward(self, loss: Tensor, *, weight: Scalar | None = None, **options: Any) -> None:
        """Run backward on one microbatch, scaled for precision and accumulation.

        Args:
            loss: a scalar, the mean over the microbatch.
            weight: how many rows or tokens it is the mean over, when microbatches are uneven.
            options: passed on to `torch.Tensor.backward`, such as `retain_graph=True`.
        """
        check_loss(loss)
        scaled = self._window.add(loss, weight)
        if self._scaler is not None:
            scaled = scaled * self._scaler.scale_of(self._scale_state).to(scaled.device)
        scaled.backward(**options)  # type: ignore[no-untyped-call]
        if self._scaler is not None:
            self._seal = GradientSeal(self._layout.parameters)

    def observe(self, **signals: Scalar) -> None:
        """Watch signals of your own with this step: `stabilizer.observe(kl=kl, entropy=entropy)`."""
        for name, value in signals.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UsageError(f"signal {name!r} must be one number; got a tensor of shape {tuple(value.shape)}.")
            self._own_signals[name] = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Outcome:
        """Close a microbatch; with the last one of a window, judge the gradients and apply them or not.

        Raises `TrainingHalted` when every attempt to go on is used up.
        """
        if closure is not None:
            return self._closure_step(closure)
        if self._window.count == 0 and (self._scaler is not None or self._window.length > 1):
            raise UsageError(
                "`step()` came without a `backward()` since the last one. With loss scaling or accumulation the loss "
                "must go through `stabilizer.backward(loss)`, not `loss.backward()`."
            )
        if self._window.count and not self._window.full:
            self._announce_gradient_sync()
            return Outcome(self._steps, None)
        return self._finish_window()

    def flush(self) -> Outcome | None:
        """Step on a window that ended early, at the end of an epoch; `None` if there is nothing to step on."""
        if self._window.count == 0:
            return None
        if not self._window.full:
            average_gradients([dense_view(g) for g in self._layout.with_gradient()[1]], self._group)
        return self._finish_window()

    # ---- what happened --------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._steps

    @property
    def incidents(self) -> list[Incident]:
        """What a person should know about, oldest first; the last 200. Waits for numbers still on their way."""
        self._drain()
        return list(self._ledger.incidents)

    @property
    def history(self) -> list[StepRecord]:
        """The last 1,000 steps, oldest first. Waits for numbers still on their way."""
        self._drain()
        return list(self._ledger.history)

    @property
    def counts(self) -> dict[str, int]:
        """Steps, applied, skipped, clipped, overflows, alarms. Waits for numbers still on their way."""
        self._drain()
        return dict(self._ledger.counts)

    def summary(self) -> str:
        """A few lines a person can read: counts, the last incidents, the largest gradients of the last step."""
        lines = [", ".join(f"{count:,} {name}" for name, count in self.counts.items())]
        lines += [str(incident) for incident in self.incidents[-5:]]
        layers = self.history[-1].signals.layers if self.history else None
        if layers is not None:
            rows = sorted(layers.rows(), key=lambda row: (-row["nonfinite"], -row["grad_norm"]))
            lines += ["", format_table(rows[:10])]
        return "\n".join(lines)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything of the stabilizer's own: tensors and plain values, no pickle needed.

        Model, optimizer and scheduler are the user's and saved as ever. Save between optimizer steps: gradients of a
        window that is under way are not part of it.
        """
        scaler = self._scaler.scaler.state_dict() if isinstance(self._scaler, TorchLossScaler) else None
        return {
            "schema": SCHEMA,
            "settings": self._settings(),
            "steps": self._steps,
            "lr_factor": self._lr_factor,
            "rules": pack(self._rules_state),
            "clip": pack(self._clip_state),
            "scale": pack(self._scale_state),
            "grad_scaler": scaler,
            "ledger": self._ledger.state_dict(),
            "pending": [pack_record(numbers.record()) for numbers in self._pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved stabilizer stopped. A part whose settings have changed starts anew."""
        require(
            state.get("schema") == SCHEMA,
            f"the state has schema {state.get('schema')!r}; this version of surefoot reads schema {SCHEMA}.",
        )
        same = {part: state["settings"].get(part) == now for part, now in self._settings().items()}
        self._steps, self._lr_factor = state["steps"], state["lr_factor"]
        if self._rules and same["rules"]:
            self._rules_state = self._placed(unpack(self._rules.init(), state["rules"]))
        if self._clipper and same["clip"]:
            fresh = self._clipper.init(len(self._layout.parameters))
            self._clip_state = self._placed(unpack(fresh, state["clip"]))
        if isinstance(self._scaler, TorchLossScaler) and state["grad_scaler"] is not None:
            self._scaler.scaler.load_state_dict(state["grad_scaler"])
        elif self._scaler and same["scaler"]:
            self._scale_state = on_device(unpack(self._scaler.init(), state["scale"]), self._home)
        if same["look_back"] and same["escalation"]:
            self._ledger.load_state_dict(state["ledger"])
        self._pending = deque(StepNumbers(unpack_record(packed)) for packed in state["pending"])
        self._window = self._window.cleared()
        self._announce_gradient_sync()

    def _settings(self) -> dict[str, str]:
        return {
            "rules": repr(self._checker.step_rules),
            "clip": repr(self._clipper),
            "scaler": repr(self._scaler),
            "look_back": repr(self._checker.look_back),
            "escalation": repr(self._ledger.escalation),
        }

    # ---- one optimizer step ---------------------------------------------------------------------------------------

    def _placed(self, state: Any) -> Any:
        """A state where it will be used: on the device if steps are decided there."""
        return on_device(state, self._home) if self._on_device else state

    def _announce_gradient_sync(self) -> None:
        """Under DDP and FSDP2, only the last microbatch of a window averages gradients over ranks."""
        if self._window.length > 1:
            set_gradient_sync(self._models, self._window.count == self._window.length - 1)

    @torch.no_grad()
    def _finish_window(self) -> Outcome:
        self._layout.refresh()
        named, gradients = self._layout.with_gradient()
        numbers = self._guarded_step(named, gradients) if gradients else self._empty_step()
        if self._zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
        return self._close_step(numbers)

    def _close_step(self, numbers: StepNumbers) -> Outcome:
        outcome = Outcome(self._steps, numbers.record)
        if self.scheduler is not None:
            self.optimizer._opt_called = True  # a skipped first step is no reason for torch's order warning
            self.scheduler.step()
        self._order.stop()
        self._steps += 1
        self._window, self._own_signals, self._seal = self._window.cleared(), {}, None
        self._announce_gradient_sync()
        self._pending.append(numbers)
        while len(self._pending) > self._lag_steps:
            self._account(self._pending.popleft())
        return outcome

    def _drain(self) -> None:
        """Wait for every step's numbers."""
        while self._pending:
            self._account(self._pending.popleft())

    def _account(self, numbers: StepNumbers) -> None:
        decision = self._ledger.account(numbers.record())
        self._lr_factor = decision.lr_factor
        if decision.action == "halt":
            incident = self._ledger.incidents[-1]
            raise TrainingHalted(
                f"halted at step {incident.step} after every attempt to go on: {decision.reason}. "
                "The weights are those of the last healthy step. See `.incident` on this error; "
                "`escalation=None` goes on skipping instead.",
                incident,
            )

    def _empty_step(self) -> StepNumbers:
        """No parameter has a gradient: do what the bare loop does, and say so."""
        signals = Signals(self._steps, lr=self._lr())
        if "optim.no-gradient" not in self._ledger.by_kind:
            self._ledger.note(signals, "optim.no-gradient", "warning", "no parameter of the optimizer has a gradient")
        self.optimizer.step()
        return collect(signals, Judgement(False, False, (), ()))

    def _guarded_step(self, named: list[NamedParameter], gradients: list[Tensor]) -> StepNumbers:
        """Measure, judge, clip, and apply or leave out."""
        views = [dense_view(gradient) for gradient in gradients]
        divide = self._divide_by()
        measured = combine_shards(self._meter.measure(gradients), gradients)
        statistics = measured if divide is None else measured.rescaled(1 / divide)
        signals = self._signals(statistics)
        judged = self._judge(signals)
        if self._shapers:
            named, divide, statistics = self._shape(named, gradients, views, divide, statistics)
        factor = self._clip(statistics, judged.skip)
        updates = UpdateMeter(self._watch, named) if self._watch.due(self._steps) else None
        with scaled_lr(self.optimizer, self._lr_factor):
            self._apply(views, divide, factor, judged.skip)
        loss_scale = self._update_scale(signals, judged)
        layers = layers_of(
            named,
            *statistics,
            param_norm=updates.param_norm if updates else None,
            update_norm=updates.update_norm() if updates else None,
        )
        clip_factor: Scalar = 1.0 if factor is None else factor.min()
        if signals.device is None and isinstance(clip_factor, Tensor):
            clip_factor = float(clip_factor)
        return collect(replace(signals, layers=layers, clip_factor=clip_factor, loss_scale=loss_scale), judged)

    def _divide_by(self) -> Tensor | None:
        """What the gradients still have to be divided by: loss scale times what accumulation left over."""
        divisor = self._window.divisor
        if self._window.weighted and self._group is not None:
            total = torch.as_tensor(divisor, dtype=torch.float32, device=self._home)
            divisor = add_up(total, self._group) / torch.distributed.get_world_size(self._group)
        if self._scaler is not None:
            return self._scaler.scale_of(self._scale_state) * divisor
        if isinstance(divisor, Tensor):
            return divisor.to(self._home, torch.float32)
        return None if divisor == 1 else torch.full((), divisor, device=self._home)

    def _signals(self, statistics: TensorStatistics) -> Signals:
        loss, total, broken = self._window.mean_loss, total_norm(statistics.norm), statistics.nonfinite.sum()
        own = dict(self._own_signals)
        if self._on_device:
            loss = None if loss is None else loss.to(self._home)
            return Signals(self._steps, loss, total, broken, lr=self._lr(), extra=own)
        own = {name: float(value) for name, value in own.items()}
        known_loss = None if loss is None else float(loss)
        return Signals(self._steps, known_loss, float(total), float(broken), lr=self._lr(), extra=own)

    def _lr(self) -> float | None:
        lr = self.optimizer.param_groups[0].get("lr")
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            return None
        return None if lr is None else float(lr) * self._lr_factor

    def _judge(self, signals: Signals) -> Judgement:
        """Let the step rules judge, and let the ranks agree."""
        flags: list[Any] = []
        if self._rules is not None:
            self._rules_state, verdict = self._rules.update(self._rules_state, signals)
            flags = [part.anomalous for part in verdict.parts]
        rules = tuple(part.detector for part in verdict.parts) if flags else ()
        broken = signals.nonfinite > 0  # type: ignore[operator]
        sound_loss: Any = True if signals.loss is None else abs(signals.loss) < torch.inf  # type: ignore[operator]
        overflow = broken & sound_loss if self._scaler is not None else broken & False
        if self._group is not None or self._on_device:
            stacked = torch.stack([torch.as_tensor(flag, device=self._home) for flag in [*flags, overflow]])
            stacked = agree(stacked, self._group)
            *flags, overflow = stacked.unbind() if self._on_device else stacked.tolist()
        skip = overflow
        for flag in flags:
            skip = skip | flag
        return Judgement(skip, overflow, flags, rules)

    def _shape(
        self,
        named: list[NamedParameter],
        gradients: list[Tensor],
        views: list[Tensor],
        divide: Tensor | None,
        statistics: TensorStatistics,
    ) -> tuple[list[NamedParameter], None, TensorStatistics]:
        """Change the gradients in place, unscaled; a clipper that follows sees what came of it."""
        if divide is not None:
            scale_gradients(views, 1 / divide)
        for shaper in self._shapers:
            shaper.shape(named)
        if self._clipper is not None:
            statistics = combine_shards(self._meter.measure(gradients), gradients)
        return named, None, statistics

    def _clip(self, statistics: TensorStatistics, skip: Any) -> Tensor | None:
        """The clipper's factor. Its history does not take a refused step in."""
        if self._clipper is None:
            return None
        each, positions = statistics.norm, self._layout.positions
        if positions is not None:
            each = each.new_zeros(len(self._layout.parameters)).index_copy(0, positions, each)
        state, factor = self._clipper.update(self._clip_state, GradientNorms(total_norm(statistics.norm), each))
        self._clip_state = choose(skip, self._clip_state, state)
        return factor if positions is None or factor.ndim == 0 else factor[positions]

    def _apply(self, views: list[Tensor], divide: Tensor | None, factor: Tensor | None, skip: Any) -> None:
        self._warn_if_clipped_outside()
        if can_fold(self.optimizer) and not (self._on_device and lacks_momentum(self.optimizer)):
            if factor is not None and factor.ndim:
                scale_gradients(views, factor)
                factor = None
            grad_scale = divide if factor is None else (1 if divide is None else divide) / factor
            if self._on_device or not skip:
                folded_step(self.optimizer, grad_scale, skip if self._on_device else None)
        elif not bool(skip):
            if divide is not None:
                factor = 1 / divide if factor is None else factor / divide
            if factor is not None:
                scale_gradients(views, factor)
            self.optimizer.step()

    def _update_scale(self, signals: Signals, judged: Judgement) -> Scalar:
        """Move the loss scale on; returns the one this step was run with."""
        if self._scaler is None:
            return 1.0
        used = self._scaler.scale_of(self._scale_state).clone()
        overflow = torch.as_tensor(judged.overflow, device=self._home)
        self._scale_state = self._scaler.update(self._scale_state, overflow)
        return used if self._on_device else float(used)

    def _warn_if_clipped_outside(self) -> None:
        kind = "clip.before-unscale"
        if self._seal is not None and self._seal.broken and kind not in self._ledger.by_kind:
            self._ledger.note(
                Signals(self._steps),
                kind,
                "warning",
                "gradients were changed in place between backward() and step(), while they are still multiplied by the "
                "loss scale: a limit applied there means nothing. Pass `clip=` instead",
            )

    # ---- optimizers that evaluate the loss themselves -------------------------------------------------------------

    def _closure_step(self, closure: Callable[[], Tensor]) -> Outcome:
        """Step with a closure; a refused step leaves parameters and optimizer state as they were."""
        if self._window.length > 1 or self._scaler is not None:
            raise UsageError("a closure evaluates the loss several times a step: use accumulate=1 and no loss scaling.")
        self._layout.refresh()
        before = StepCopy(self._layout.parameters, self.optimizer)
        evaluations: list[tuple[Signals, Judgement]] = []

        def evaluate() -> Tensor:
            self._window = self._window.cleared()
            with torch.enable_grad():
                loss = closure()
            if self._window.count == 0:
                self._window.add(loss, None)
            evaluations.append(self._judge_evaluation(evaluations))
            if evaluations[0][1].skip:
                raise ClosureRefused
            return loss

        try:
            with scaled_lr(self.optimizer, self._lr_factor):
                self.optimizer.step(evaluate)
        except ClosureRefused:
            before.restore()
        if not evaluations:
            raise UsageError("the optimizer did not call the closure it was given.")
        signals, judged = evaluations[0]
        if len(evaluations) > 1 and not judged.skip and self._parameters_broken():
            before.restore()
            judged = Judgement(True, False, (*judged.flags, True), (*judged.rules, "nonfinite"))
        return self._close_step(collect(signals, judged))

    @torch.no_grad()
    def _judge_evaluation(self, earlier: Sequence[tuple[Signals, Judgement]]) -> tuple[Signals, Judgement]:
        """Judge the first evaluation of a step, and clip every one.

        Later ones are the optimizer's own search: a bad trial point is its business as long as it ends on a good one.
        """
        named, gradients = self._layout.with_gradient()
        if not gradients:
            raise UsageError("the closure left no gradient: it must call `stabilizer.backward(loss)`.")
        statistics = combine_shards(self._meter.measure(gradients), gradients)
        views = [dense_view(gradient) for gradient in gradients]
        if earlier:
            signals, judged = earlier[0]
        else:
            signals = replace(self._signals(statistics), layers=layers_of(named, *statistics))
            judged = self._judge(signals)
            judged = replace(judged, skip=bool(judged.skip))
        state = self._clip_state
        if self._shapers:
            _, _, statistics = self._shape(named, gradients, views, None, statistics)
        factor = self._clip(statistics, judged.skip)
        if factor is not None:
            scale_gradients(views, factor)
            if earlier:
                self._clip_state = state
            else:
                signals = replace(signals, clip_factor=factor.min() if self._on_device else float(factor.min()))
        return signals, judged

    def _parameters_broken(self) -> bool:
        measured = self._meter.measure([parameter for _, parameter in self._layout.parameters])
        return bool(measured.nonfinite.sum() > 0)
