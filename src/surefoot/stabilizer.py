"""`TrainingStabilizer`: everything between `loss.backward()` and `optimizer.step()`, in the user's own loop.

The one stateful shell, and the one file that knows every stage:

    tensors ─observe─▶ Signals ─detect─▶ Verdict ─decide─▶ Decision ─act─▶ Outcome

Each step the gradients are measured in one pass, judged, clipped, and applied or left out. On a GPU with a fused
optimizer all of that stays on the device: the host reads the step's numbers `lag_steps` later. On a CPU, where reading
is free, the host decides at once. An optimizer that is not fused costs one scalar sync a step on a GPU.
"""

from __future__ import annotations

import signal
from collections import deque
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.act.accumulate import AccumulationWindow
from surefoot.act.loss_scale import TorchLossScaler
from surefoot.act.microbatches import Microbatches, RowLimit, Split, Weighing
from surefoot.act.pieces import count_rows
from surefoot.decide.agreement import add_up, any_rank, average_gradients, find_group, set_gradient_sync
from surefoot.decide.apart import apart, check_can_part
from surefoot.decide.escalation import Escalation
from surefoot.decide.recovery import TrainingRecovery
from surefoot.detect.checker import StabilityChecker
from surefoot.detect.combine import Combined
from surefoot.errors import TrainingHalted, UsageError, require
from surefoot.guarded import GuardedOptimizer, StepFacts
from surefoot.judge import Judge
from surefoot.keep.buffers import BufferKeeper
from surefoot.keep.checkpoints import CheckpointManager
from surefoot.keep.restoring import as_gradient
from surefoot.keep.snapshots import TrainedState
from surefoot.keep.staging import map_tensors
from surefoot.ledger import Ledger, log
from surefoot.lifeline import Followed, Lifeline, RunParts
from surefoot.numbers import StepNumbers
from surefoot.observe.layout import Layout
from surefoot.observe.parameters import BackwardOrder
from surefoot.observe.seal import GradientSeal
from surefoot.observe.tensors import dense_views
from surefoot.observe.watch import Watch
from surefoot.settings import as_scaler, check_loss, check_settings, split_clip
from surefoot.state import pack, pack_record, unpack_record
from surefoot.types import Decision, Incident, Outcome, Scalar, Signals, StepRecord, format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from surefoot.act.clip import Clipper
    from surefoot.act.loss_scale import LossScaler
    from surefoot.act.shape import Shaper
    from surefoot.settings import Precision

