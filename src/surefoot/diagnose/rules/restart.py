"""Restarts that lose part of the state or repeat batches, and runs that cannot be repeated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from surefoot.core.wording import at_place
from surefoot.diagnose.curves import present
from surefoot.diagnose.data_summary import has_print, stream, where_of
from surefoot.diagnose.rule import Claim, Rule
from surefoot.record.facts import (
    FileLoadedEvent,
    FileSavedEvent,
    ModelLoadedEvent,
    OptimizerLoadedEvent,
    ScalerLoadedEvent,
    SchedulerLoadedEvent,
)

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Evidence
    from surefoot.diagnose.run import RecordedRun
    from surefoot.record.facts import Event, OptimizerFacts


MANY_LIVES, FEW_STEPS = 8, 10
"""An optimizer that is created at least this often, and makes at most this many steps each time, never has moments."""


@dataclass(frozen=True)
class Restart:
    """A checkpoint that was read from a file and put into a model that was then trained on."""

    file: FileLoadedEvent
    events: list[Event]
    """The events from reading the file up to the next training step."""
    optimizers: list[OptimizerFacts]
    """The optimizers that trained after it."""
    position: int
    """The position of reading the file among the events."""

    def loads(self, kind: type[OptimizerLoadedEvent | SchedulerLoadedEvent | ScalerLoadedEvent]) -> bool:
        """Whether a state of this kind was loaded."""
        return any(isinstance(event, kind) for event in self.events)


@dataclass(frozen=True)
class RestartJump:
    """Loss and learning rate on both sides of a restart."""

    losses: tuple[float, float, float] | None = None
    """Before, after, and the highest after."""
    rates: tuple[float, float] | None = None
    """Before and after."""

    @property
    def evidence(self) -> Evidence:
        """What is known, by name."""
        found: Evidence = {}
        if self.losses is not None:
            found = dict(zip(("loss_before", "loss_after", "highest_after"), self.losses, strict=True))
        if self.rates is not None:
            found |= {"lr_before": self.rates[0], "lr_after": self.rates[1]}
        return found

    @property
    def words(self) -> str:
        """The end of a sentence."""
        parts = []
        if self.rates is not None:
            parts.append(f"the learning rate jumps from {self.rates[0]:.3g} to {self.rates[1]:.3g}")
        if self.losses is not None:
            parts.append(f"the loss goes from {self.losses[0]:.3g} to {self.losses[2]:.3g} at its highest")
        return "; " + " and ".join(parts) if parts else ""


def restarts(run: RecordedRun) -> list[Restart]:
    """The restarts: a checkpoint was read from a file and put into a model that was then trained."""
    events = run.facts.events
    found: list[Restart] = []
    for position, event in enumerate(events):
        if not isinstance(event, FileLoadedEvent):
            continue
        near = [e for e in events[position:] if e.step - event.step <= 1]
        if not any(isinstance(e, ModelLoadedEvent) for e in near):
            continue
        after = [o for o in run.optimizers if _trains_after(o, run, position)]
        if after:
            found.append(Restart(event, near, after, position))
    return found


def _trains_after(optimizer: OptimizerFacts, run: RecordedRun, position: int) -> bool:
    """Whether an optimizer was made around, or stepped after, the loading of a file."""
    loaded = run.facts.events[position].step
    return bool(optimizer.created_at_step >= loaded - 1 or optimizer.created_at_step + optimizer.steps > loaded + 5)


def has_memory(optimizer: OptimizerFacts) -> bool:
    """Whether an optimizer keeps moments, so that a new one loses something."""
    if optimizer.type == "SGD":
        return bool(optimizer.first_group.momentum)
    return True


def state_missing(run: RecordedRun) -> Claim | None:
    """The parameters continue, but another part of the state starts again."""
    for restart in reversed(restarts(run)):
        holds, restored = restart.file.holds, restart.loads(OptimizerLoadedEvent)
        kept = restart.loads(SchedulerLoadedEvent)
        later = [o for o in restart.optimizers if has_memory(o)]
        saved = [e for e in run.facts.events[: restart.position] if isinstance(e, FileSavedEvent)]
        forgotten = []
        if "optimizer" in holds and not restored and later:
            forgotten.append("optimizer")
        if "scheduler" in holds and not kept and run.facts.schedulers:
            forgotten.append("scheduler")
        if "scaler" in holds and _loses_scale(run, restart):
            forgotten.append("scaler")
        if forgotten:
            return _claim_forgotten(run, restart, forgotten)
        before = _before(run, restart)
        resumed = "progress" in holds or before is not None
        if resumed and not restored and later and "optimizer" not in holds:
            return _claim_unsaved(run, restart, before, saved)
        if before is not None and restored and not kept and (jump := _rate_jump(run, before, restart)):
            return _claim_rate(restart, jump)
        if resumed and restored and _loses_scale(run, restart) and (skipped := _skips_after(run, restart)):
            return _claim_scale(restart, skipped)
    return None


def _loses_scale(run: RecordedRun, restart: Restart) -> bool:
    """Whether a new gradient scaler is used after the restart, and was given no state."""
    used = run.facts.loss_scaler.attempts > restart.file.scaler_attempts
    return used and _is_new_scaler(run, restart) and not restart.loads(ScalerLoadedEvent)


def _is_new_scaler(run: RecordedRun, restart: Restart) -> bool:
    """Whether the scaler after the restart is a new one: a scaler that continues keeps its scale."""
    before, made = restart.file.scaler_attempts, run.facts.loss_scaler.made_at
    return before == 0 or made is None or any(at >= before for at in made)


def _skips_after(run: RecordedRun, restart: Restart) -> int:
    """How many of the first 20 steps after the restart the gradient scaler skipped."""
    first = restart.file.scaler_attempts
    return sum(first <= attempt < first + 20 for attempt in run.facts.loss_scaler.skip_steps)


def moments_of_another_step(run: RecordedRun) -> Claim | None:
    """Weights and moments were read from two files that were written at different steps.

    Claimed only if the file of every state is known, and no weights came from the file of the moments: a script may
    load further models, such as an average of the weights.
    """
    files = [event for event in run.facts.events if isinstance(event, FileLoadedEvent)]
    for restart in reversed(restarts(run)):
        weights = [event.file for event in restart.events if isinstance(event, ModelLoadedEvent)]
        moments = [event for event in restart.events if isinstance(event, OptimizerLoadedEvent)]
        file, source = (moments[-1].file, weights[-1]) if moments and weights else (None, None)
        if file is None or source is None or None in weights or file in weights:
            continue
        trained = [each for each in run.parameters.values() if moments[-1].optimizer in each.optimizers]
        if not any(each.loaded for each in trained):
            continue  # the loaded model is not the trained one: a frozen model with a prompt or an adapter
        later = [o for o in restart.optimizers if o.number == moments[-1].optimizer and has_memory(o)]
        steps = _steps_of(run, files[source], files[file], moments[-1])
        if later and steps is not None and abs(steps[0] - steps[1]) > 0.1 * max(steps):
            return _claim_apart(restart, later[-1], files[file], steps)
    return None


def _steps_of(
    run: RecordedRun, weights: FileLoadedEvent, moments: FileLoadedEvent, loaded: OptimizerLoadedEvent
) -> tuple[int, int] | None:
    """The steps of weights and moments, counted in the same way; `None` if they are not known."""
    if weights.saved_at_step is not None and moments.saved_at_step is not None:
        return weights.saved_at_step, moments.saved_at_step
    if weights.progress is not None and moments.progress is not None:
        return weights.progress, moments.progress
    if weights.moments_age is not None and loaded.age is not None:  # moments that were saved with these weights
        return weights.moments_age, int(loaded.age)
    counts_alike = run.facts.backwards <= 1.05 * max(1, run.steps)  # else the file may count microbatches
    if weights.progress is not None and loaded.age is not None and counts_alike and weights.progress > loaded.age:
        return weights.progress, int(loaded.age)
    return None


def _before(run: RecordedRun, restart: Restart) -> OptimizerFacts | None:
    """The optimizer of the same kind, settings and job before the restart, in this process."""
    new = restart.optimizers[-1]
    shapes = _shapes(run, new.number)
    for old in run.optimizers:
        if old.number >= new.number or old.type != new.type or old.steps < 5:
            continue
        if _shapes(run, old.number) == shapes and _first_rate(old) == _first_rate(new):
            return old
    return None


def _shapes(run: RecordedRun, optimizer: int) -> list[list[int]]:
    return sorted(p.shape for p in run.parameters.values() if optimizer in p.optimizers)


def _first_rate(optimizer: OptimizerFacts) -> float | None:
    group = optimizer.first_group
    return group.initial_lr if group.initial_lr is not None else group.lr


def _losses(run: RecordedRun, optimizer: OptimizerFacts) -> list[float]:
    return run.curve_of(optimizer).finite


def _jump(run: RecordedRun, restart: Restart) -> RestartJump:
    """Loss and learning rate on both sides of the restart, if both are in this run."""
    new, old = restart.optimizers[-1], _before(run, restart)
    if old is None:
        return RestartJump()
    before, after = _losses(run, old)[-10:], _losses(run, new)[:10]
    losses = (median(before), median(after), max(after)) if before and after else None
    return RestartJump(losses, _rate_jump(run, old, restart))


def _rate_jump(run: RecordedRun, old: OptimizerFacts, restart: Restart) -> tuple[float, float] | None:
    new = restart.optimizers[-1]
    before = present(old.series.lr)
    after = present(new.series.lr)
    if not before or not after or not run.facts.schedulers:
        return None
    moved = before[-1] > 0 and abs(math.log(max(after[0], 1e-300) / before[-1])) > math.log(1.3)
    began_anew = math.isclose(after[0], before[0], rel_tol=0.02)  # a schedule that went on is not where it began
    return (before[-1], after[0]) if moved and began_anew else None


def _claim_forgotten(run: RecordedRun, restart: Restart, forgotten: list[str]) -> Claim:
    file, jump = restart.file, _jump(run, restart)
    kind = restart.optimizers[-1].type
    parts = {"optimizer": f"the moments of {kind}", "scheduler": "the schedule", "scaler": "the loss scale"}
    lost = " and ".join(parts[f] for f in forgotten)
    start = "start" if "optimizer" in forgotten or len(forgotten) > 1 else "starts"
    return Claim(
        0.95,
        f"The checkpoint read{at_place(file.site)} holds {', '.join(file.holds)}, but its {' and '.join(forgotten)} "
        f"state is never loaded: the parameters continue, {lost} {start} again"
        f"{jump.words}.",
        step=file.step,
        where=where_of(file.site, restart.optimizers[-1].site),
        evidence={"holds": file.holds, "not_loaded": forgotten} | jump.evidence,
        severity="warning" if forgotten == ["scaler"] else "error",
        fixes=tuple(f"Call `{name}.load_state_dict(...)` directly after that of the model." for name in forgotten),
    )


def _claim_unsaved(
    run: RecordedRun, restart: Restart, before: OptimizerFacts | None, saved: list[FileSavedEvent]
) -> Claim:
    file, jump, new = restart.file, _jump(run, restart), restart.optimizers[-1]
    again = f", which had made {before.steps} steps," if before is not None else ""
    at = f" (saved{at_place(saved[-1].site)})" if saved else ""
    return Claim(
        0.88 if before is not None else 0.7,
        f"The checkpoint read{at_place(file.site)}{at} holds the model but no optimizer state: the parameters "
        f"continue, and {new.type}{again} starts with empty moments at step {file.step}{jump.words}.",
        step=file.step,
        where=where_of(file.site, saved[-1].site if saved else None),
        evidence={"holds": file.holds, "optimizer": new.type} | jump.evidence,
        severity="error" if before is not None else "warning",
        fixes=("Save `optimizer.state_dict()` (and the scheduler's and scaler's) beside the model's, and load them.",),
    )


def _claim_scale(restart: Restart, skipped: int) -> Claim:
    file = restart.file
    return Claim(
        0.75,
        f"The checkpoint read{at_place(file.site)} holds {', '.join(file.holds)}, but no state of the gradient scaler: "
        f"the loss scale starts again at its initial value, and {skipped} of the next 20 steps "
        f"{'is' if skipped == 1 else 'are'} skipped.",
        step=file.step,
        where=where_of(file.site),
        evidence={"holds": file.holds, "skipped": skipped},
        severity="warning" if skipped > 1 else "info",
        fixes=("Save `scaler.state_dict()` beside the optimizer's, and load it after a restart.",),
    )


def _claim_apart(restart: Restart, held: OptimizerFacts, moments: FileLoadedEvent, steps: tuple[int, int]) -> Claim:
    return Claim(
        0.85,
        f"The weights read{at_place(restart.file.site)} are of step {steps[0]}, and the moments of {held.type}, read "
        f"from another file{at_place(moments.site)}, of step {steps[1]}: they belong to other weights.",
        step=restart.file.step,
        where=where_of(restart.file.site, moments.site),
        evidence={"step_of_weights": steps[0], "step_of_moments": steps[1]},
        severity="warning",
    )


def _claim_rate(restart: Restart, jump: tuple[float, float]) -> Claim:
    file = restart.file
    return Claim(
        0.8,
        f"After the checkpoint was read{at_place(file.site)} the learning rate is {jump[1]:.3g}, where it had been "
        f"{jump[0]:.3g}: the schedule starts again while parameters and moments continue.",
        step=file.step,
        where=where_of(file.site),
        evidence={"lr_before": jump[0], "lr_after": jump[1]},
    )


def remade(run: RecordedRun) -> Claim | None:
    """The optimizer is created again every few steps for the same parameters, so that its moments never build up.

    Where weights are loaded in between, or losses begin high again, every optimizer begins another training.
    """
    made = [held for held in run.optimizers if held.site and held.steps and has_memory(held) and held.type != "LBFGS"]
    if not made:
        return None
    lives = [held for held in made if (held.site, held.type) == (made[-1].site, made[-1].type)]
    numbers, few = {held.number for held in lives}, median(held.steps for held in lives)
    shared = [p for p in run.facts.parameters if len(numbers & set(p.optimizers)) > 0.5 * len(lives)]
    loads = sum(isinstance(event, ModelLoadedEvent) for event in run.facts.events)
    if len(lives) < MANY_LIVES or few > FEW_STEPS or not shared or loads > 0.25 * len(lives):
        return None
    known = [losses for held in lives if (losses := present(held.series.loss))]
    if (
        few > 1
        and len(known) > 1
        and median(each[0] for each in known[1:]) > 1.2 * median(each[-1] for each in known[:-1])
    ):
        return None
    losses = [loss for each in known for loss in each]
    course = f"; the loss goes from {losses[0]:.4g} to {losses[-1]:.4g}" if len(losses) > 1 else ""
    return Claim(
        0.9,
        f"{lives[0].type} is created {len(lives)} times{at_place(lives[0].site)} for the same {len(shared)} "
        f"parameters, and each makes {few:g} step{'s' if few > 1 else ''}: its moments begin at 0 each time{course}.",
        step=lives[1].created_at_step,
        where=(lives[0].site,),
        evidence={"optimizers": len(lives), "steps_each": few, "parameters": len(shared)},
        severity="warning",
        fixes=("Create the optimizer once, before the loop.",),
    )


def data_replayed(run: RecordedRun) -> Claim | None:
    """After a restart in the middle of an epoch, the batches of that epoch start from its beginning again."""
    for restart in restarts(run):
        at = restart.file.step
        if at < 2:
            continue
        notes = [note for note in stream(run) if has_print(note)]
        prints = [hash((note.input_print, note.target_print)) for note in notes]
        split = next((i for i, note in enumerate(notes) if note.backward > restart.file.backward), None)
        if not split:
            continue
        before, after = prints[:split], prints[split:]
        replay = _replayed(before, after)
        if replay is None:
            continue
        if not _in_mid_epoch(run, restart, before, after, replay):
            continue
        start, length = replay
        return Claim(
            0.9,
            f"After the restart at step {at} ({restart.file.site}) the first {length} batches are those of steps "
            f"{start} to {start + length - 1}, in the same order: the epoch had not ended there, so its first batches "
            "are used twice.",
            step=at,
            where=where_of(restart.file.site),
            evidence={"replayed": length, "first_seen_at": start, "restart": at},
        )
    return None


def _replayed(before: list[int], after: list[int]) -> tuple[int, int] | None:
    """Where the batches after the restart had occurred before it, and for how long they follow the old order."""
    places = [i for i, print_ in enumerate(before) if print_ == after[0]]
    best = None
    for start in places:
        length = 0
        while length < len(after) and start + length < len(before) and after[length] == before[start + length]:
            length += 1
        if length >= 2 and (best is None or length > best[1]):
            best = (start, length)
    return best


def _in_mid_epoch(
    run: RecordedRun, restart: Restart, before: list[int], after: list[int], replay: tuple[int, int]
) -> bool:
    """Whether the epoch continued beyond the known batches: then its beginning should not have been repeated."""
    start, length = replay
    if start + length < min(len(before), start + len(after)):
        return False  # the replay left the old order: another epoch, or chance
    if after[0] in before[start + 1 :] or len(set(before[start:])) < len(before) - start:
        return False  # the sequence had already been repeated: one more epoch in a fixed order
    if after[0] in after[1:]:
        return False  # it repeats afterwards: the restart was at the end of an epoch
    until = restart.file.backward
    drawn = [b for b in run.facts.batches if b.backward < until and b.grad_mode]
    if length >= len(after) and drawn:
        last = drawn[-1]
        loader = next(held for held in run.facts.loaders if held.number == last.loader)
        seen = sum(b.loader == last.loader and b.iteration == last.iteration for b in drawn)
        return loader.batches is None or seen < loader.batches
    return length >= 5


def unseeded(run: RecordedRun) -> Claim | None:
    """No seed was ever set for the random numbers of torch."""
    seeds = run.facts.seeds
    if not run.steps or seeds is None or seeds.torch:
        return None
    others = [kind for kind, calls in (("numpy", seeds.numpy), ("python", seeds.python)) if calls]
    own = [key for key in run.facts.reseeds if key.startswith("numpy.random.default_rng")]
    have = f" (only {' and '.join(others)} {'were' if len(others) > 1 else 'was'} seeded)" if others else ""
    return Claim(
        0.7 if others else 0.6,
        f"`torch.manual_seed` was never called{have}: initial weights and the order of the data differ from "
        "run to run.",
        step=0,
        evidence={"seeded": others, "generators": own[:4]},
        severity="info",
    )


def loaded_nothing(run: RecordedRun) -> Claim | None:
    """`load_state_dict(strict=False)` with a state whose names are all unknown to the model."""
    loads = run.events(ModelLoadedEvent)
    lost = [event for event in loads if event.unmatched]
    if not lost or any(event.step >= lost[-1].step and not event.unmatched for event in loads[loads.index(lost[-1]) :]):
        return None
    event = lost[-1]
    given, expected = event.unmatched or ["", ""]
    prefix = given.removesuffix(expected)
    fix = "Rename the keys of the state to those of the model, and load it without `strict=False`."
    if prefix and prefix != given:
        fix = f"Remove {prefix!r} from the keys: `{{k.removeprefix({prefix!r}): v for k, v in state.items()}}`."
    return Claim(
        0.95,
        f"load_state_dict{at_place(event.site)} loaded nothing: no name of the state ({given!r} is the first) is a "
        f"parameter of the model ({expected!r} is the first), and `strict=False` hides it. The model keeps its initial "
        f"weights.",
        step=event.step,
        where=where_of(event.site),
        evidence={"given": given, "expected": expected},
        fixes=(fix,),
    )


RULES: tuple[Rule, ...] = (
    Rule("resume.state-missing", "wiring", loaded_nothing, explains=("optim.frozen-parameters", "lr.*", "fit.*")),
    Rule(
        "resume.state-missing",
        "wiring",
        state_missing,
        explains=("optim.stale-state", "lr.schedule-broken", "lr.too-high", "data.bad-batch"),
    ),
    Rule("optim.stale-state", "wiring", moments_of_another_step, explains=("lr.too-high", "data.bad-batch")),
    Rule("optim.stale-state", "wiring", remade, explains=("lr.too-low", "optim.not-learning")),
    Rule("resume.data-replayed", "wiring", data_replayed, explains=("data.repeated-batches",)),
    Rule("repro.unseeded", "remark", unseeded),
)
