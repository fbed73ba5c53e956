"""The watcher: follows a script's training loop through the calls `patches` reports, and gathers the facts.

Every observation runs inside `safely`: should one fail, the script never notices; one line says what is no longer
watched, and the rest goes on. Most steps cost a few numbers; a few steps get a deep look (`look`).
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.observe.readable import has_company, readable
from surefoot.observe.tensors import dense_views
from surefoot.watch.accumulated_loss import Accumulation, share_of
from surefoot.watch.collected_facts import assemble
from surefoot.watch.data_origin import DataOrigin, origin_of_data, trails
from surefoot.watch.evaluation import Evaluations
from surefoot.watch.function_recorder import leave_every_tape
from surefoot.watch.guard import StepGuard
from surefoot.watch.loss_level import LossLevels, data_under
from surefoot.watch.manual_loop import ManualLoop
from surefoot.watch.messages import say
from surefoot.watch.nonfinite_origin import autopsy
from surefoot.watch.optimizer_order import OptimizerOrder, follow
from surefoot.watch.optimizer_record import OptimizerRecord, gradient_norm, left_share
from surefoot.watch.originals import Unobservable
from surefoot.watch.parameter_registry import ParameterRegistry
from surefoot.watch.retained_graphs import RetainedGraphs
from surefoot.watch.sampled_step import SampledStep
from surefoot.watch.script_hooks import WithoutHooks, has_modes_of_its_own, is_calm, unseen
from surefoot.watch.step_data import StepData
from surefoot.watch.step_series import StepSeries
from surefoot.watch.user_frames import name_of, site, user_frame

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from surefoot.experiments.changes.experiment import Experiment
    from surefoot.watch.incidents import IncidentWriter
    from surefoot.watch.log_rows import WatchLog
    from surefoot.watch.originals import Originals

FIRST_LOOKS = 8
"""The first steps are all looked at; after that each look is 1.35 times as far away as the one before."""
THOROUGH = (1, 13, 144)
"""Looks that also ask for the gradient of each term and for causality: an extra backward each."""
MANY_EVALUATIONS = 4
MOST_LOOKS = 48
SOME_STEPS = "some steps"
"""Stands among the problems for steps that could not be observed."""
MOST_SKIPS = 200
"""Events that are kept of steps that were left out; the run log has its own limit."""
FIRST_SAVE_S = 15.0
"""After so long the facts are written for the first time, so that a killed run can be diagnosed too."""
_CARRIERS = frozenset({"looking", "steps", "backward", "optimizers"})
"""Probes that begin and end the looks."""
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
"""With `None` the compiler, which else compiles whatever is called from where a graph breaks, sees nothing."""
_EAGER_STEPS = 200
"""On a GPU, losses are read at once for so many steps; later, many at a time."""


class Watcher:
    """All that is known about the run so far."""

    def __init__(self, guard: bool = False) -> None:
        self.guard = StepGuard(self) if guard else None
        self.active = True
        """Off in a forked child, such as a data loader's worker."""
        self.originals: Originals | None = None
        """The functions and methods that were there before the script ran."""
        self._is_observing = False
        self._thread: int | None = None
        self.book = ParameterRegistry()
        self.optimizers: list[OptimizerRecord] = []
        self.schedulers: list[dict[str, Any]] = []
        self.looks: list[dict[str, Any]] = []
        self.most_looks = MOST_LOOKS
        self.events: list[dict[str, Any]] = []
        self.problems: dict[str, str] = {}
        self.evaluations = Evaluations(self)
        self.seeds: dict[str, list[int]] = {}
        self.reseeds: dict[str, list[int]] = {}
        self.stream = StepData()
        self.levels = LossLevels()
        self.kept = RetainedGraphs()
        self.manual = ManualLoop()
        self.turns = OptimizerOrder()
        self.clips: list[dict[str, Any]] = []
        self.loaders: list[dict[str, Any]] = []
        self.batches: list[dict[str, Any]] = []
        self.scaler: dict[str, Any] = {}
        self.policy: list[dict[str, Any]] = []
        self.divergences: list[dict[str, Any]] = []
        self.backward_series = StepSeries()
        self.diary: WatchLog | None = None
        """Writes the run log."""
        self.blackbox: IncidentWriter | None = None
        """Keeps the first bad step."""
        self.incident: str | None = None
        """Where it is kept."""
        self.save: Callable[[dict[str, Any]], None] | None = None
        """Where the facts go while the run goes on."""
        self.experiment: Experiment | None = None
        """The change that `surefoot bisect` makes to this run."""
        self.backwards = 0
        self.steps = 0
        self.compiled = False
        self.look: SampledStep | None = None
        self.origins: dict[str, list[tuple[str, str, str]]] = {}
        self.trails: list[DataOrigin] = []
        """How data came into the graph at the last look."""
        self.started = time.monotonic()
        self._save_wait = FIRST_SAVE_S
        self._save_at = self.started + FIRST_SAVE_S
        self._look_at = 0
        self._pending: list[Any] = []
        self._shares: list[float | None] = []
        """Which part of its microbatch's loss each of them is."""
        self._accumulation = Accumulation()
        self._last_losses: list[Any] = []
        self._backwards_at_zero = -1
        self._zero_site = ""
        self._autopsied = False
        self._gradient_autopsied = False
        self.clip_now: dict[str, Any] | None = None
        """What the last clipping since the last step was given and found."""
        self.unscaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        """The loss a scaler multiplied last, and what it was before."""
        self._look_backwards = 0
        self._cycle: set[int] = set()
        self._round: set[int] = set()
        self._stepped = False
        self._evaluations = 0
        """How often the last step evaluated a closure."""
        self._closure_began: int | None = None
        """How many backwards there had been when a step that evaluates a closure began."""
        self._extra_looks = 0
        self._root_sites_of_step: list[Any] = []

    def here(self) -> bool:
        """In the process and the thread that train, and not while torch compiles or traces."""
        return self.active and self._thread in (None, get_ident()) and is_calm()

    # Safety

    def safely(self, probe: str, observe: Callable[..., Any], *args: Any) -> Any:
        """Run one observation. If it fails, say so once, leave that probe off, and go on."""
        if probe in self.problems:
            return None
        try:
            with unseen():
                if self._is_observing or self.originals is None:
                    return observe(*args)
                self._is_observing = True
                compiler = _set_eval_frame(None) if self.compiled else None
                try:
                    return self.originals.call(observe, *args)
                finally:
                    self._is_observing = False
                    if compiler is not None:
                        _set_eval_frame(compiler)
        except Unobservable as reason:  # later, when there is no other thread, it may be possible again
            if SOME_STEPS not in self.problems:
                self.problems[SOME_STEPS] = str(reason)
                say(f"surefoot: {SOME_STEPS} are not watched ({reason})")
            return None
        except Exception as error:
            self._give_up(probe, error)
            return None

    def _give_up(self, probe: str, error: Exception) -> None:
        if os.environ.get("SUREFOOT_DEBUG"):
            say("".join(traceback.format_exception(error)))
        told, self.problems[probe] = probe in self.problems, f"{type(error).__name__}: {error}"
        if probe in _CARRIERS:  # nobody else would ever end the look
            look, self.look = self.look, None
            self._look_at = sys.maxsize
            if look is not None:
                look.take_off()
        if not told:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            say(f"surefoot: stopped watching {probe} ({words}); the script is not affected")

    # Looks

    def begin_look(self) -> None:
        """SampledStep deep from here to the end of the next step."""
        if self.look is None and len(self.looks) < self.most_looks and "looking" not in self.problems:
            thorough = self.steps in THOROUGH
            plain = not self.compiled
            taped = plain and not has_modes_of_its_own()
            self.look = SampledStep(self.steps, self.book, self.safely, use_tape=taped, thorough=thorough, hooked=plain)
            self._look_backwards = self.backwards
            self._cycle = set()
            self.safely("looking", self.look.begin)

    def end_look(self) -> None:
        """Take the hooks off and keep what was seen."""
        look, self.look = self.look, None
        if look is None:
            return
        try:
            with unseen():
                look.end()
        except Exception as error:
            look.take_off()
            self._give_up("looking", error)
        facts = self.safely("looking", look.as_facts)
        if facts is not None:
            self.looks.append(facts)
            if self.diary is not None:
                self.safely("run log", self.diary.look, facts)
            self.origins = look.origins or self.origins
            self.trails = look.trails or self.trails
        if look.tape is not None:
            look.tape.forget()
        if len(self.looks) < FIRST_LOOKS or self._extra_looks > 0:
            self._extra_looks -= 1
            # A step that evaluates a closure many times is as good as many steps: every other one is enough.
            self._look_at = self.steps + (self._evaluations > MANY_EVALUATIONS)
        else:
            self._look_at = max(self.steps + 1, math.ceil(look.step * 1.35))

    def _tell_step(self, optimizer: int, row: dict[str, Any]) -> None:
        if self.diary is not None:
            self.safely("run log", self.diary.step, row, optimizer)

    def happened(self, facts: dict[str, Any]) -> None:
        """Something that the diagnosis and whoever reads the log may want to know."""
        self.events.append(facts)
        if self.diary is not None:
            self.safely("run log", self.diary.event, facts)

    # Models and optimizers

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """A new optimizer: take down its settings and its parameters."""
        self._thread = get_ident()
        watched = OptimizerRecord(len(self.optimizers), optimizer, site(3))
        watched.born_at = self.steps
        watched.series.tell = partial(self._tell_step, watched.number)
        self.optimizers.append(watched)
        frame = user_frame(3)
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                record = self.book.add(tensor)
                record.optimizers.add(watched.number)
                if not record.name and not isinstance(tensor, nn.Parameter) and frame is not None:
                    record.name = name_of(tensor, frame)
        if self.blackbox is not None:
            self.safely("incidents", self.blackbox.optimizer_made)
        self.look_soon()

    def before_swap(self, tensors: tuple[Tensor, ...]) -> Callable[[], None]:
        """Torch is about to swap tensors, which it refuses if anything refers to them. Returns what to call after."""
        self.end_look()
        self.trails = []
        held, by_hand = self.book.let_go(tensors), self.manual.let_go()

        def swapped() -> None:
            self.book.hold_again(held)
            self.manual.hold_again(by_hand)

        return swapped

    def look_soon(self) -> None:
        """Something new began: look at the next few steps."""
        if self.steps:
            self._extra_looks = 3
        if self.look is None:
            self.begin_look()

    def watched(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """The record of an optimizer, made if it was never announced."""
        for held in self.optimizers:
            if held.ref() is optimizer:
                return held
        self.optimizer_made(optimizer)
        return self.optimizers[-1]

    # Backward

    def before_backward(self, root: Tensor) -> None:
        """`backward` is about to run on `root`."""
        self.backwards += 1
        again = self._is_again()
        where = user_frame(3)
        if self.look is not None and self.look.tape is not None:
            self.look.tape.in_step = self.look.tape.has_closure and self.look.tape.in_step
        value: Any = root
        scaled = False
        if self.unscaled is not None:
            ref, original = self.unscaled
            if ref() is root:
                value, scaled = original, True
        with WithoutHooks():
            value = readable(value)
        if value is None:  # a loss that has no value in this process
            return
        value = value.detach()
        if value.numel() != 1:
            value = value.float().mean()
        eager = value.device.type == "cpu" or self.steps < _EAGER_STEPS
        if eager:
            value = float(value)
        self._pending.append(value)
        self._shares.append(self.safely("microbatches", share_of, root, scaled, eager))
        if self.blackbox is not None:
            self.safely("incidents", self.blackbox.before_backward, root, value, again)
        if not self._stepped:
            self.backward_series.append({"loss": value})
        if not self.optimizers and not self.manual.is_known():
            self.manual.find(root, self.book)
        if eager:
            if not math.isfinite(value):
                if not self._autopsied:
                    self._autopsied = True
                    self.safely("autopsy", self._autopsy, root, value)
            elif not again and self.levels.is_spike(value, where):
                self.safely("spikes", self._note_spike, root, value)
        if again:
            return
        if root.grad_fn is not None and (
            self.backwards <= 128 or (self.backwards % 16 == 0 and self.backwards < 1 << 14)
        ):
            self.safely("kept graphs", self.kept.leave_sentinel, root)
        if self.look is not None:
            self.safely("left-over gradients", self._check_leftover)
            facts = {"site": site(3), "value": value, "backward": self.backwards, "step": self.steps}
            self.safely("graph", self.look.before_backward, root, facts)
        if where is not None:
            line = (where.f_code, where.f_lineno)
            self._root_sites_of_step.append(line)
            self.safely("data of steps", self.stream.note, root, line, self.steps, self.backwards)

    def _is_again(self) -> bool:
        """Whether an optimizer evaluates its closure once more in a step. The first time tells where the run stands."""
        return self._closure_began is not None and self.backwards > self._closure_began + 1

    def after_backward(self, gradients: Any = None) -> None:
        """`backward` is done; `gradients` are those that were returned instead of accumulated."""
        if self.blackbox is not None:
            again, in_closure = self._is_again(), self._closure_began is not None
            self.safely("incidents", self.blackbox.after_backward, again, in_closure)
        if self.look is not None:
            self.safely("backward", self.look.after_backward)
            if self.look is not None and self._closure_began is not None:
                self.safely("looking", self.look.rest)
            if self.look is not None and self.backwards - self._look_backwards >= 64:
                self.end_look()
        if not self.optimizers:
            self._after_manual_backward(gradients)

    def _autopsy(self, root: Tensor, value: float) -> None:
        if self.look is not None and self.look.tape is not None:
            origins: dict[str, list[tuple[str, str, str]]] = {}
            for entry in self.look.tape.entries:
                if entry.kind:
                    origins.setdefault(entry.kind, []).append((entry.site, entry.module, entry.name))
        else:
            origins = self.origins
        facts = autopsy(root, self.book, origins, self.follow_data)
        self.happened({"event": "nonfinite-loss", "step": self.steps, "value": str(value), **facts})

    def follow_data(self, facts: dict[str, Any], tensor: Tensor | None) -> dict[str, Any]:
        """Where data that an autopsy found not to be finite came from: through which operations, and whether so."""
        if facts.get("dtype") == "float16" and not facts.get("nan"):
            return {}  # the cast may have made it
        drawn = self.blackbox.drawn() if self.blackbox is not None else []
        if self.look is not None and self.look.tape is not None:
            known = trails(self.look.tape)
            if known:
                return origin_of_data(facts, tensor, known, True, drawn)
        return origin_of_data(facts, tensor, self.trails, False, drawn)

    def _note_spike(self, root: Tensor, value: float) -> None:
        """The data tensors that went into a loss far above the others."""
        held = data_under(root)
        level = self.levels.middle()
        batch = self.batches[-1]["print"] if self.batches else None
        if self.levels.spikes <= 3 and not has_company():
            self.look_soon()
        self.happened(
            {"event": "spike", "step": self.steps, "value": value, "level": level, "data": held, "batch": batch}
            | {"backward": self.backwards, "began": self.levels.began()}
        )

    def _check_leftover(self) -> None:
        if self.manual.is_known() and self.backward_series.count > 1:
            self.backward_series.rows[-1]["leftover"] = self.manual.left_share()
        for watched in self.optimizers:
            optimizer = watched.ref()
            if optimizer is not None and watched.series.count:
                tensors = [t for group in optimizer.param_groups for t in group["params"] if t.requires_grad]
                watched.leftover.append(left_share(tensors))

    # Steps

    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step."""
        watched = self.watched(optimizer)
        watched.loss_at_start = self.backwards
        self._closure_began = self.backwards if has_closure else None
        if self.look is not None:
            self.look.claim_roots(watched.number)
            if watched.number in self._cycle and not has_closure:
                self._finish_cycle()
            if self.look is not None:
                watched.looked += 1
                self.safely("gradients", self.look.updates.before_step, watched.number, optimizer)
                if self.look.tape is not None:
                    self.look.tape.in_step, self.look.tape.has_closure = True, has_closure
        if self._backwards_at_zero == self.backwards and self._pending and not has_closure:
            watched.zeroed_before_step += 1
            watched.zero_site = self._zero_site
        norm = self.safely("gradient norms", gradient_norm, optimizer, self.scaler.get("unscale_by"))
        watched_row: dict[str, Any] = {"grad_norm": norm}
        if isinstance(norm, float) and not math.isfinite(norm) and not has_closure:
            self.safely("gradients", self._nonfinite_gradient, watched, optimizer)
            if self.blackbox is not None and not self.scaler.get("enabled"):
                self.safely("incidents", self.blackbox.bad_step, optimizer)
        watched.row = watched_row

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        watched = self.watched(optimizer)
        self._closure_began = None
        if self.look is not None and self.look.tape is not None:
            self.look.tape.in_step = False
        row, watched.row = watched.row, {}
        if self.look is not None and self.backwards > watched.loss_at_start:
            self.look.claim_roots(watched.number)
        losses, shares = self._pending or self._last_losses, self._shares
        inside = self._evaluations = self.backwards - watched.loss_at_start
        if inside:  # a closure: its first evaluation is the loss at the current point, or of the last microbatch
            first = len(losses) - inside + 1
            losses, shares = losses[:first], shares[:first]
            row["grad_norm"] = self.safely("gradient norms", gradient_norm, optimizer, self.scaler.get("unscale_by"))
            row["closure"] = inside
        row["loss"] = self._accumulation.loss_of(losses, shares)
        row["backwards"] = len(self._pending)
        row["lr"] = float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else None
        if self.clip_now is not None:
            row |= self.clip_now
            self.clip_now = None
        if self.scaler.get("scale") is not None:
            row["scale"] = self.scaler["scale"]
        if watched.leftover:
            row["leftover"] = min(watched.leftover)
            watched.leftover = []
        if self._root_sites_of_step:
            row["roots"] = len(set(self._root_sites_of_step))
        self._last_losses, self._pending, self._shares = [row["loss"]] if losses else [], [], []
        self._root_sites_of_step = []
        self._stepped = True
        row["at"] = self.steps
        watched.lines |= self.stream.recent
        self.stream.recent = set()
        watched.series.append(row)
        if watched.number in self._round or not self._round:  # a round ends when an optimizer steps again
            self.steps += 1
            self._round = set()
        self._round.add(watched.number)
        if self.blackbox is not None:
            self.safely("incidents", self.blackbox.after_step, watched)
        for scheduler in self.schedulers:
            self.safely("schedules", follow, scheduler, self.watched)
        if self.look is None:
            leave_every_tape()
        if self.look is not None:
            with WithoutHooks():
                left_out = bool(row.get("skipped"))  # on a device: what is looked at is waited for anyway
            see = self.look.updates.drop_step if left_out else self.look.updates.after_step
            self.safely("updates", see, watched.number)
            self._cycle.add(watched.number)
            if sum(held.ref() is not None for held in self.optimizers) == 1:
                self._finish_cycle()
        elif self.steps >= self._look_at or self.turns.is_rare_next(watched, self.optimizers):
            self.begin_look()
        if self.save is not None and time.monotonic() >= self._save_at:
            self.safely("saving", self._save_now_and_then)
        if self.steps % 16 == 0:
            self.safely("kept graphs", self.kept.count, self.steps)

    def is_its_turn(self, watched: OptimizerRecord) -> bool:
        """Whether an optimizer has not stepped yet in a round that others have begun."""
        return watched.number not in self._round

    def losses_since_step(self) -> list[Any]:
        """What `backward` was called on since the last step: numbers, or tensors that were not read yet."""
        return list(self._pending)

    def gradients_zeroed(self) -> None:
        """`zero_grad` was called on an optimizer or a model."""
        self._backwards_at_zero = self.backwards
        if self.look is not None:
            self._zero_site = site(4)

    def step_skipped(self) -> None:
        """A scaler left a step out: its losses belong to no row."""
        loss = self._accumulation.loss_of(self._pending, self._shares)
        self._last_losses, self._pending, self._shares = [] if loss is None else [loss], [], []
        self._root_sites_of_step = []
        if self.diary is not None:
            self.safely("run log", self.diary.event, {"event": "overflow", "step": self.steps} | self.scaler)

    # Steps that the guard leaves out

    def step_left_out(self, optimizer: torch.optim.Optimizer) -> None:
        """The guard has left out the step that an optimizer is in: keep what can still be learned from it."""
        watched = self.watched(optimizer)
        watched.row["skipped"] = True
        self.safely("gradients", self._nonfinite_gradient, watched, optimizer)
        if self.blackbox is not None and self.backwards == watched.loss_at_start and not self.scaler.get("enabled"):
            self.safely("incidents", self.blackbox.bad_step, optimizer)
        if self.blackbox is not None:
            self.safely("incidents", self.blackbox.left_out, self.steps, watched.number)

    def step_judged_on_device(self, optimizer: torch.optim.Optimizer, nonfinite: Tensor) -> None:
        """Whether the step that an optimizer is in was left out is known later, with the other numbers of its row."""
        with WithoutHooks():
            self.watched(optimizer).row["skipped"] = (nonfinite.sum() > 0).float()

    def tell_left_out(self, optimizer: torch.optim.Optimizer | None, facts: dict[str, Any], count: int) -> None:
        """A step was left out, and this is known now; `count` were until now."""
        facts["optimizer"] = self.watched(optimizer).number if optimizer is not None else None
        if count <= MOST_SKIPS:
            self.events.append(facts)
        if self.blackbox is not None:
            self.safely("incidents", self.blackbox.left_out, facts["step"], facts["optimizer"])
        if self.diary is not None:
            self.safely("run log", self.diary.event, facts)

    def names_of(self, tensors: list[Tensor]) -> list[str]:
        """The names of parameters."""
        return [self.book.label(self.book.add(tensor)) for tensor in tensors]

    def name_of_optimizer(self, optimizer: torch.optim.Optimizer) -> str:
        """What an optimizer is called in a message."""
        return f"optimizer {self.watched(optimizer).number + 1} ({type(optimizer).__name__})"

    def _finish_cycle(self) -> None:
        self.end_look()
        if self.steps >= self._look_at:
            self.begin_look()

    def _nonfinite_gradient(self, watched: OptimizerRecord, optimizer: torch.optim.Optimizer) -> None:
        if self._gradient_autopsied or self.scaler.get("enabled"):
            return
        self._gradient_autopsied = True
        bad: list[str] = []
        good: list[str] = []
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                name = self.book.label(self.book.add(tensor))
                local = readable(tensor.grad)
                is_finite = local is None or bool(torch.isfinite(dense_views([local])[0]).all())
                (good if is_finite else bad).append(name)
        event = {"event": "nonfinite-gradient", "step": self.steps, "parameters": bad[:20], "finite": good[:20]}
        event["loss_finite"] = all(math.isfinite(float(v)) for v in self._pending)
        if self.look is not None and self.look.roots:
            event["backward"] = next(
                (root["backward_nonfinite"] for root in self.look.roots if root.get("backward_nonfinite")), None
            )
        self.happened(event)

    # Loops without an optimizer

    def _after_manual_backward(self, gradients: Any) -> None:
        self.steps += 1
        norm = self.manual.gradient_norm(gradients)
        if norm is not None and self.backward_series.rows:
            self.backward_series.rows[-1]["grad_norm"] = norm
        if self.backward_series.rows and not self.backward_series.waits:
            self._tell_step(0, self.backward_series.rows[-1])
        if self.look is None and self.backwards <= 6:
            self.begin_look()
        elif self.look is not None:
            self.end_look()
            if self.backwards <= 6:
                self.begin_look()

    # The end

    def _save_now_and_then(self) -> None:
        """Facts of a run that may yet be killed; less and less often."""
        self._save_wait = min(300.0, 1.5 * self._save_wait)
        self._save_at = time.monotonic() + self._save_wait
        if self.save is not None:
            self.save(self.as_facts(at_end=False))

    def as_facts(self, at_end: bool = True) -> dict[str, Any]:
        """Everything, as plain data."""
        if at_end:
            self.end_look()
            self.evaluations.drop()
        for watched in self.optimizers:
            self.safely("series", watched.series.read)
        return assemble(self)