_OUR_SIGNALS = frozenset(each.name for each in fields(Signals))
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
        recovery: TrainingRecovery | None = None,
        checkpoints: CheckpointManager | None = None,
        also_save: Mapping[str, Any] | None = None,
        watch: Watch | None = None,
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
            recovery: returns to earlier states when skipping does not help; `None` never returns.
            checkpoints: where and how often to save the run, and where `resume` finds it.
            also_save: whatever else belongs to the run and has `state_dict` and `load_state_dict`, by name: an average
                of the weights, the other stabilizer of a GAN.
            watch: what to measure beyond the gradients.
            decide_on: where a step is decided. `"host"` reads its numbers at once; `"device"` reads none until
                `lag_steps` later. `"auto"`: host on a CPU, device elsewhere.
            lag_steps: how many steps later the host looks at a step that was decided on the device.
            zero_grad: set gradients to `None` after each step, and before the first `backward()` of the next, since
                another model's backward may have left some (a GAN's generator does, in the discriminator).
        """
        models = [model] if isinstance(model, nn.Module) else list(model)
        parts = {
            "checker": (checker, StabilityChecker),
            "escalation": (escalation, Escalation),
            "recovery": (recovery, TrainingRecovery),
            "checkpoints": (checkpoints, CheckpointManager),
            "watch": (watch, Watch),
        }
        check_settings(models, optimizer, scheduler, precision, scaler, accumulate, lag_steps, decide_on, parts)
        self.optimizer, self.scheduler = optimizer, scheduler
        self._models = models
        self._layout = Layout(models, optimizer)
        require(
            self._layout.known > 0,
            f"the optimizer's {len(self._layout.parameters)} parameters are none of the model's: "
            "it would train nothing of it. Build the optimizer from `model.parameters()`.",
        )
        self._home = self._layout.home
        on_device = decide_on == "device" or (decide_on == "auto" and self._home.type != "cpu")
        self._lag_steps = lag_steps if on_device else 0
        self._precision, self._zero_grad = precision, zero_grad
        self._group = find_group(models)
        self._window = AccumulationWindow(accumulate, across_ranks=self._group is not None)
        self._checker = checker or StabilityChecker()
        rules = self._checker.step_rules
        shapers, clipper = split_clip(clip)
        self._judge = Judge(
            Combined(rules, "any") if rules else None,
            self._checker.setback if recovery else None,
            clipper,
            as_scaler(scaler, precision, self._home),
            count=len(self._layout.parameters),
            home=self._home,
            decides_on_device=on_device,
            group=self._group,
        )
        self._guarded = GuardedOptimizer(optimizer, self._layout, self._judge, shapers, watch, on_device)
        self._buffers = BufferKeeper(models)
        self._order = BackwardOrder(self._layout.parameters)
        floor = self._judge.scaler.floor if self._judge.scaler else None
        self._ledger = Ledger(
            self._checker,
            escalation,
            recovery,
            floor,
            self._order.first,
            self._guarded.parameters_broken,
            lambda flag: any_rank(flag, self._home, self._group),
        )
        self._lr_factor = 1.0
        self._steps = 0
        self._own_signals: dict[str, Scalar] = {}
        self._seal: GradientSeal | None = None
        self._pending: deque[StepNumbers] = deque()
        self._halted: TrainingHalted | None = None
        self._row_limit = RowLimit()
        self._microbatches: Microbatches | None = None
        self._stale_before = 0
        self._stop_agreed = False
        own = RunParts(
            models,
            optimizer,
            scheduler,
            dict(also_save or {}),
            lambda: self._own_state(live=True),
            _settled,
            self.load_state_dict,
            lambda state: self._load_rules(state["judge"]),
        )
        trained = TrainedState(models, optimizer, self._judge.live_states, self._judge.put_back)
        self._lifeline = Lifeline(own, trained, checkpoints, recovery, self._lag_steps)
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
        self._look_at_gradients()
        self._backward(loss, weight, **options)
        self._take_in(loss, weight)

    def run_microbatches(
        self, loss_fn: Callable[[Any], Tensor], batch: Any, *, weight: Callable[[Any], Scalar] | None = None
    ) -> Tensor:
        """Run one microbatch forward and backward; where memory does not suffice, in pieces, with the same gradient.

        Takes the place of the forward and of `backward(loss)`; `step()` follows as ever. Returns the loss of the whole
        batch, without its graph.

        Args:
            loss_fn: given a batch, or fewer rows of it, returns the mean loss over them. Autocast goes inside.
            batch: a tensor, or tuples, lists or mappings of tensors; the first dimension is the batch.
            weight: counts what the loss of a piece is a mean over, such as its tokens; rows if left out. With
                `accumulate` it is the microbatch's weight too, as in `backward(loss, weight=...)`.
        """
        if self._microbatches is None:
            check_can_part(self._models)
            self._microbatches = Microbatches(self._models, self._row_limit)
        average = self._window.count == self._window.length - 1
        try:
            with apart(self._models, self._group, average):
                loss, weight_of_all, split = self._run_pieces(self._microbatches, loss_fn, batch, weight)
        except Exception:
            if self._group is not None:  # all ranks failed together, and begin anew together
                self._layout.drop_gradients()
                self._window = self._window.cleared()
                self._announce_gradient_sync()
            raise
        if split is not None:
            self._tell_split(split)
        self._take_in(loss, weight_of_all)
        return loss

    def observe(self, **signals: Scalar) -> None:
        """Watch signals of your own with this step: `stabilizer.observe(kl=kl, entropy=entropy)`."""
        for name, value in signals.items():
            if name in _OUR_SIGNALS:
                raise UsageError(f"signal {name!r} is measured by surefoot itself: give yours another name.")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UsageError(f"signal {name!r} must be one number; got a tensor of shape {tuple(value.shape)}.")
            self._own_signals[name] = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Outcome:
        """Close a microbatch; with the last one of a window, judge the gradients and apply them or not.

        Raises `TrainingHalted` when every attempt to go on is used up.
        """
        if closure is not None:
            return self._closure_step(closure)
        if closure is None and isinstance(self.optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss itself: call `stabilizer.step(closure)`, as with the bare optimizer."
            )
        if not self._window.open and (self._judge.scaler is not None or self._window.length > 1):
            raise UsageError(
                "`step()` came without a `backward()` since the last one. With loss scaling or accumulation the loss "
                "must go through `stabilizer.backward(loss)`, not `loss.backward()`."
            )
        self._window.close()
        if not self._window.full:
            self._announce_gradient_sync()
            return Outcome(self._steps, None)
        return self._finish_window()

    def flush(self) -> Outcome | None:
        """Step on a window that ended early, at the end of an epoch; `None` if there is nothing to step on."""
        if self._window.open:
            self._window.close()
        if self._window.count == 0:
            return None
        if not self._window.full:
            average_gradients(dense_views(self._layout.with_gradient()[1]), self._group)
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
        """The last 1,000 steps, oldest first, the last 100 with their layers. Waits for numbers still on their way."""
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

    # ---- coming back ----------------------------------------------------------------------------------------------

    def resume(self, loader: Any, epochs: int = 1) -> Followed:
        """The batches of `loader` that are left: all of them, or those after the newest checkpoint.

        The first call loads that checkpoint, if there is one. Each call is a pass over the data (`epochs` of them);
        passes that were complete give nothing. While batches are drawn, the signals named by the checkpoints (SIGTERM,
        SIGINT, SIGUSR1) finish the step, save, and exit with status 128 + signal; a second one exits at once.
        """
        return self._lifeline.follow(loader, epochs)

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs that are left, for a loop with work of its own around each pass."""
        return self._lifeline.epochs(total)

    def restore(self, which: Literal["latest", "good", "best"] | int | Path = "latest") -> int | None:
        """Load a checkpoint now; returns its step, or `None` if there is none yet."""
        return self._lifeline.restore(which)

    def save(self, metric: float | None = None) -> None:
        """Save a checkpoint now, and return when it is on disk.

        `metric` is what makes one better than another, lower being better, such as a validation loss. As long as none
        is given, the mean training loss of the last steps is compared.
        """
        self._drain()
        self._lifeline.save(self._steps, self._ledger.unrest(), metric, given=metric is not None)

    def state_dict(self) -> dict[str, Any]:
        """Everything of the stabilizer's own: tensors and plain values, no pickle needed.

        Model, optimizer and scheduler are the user's and saved as ever. `checkpoints` saves all of it together.
        """
        return _settled(self._own_state(live=False))

    def _own_state(self, live: bool) -> dict[str, Any]:
        scaler = self._judge.scaler
        under_way = self._window.loss_sum is not None
        gradients = [parameter.grad for _, parameter in self._layout.parameters] if under_way else []
        return {
            "schema": SCHEMA,
            "steps": self._steps,
            "lr_factor": self._lr_factor,
            "judge": self._judge.state_dict(live),
            "grad_scaler": scaler.state(live) if isinstance(scaler, TorchLossScaler) else None,
            "ledger": self._ledger.state_dict(),
            "window": pack(self._window.state_dict(), live) if under_way else None,
            "gradients": pack(gradients, live),
            "stale_before": self._stale_before,
            "pending": list(self._pending),
            "row_limit": self._row_limit.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved stabilizer stopped. A part whose settings have changed starts anew."""
        require(
            state.get("schema") == SCHEMA,
            f"the state has schema {state.get('schema')!r}; this version of surefoot reads schema {SCHEMA}.",
        )
        self._steps, self._lr_factor = state["steps"], state["lr_factor"]
        self._load_rules(state["judge"])
        scaler = self._judge.scaler
        if isinstance(scaler, TorchLossScaler) and state["grad_scaler"] is not None:
            scaler.load(state["grad_scaler"])
        self._ledger.load_state_dict(state["ledger"])
        self._pending = deque(StepNumbers(unpack_record(packed)) for packed in state["pending"])
        self._stale_before = state["stale_before"]
        if "row_limit" in state:
            self._row_limit.load_state_dict(state["row_limit"])
        self._window = self._window.cleared()
        self._load_window(state["window"], state["gradients"])
        self._buffers = BufferKeeper(self._models)
        self._announce_gradient_sync()

    def _load_rules(self, state: dict[str, Any]) -> None:
        self._judge.load_state_dict(state)
        self._guarded.forget_recordings()

    def _load_window(self, window: dict[str, Any] | None, gradients: list[Tensor | None]) -> None:
        """Continue an accumulation that was under way, with the gradients it had so far."""
        self._layout.drop_gradients()
        if window is None:
            return
        self._window.load_state_dict(map_tensors(window, lambda tensor: tensor.to(self._home)))
        for (_, parameter), gradient in zip(self._layout.parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = as_gradient(gradient, parameter)

    # ---- one microbatch -------------------------------------------------------------------------------------------

    def _look_at_gradients(self) -> None:
        """Before a microbatch: drop or notice what somebody else did to the gradients."""
        if self._zero_grad and self._window.loss_sum is None:
            self._layout.drop_gradients()  # what another model's backward left, as in a GAN
        self._notice_lost_gradients()

    def _backward(self, loss: Tensor, weight: Scalar | None, **options: Any) -> None:
        scale = self._judge.loss_scale()
        with torch.enable_grad():  # the loss has its graph, wherever backward is called from
            scaled = self._window.scaled(loss, weight)
            if scale is not None:
                scaled = scaled * scale.to(scaled.device)
        scaled.backward(**options)  # type: ignore[no-untyped-call]

    def _run_pieces(
        self, microbatches: Microbatches, loss_fn: Callable[[Any], Tensor], batch: Any, weight: Any
    ) -> tuple[Tensor, Scalar | None, Split | None]:
        weighing = Weighing(count_rows(batch), weight, None if weight is None else weight(batch))
        self._look_at_gradients()

        def backward(loss: Tensor, share: float) -> None:
            if share < 1 and isinstance(loss, Tensor) and not loss.requires_grad:
                return  # a piece without any target may have a constant loss where the batch has not
            check_loss(loss)
            self._backward(loss if share == 1 else loss * share, weighing.total)

        parameters = [parameter for _, parameter in self._layout.parameters]
        loss, split = microbatches.run(loss_fn, batch, weighing, backward, parameters)
        # A batch of padding alone: nothing to learn from it.
        loss = torch.zeros((), device=self._home) if loss is None else loss
        return loss, weighing.total, split

    def _take_in(self, loss: Tensor, weight: Scalar | None) -> None:
        """After a microbatch, or one loss of it."""
        self._window.add(loss, weight)
        if self._judge.scaler is not None:
            self._seal = GradientSeal(self._layout.parameters)

    def _tell_split(self, split: Split) -> None:
        """Say once that batches do not fit whole, and once what that does to batch norm."""
        signals = Signals(self._steps)
        if "memory.split" not in self._ledger.by_kind:
            log.info("surefoot: step %d: %s", self._steps, split)
            self._ledger.note(signals, "memory.split", "info", str(split), evidence=split.evidence())
        if any(isinstance(m, _BatchNorm) and m.training for model in self._models for m in model.modules()):
            self._ledger.warn_once(
                signals,
                "memory.split-batch-norm",
                f"batches are run in pieces of {split.largest} rows, since more did not fit in memory, and batch norm "
                "takes its statistics over a piece: they are noisier than over the batch. Group norm has no such limit",
            )

    # ---- one optimizer step ---------------------------------------------------------------------------------------

    def _announce_gradient_sync(self) -> None:
        """Under DDP and FSDP2, only the last microbatch of a window averages gradients over ranks."""
        if self._window.length > 1:
            set_gradient_sync(self._models, self._window.count == self._window.length - 1)

    def _facts(self) -> StepFacts:
        return StepFacts(self._steps, self._window.mean_loss, self._divisor(), self._own_signals, self._lr_factor)

    def _divisor(self) -> Scalar:
        """What accumulation left to divide the gradients by; weights are added up over the ranks."""
        divisor = self._window.divisor
        if not self._window.weighted or (self._group is None and self._home.type == "cpu"):
            return divisor
        if not isinstance(divisor, Tensor):  # a tensor on a device: a number would be part of what is recorded there
            divisor = torch.full((), divisor, dtype=torch.float32, device=self._home)
        if self._group is None:
            return divisor
        total = torch.as_tensor(divisor, dtype=torch.float32, device=self._home)
        return add_up(total, self._group) / torch.distributed.get_world_size(self._group)

    def _look_for_new_parameters(self) -> None:
        if self._guarded.look_for_new_parameters():
            self._lifeline.forget_snapshots()  # they know nothing of the new ones

    def _finish_window(self) -> Outcome:
        self._look_for_new_parameters()
        self._warn_if_clipped_outside()
        self._lifeline.before_update()
        self._judge.stop_wanted = self._lifeline.interrupts.received is not None
        numbers = self._guarded.step(self._facts())
        if numbers is None:
            numbers = self._empty_step()
        if self._zero_grad:
            self._layout.drop_gradients()
        return self._close_step(numbers)

    def _closure_step(self, closure: Callable[[], Tensor]) -> Outcome:
        if self._window.length > 1 or self._judge.scaler is not None:
            raise UsageError("a closure evaluates the loss several times a step: use accumulate=1 and no loss scaling.")
        self._look_for_new_parameters()

        def evaluate() -> Tensor:
            self._window = self._window.cleared()
            with torch.enable_grad():
                loss = closure()
            if not self._window.open:
                self._window.add(torch.as_tensor(loss, device=self._home), None)
            return loss

        self._lifeline.before_update()
        return self._close_step(self._guarded.step_with_closure(evaluate, self._facts))

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
        halted, self._halted = self._halted, None
        if halted is not None:
            raise halted
        try:
            while len(self._pending) > self._lag_steps:
                self._account(self._pending.popleft())
        finally:
            self._buffers.save(self._steps)
        self._lifeline.after_step(self._steps, self._ledger.healthy, self._ledger.unrest, self._ledger.recent_loss)
        self._stop_if_asked()
        return outcome

    def _stop_if_asked(self) -> None:
        """Save and leave if a signal came. Ranks leave together, once they know of each other's signals."""
        received = self._lifeline.interrupts.received
        if not (self._stop_agreed if self._group is not None else received is not None):
            return
        self._drain()
        self._lifeline.save(self._steps, self._ledger.unrest(), self._ledger.recent_loss())
        raise SystemExit(128 + (received or signal.SIGTERM))

    def _drain(self) -> None:
        """Wait for every step's numbers. Reading never halts a run: the next step does, if it comes to that."""
        while self._pending:
            try:
                self._account(self._pending.popleft())
            except TrainingHalted as halted:
                self._halted = self._halted or halted

    def _account(self, numbers: StepNumbers) -> None:
        record = numbers.record()
        step = record.signals.step
        self._stop_agreed |= "stop" in record.notices
        if step < self._stale_before:  # taken on weights that the run has left since
            self._ledger.count(record)
            return
        if record.skipped:
            self._buffers.restore(step)
        self._buffers.settle(step)
        decision = self._ledger.account(record)
        self._lr_factor = decision.lr_factor
        if decision.action in ("roll_back", "reset_moments", "take_back"):
            self._go_back(record, decision)
        elif decision.action == "halt":
            self._halt(decision.reason)

    def _go_back(self, record: StepRecord, decision: Decision) -> None:
        """Carry out what the recovery calls for, and say what became of it."""
        where: str | None = "the state that was left"
        if decision.action == "reset_moments":
            self._lifeline.reset_moments()
        elif decision.action == "take_back":
            where = where if self._lifeline.take_back() else None
        else:
            assert decision.before is not None
            tried = self._ledger.returns_tried - 1
            where = self._lifeline.return_to(decision.before, tried, keep_present=not record.skipped)
        if where is None:
            self._nowhere_to_return(record, decision)
            return
        self._stale_before = self._steps
        self._guarded.forget_norm()
        self._buffers = BufferKeeper(self._models)
        done = "cleared the optimizer's state" if decision.action == "reset_moments" else f"back to {where}"
        summary = f"{decision.reason}: {done}; learning rate x {decision.lr_factor:g}"
        self._ledger.note(record.signals, "recovery", "warning", summary, decision.action)

    def _nowhere_to_return(self, record: StepRecord, decision: Decision) -> None:
        if decision.action != "take_back" and self._guarded.parameters_broken():
            self._halt(f"{decision.reason}, and there is no earlier state to return to")
        self._ledger.warn_once(
            record.signals, "recovery.no-state", f"{decision.reason}, and there is no earlier state to return to"
        )

    def _halt(self, reason: str) -> None:
        incident = self._ledger.incidents[-1]
        message = (
            f"halted at step {incident.step} after every attempt to go on: {reason}. {self._state_of_weights()} "
            "See `.incident` on this error; `escalation=None` goes on skipping instead."
        )
        evidence = self._lifeline.save_evidence(self._steps, reason)
        if evidence:
            message += f" The state as it is was kept in {evidence}."
        raise TrainingHalted(message, incident)

    def _state_of_weights(self) -> str:
        if self._guarded.parameters_broken():
            return "The weights themselves are not finite: an earlier step broke them with finite gradients."
        return "The weights are those of the last step that was applied."

    def _empty_step(self) -> StepNumbers:
        """No parameter had a gradient: the bare loop's step was taken, and it is said once."""
        signals = Signals(self._steps, lr=self._guarded.lr(self._lr_factor))
        self._ledger.warn_once(signals, "optim.no-gradient", "no parameter of the optimizer has a gradient")
        return StepNumbers(StepRecord(signals, skipped=False))

    def _notice_lost_gradients(self) -> None:
        """Losses were taken in, and their gradients are gone: somebody called `zero_grad()` in between."""
        window = self._window
        if window.loss_sum is None or any(p.grad is not None for _, p in self._layout.parameters):
            return
        if window.length == 1:  # as after a batch that failed: thrown away, and on to the next
            self._window = window.cleared()
            return
        self._ledger.warn_once(
            Signals(self._steps),
            "optim.lost-microbatch",
            f"the gradients of {window.count} of {window.length} microbatches were thrown away before the step: with "
            "`accumulate` the stabilizer calls `zero_grad()`, the loop must not",
        )

    def _warn_if_clipped_outside(self) -> None:
        if self._seal is not None and self._seal.broken:
            self._ledger.warn_once(
                Signals(self._steps),
                "clip.before-unscale",
                "gradients were changed in place between backward() and step(), while they are still multiplied by the "
                "loss scale: a limit applied there means nothing. Pass `clip=` instead",
            )


def _settled(state: dict[str, Any]) -> dict[str, Any]:
    """The stabilizer's own state once the numbers of its last steps have arrived."""
    return state | {"pending": [pack_record(numbers.record()) for numbers in state["pending"]]}
