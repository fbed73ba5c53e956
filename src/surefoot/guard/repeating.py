"""Return to an earlier moment of a run and repeat the steps since: `TrainingRecovery(repeat=True)`.

A moment is a snapshot of the weights with everything else that belongs to it: settings of the optimizer, schedule, loss
scale, `also_save`, the stabilizer's own state, the random streams and the data position. It is kept between two
batches, where a checkpoint is taken too. A return has two parts:

- inside `step()`, the weights and moments are restored immediately, so that the loop continues with valid weights;
- when the next batch is requested, the rest of the moment is restored, and the loop gets the batches after it again.

`decide/repeat.py` decides which steps are left out. Their batches are drawn but not trained on, and they count as
skipped steps: the schedule follows the data. Checkpoints of undone steps become evidence, and the log begins a new
session, as for a resumed run, so that readers drop the rows of the undone steps.

If no moment in memory is old enough, for example after a restart, the run returns to a checkpoint. If the data cannot
be rewound, the run returns to earlier weights only, and this is logged once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from surefoot.core.random_state import set_streams
from surefoot.keep.position.data import DataPlace, place_of, rewind, why_not_back_to, why_not_repeatable
from surefoot.keep.snapshots import Moment, Snapshot
from surefoot.keep.staging import stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.decide.agreement import Ranks
    from surefoot.decide.repeat import RepeatState
    from surefoot.guard.persistence import RunPersistence
    from surefoot.guard.run_history import RunHistory
    from surefoot.guard.run_state import MomentTree, RunTree
    from surefoot.guard.step_results import StepResults
    from surefoot.keep.position.data import PositionState
    from surefoot.keep.staging import Place
    from surefoot.types import Decision, StepRecord

log = logging.getLogger("surefoot")


@dataclass(frozen=True)
class MomentTarget:
    """A moment to return to: a snapshot in memory, or a checkpoint."""

    step: int
    snapshot: Snapshot | None
    tree: RunTree | None

    @property
    def data(self) -> PositionState:
        """The data position."""
        if self.snapshot is not None and self.snapshot.moment is not None:
            return self.snapshot.moment.place.state
        assert self.tree is not None
        return self.tree["data"]

    @property
    def where(self) -> str:
        """A description of the moment."""
        kept = "kept in memory" if self.tree is None else "from its checkpoint"
        return f"the moment before step {self.step}, {kept}"


@dataclass(frozen=True)
class PendingReturn:
    """A return that was decided. It is completed when the next batch is requested."""

    target: MomentTarget
    plan: RepeatState


class Repeats:
    """Keeps the moments of one run, returns to them, and leaves out steps."""

    def __init__(
        self,
        persistence: RunPersistence,
        history: RunHistory,
        ranks: Ranks,
        on_back: Callable[[int], None] | None,
    ) -> None:
        """Repeat the steps of a run.

        Args:
            persistence: its snapshots, checkpoints and data position.
            history: its steps, and the budgets that decide what is repeated.
            ranks: the processes that train together.
            on_back: called with the step that the run has returned to.
        """
        self._persistence, self._history, self._ranks = persistence, history, ranks
        self._on_back = on_back
        self._results: StepResults | None = None
        self._pending: PendingReturn | None = None

    def follow(self, results: StepResults) -> None:
        """Use these results, which belong to the steps of the run."""
        self._results = results

    @property
    def is_returning(self) -> bool:
        """Whether a return was decided, and the next batch has not been requested yet."""
        return self._pending is not None

    def forget(self) -> None:
        """A checkpoint is loaded: drop a pending return."""
        self._pending = None

    # ---- between two batches ----------------------------------------------------------------------------------------

    def take_moment(self) -> None:
        """Keep this moment if a snapshot is due, or if the last one belongs to an earlier loop."""
        ring, position = self._persistence.weights.ring, self._persistence.run_state.position
        if ring is None or self._results is None or position.pending or not self._history.healthy:
            return
        step, newest = self._results.steps, ring.newest
        if why_not_repeatable(position) is not None:
            ring.take_if_due(step)
        elif newest is None or newest.moment is None or why_not_back_to(position, newest.moment.place.state):
            ring.take(step, self._moment)
        else:
            ring.take_if_due(step, self._moment)

    def _moment(self, place: Place) -> Moment:
        state = self._persistence.run_state
        return Moment(stage(state.gather_moment(), place), place_of(state.position))

    def leaves_out_next(self) -> bool:
        """Whether to leave out the batches of the next step."""
        state = self._history.budgets.repeats.state
        return state is not None and self._results is not None and self._results.steps in state.left_out

    # ---- a return ---------------------------------------------------------------------------------------------------

    def begin(self, results: StepResults, record: StepRecord, decision: Decision) -> str | None:
        """Begin a return to an earlier moment; returns a description, or `None` if the steps are not repeated."""
        data, repeats = self._persistence.data, self._history.budgets.repeats
        before, ring = cast("int", decision.before), self._persistence.weights.ring
        oldest = min(before, *ring.steps) if ring is not None and ring.steps else before
        plan = repeats.plan(decision, record.signals.step, results.steps, oldest, self._history.history)
        if plan is None:
            return None
        why_not = data.why_not_repeated() or why_not_repeatable(self._persistence.run_state.position)
        if why_not is None and plan.left_out and not data.windows.have_one_step_each:
            why_not = "several steps use one batch, so a single step cannot be left out"
        # Every rank gets here, and no rank may return alone.
        if self._ranks.any(why_not is not None):
            self._explain(record, why_not or "another rank cannot rewind its data")
            return None
        target = self._target(plan.begins, min(before, plan.begins))
        step = -1 if target is None else target.step
        if self._ranks.any(target is None) or not self._ranks.same(step):
            self._explain(
                record, "there is no earlier moment from before the problem in the current loop over the data"
            )
            return None
        assert target is not None
        self._persistence.undo_saves(target.step)
        self._write_weights(target)
        # Whether a test has shown anything about earlier steps depends on the moment.
        self._pending = PendingReturn(target, plan._replace(begins=target.step) if plan.is_test else plan)
        without = f" without the batches of {_steps(plan.left_out)}" if plan.left_out else ""
        return f"{target.where}; steps {target.step} to {results.steps - 1} are repeated{without}"

    def _target(self, onset: int, before: int) -> MomentTarget | None:
        """The newest moment that is old enough, or else a newer one from before the problem."""
        position, ring = self._persistence.run_state.position, self._persistence.weights.ring
        in_memory = [
            MomentTarget(each.step, each, None)
            for each in (ring.moments_before(onset) if ring is not None else [])
            if each.moment is not None and why_not_back_to(position, each.moment.place.state) is None
        ]
        old_enough = [each for each in in_memory if each.step <= before]
        if not self._ranks.any(not old_enough):
            return old_enough[0]
        return self._saved(before) or next(iter(in_memory), None)

    def _saved(self, before: int) -> MomentTarget | None:
        """The newest good checkpoint that is old enough, and whose data position can be restored."""
        position = self._persistence.run_state.position
        for step, tree in self._persistence.weights.good_checkpoints(before):
            if not self._ranks.any(why_not_back_to(position, tree["data"]) is not None):
                return MomentTarget(step, None, tree)
        return None

    def _explain(self, record: StepRecord, why_not: str) -> None:
        self._history.warn_once(
            record.signals,
            "recovery.not-repeated",
            f"a return restores earlier weights and does not repeat steps: {why_not}",
        )

    def _write_weights(self, target: MomentTarget) -> None:
        weights = self._persistence.weights
        if target.snapshot is not None and weights.ring is not None:
            weights.ring.write_back(target.snapshot)
        elif target.tree is not None:
            weights.load_weights(target.tree)

    def go_back(self) -> None:
        """Restore the rest of the pending moment, if there is one, before the next batch is drawn."""
        pending, self._pending = self._pending, None
        if pending is None or self._results is None:
            return
        target, reached = pending.target, self._results.steps
        if why_not_back_to(self._persistence.run_state.position, target.data) is not None:
            self._history.budgets.repeats.give_up()  # another loop draws now; only the weights are restored
            return
        self._persistence.undo_saves(target.step)  # the loop may have saved in the meantime
        counts, by_kind = dict(self._history.counts), dict(self._history.by_kind)
        budgets = self._history.budgets
        rates = budgets.rates.state
        if target.snapshot is not None and target.snapshot.moment is not None:
            self._write_weights(target)
            moment = target.snapshot.moment
            moment.rest.wait()
            tree: MomentTree = moment.rest.tree
            state = self._persistence.run_state
            state.load_moment(tree)
            rewind(state.position, moment.place)
            set_streams(tree["streams"])
        elif target.tree is not None:
            self._load_checkpoint(target.tree)
        _recount(self._history, target.step, reached, counts, by_kind)
        budgets.repeats.state = pending.plan._replace(until=max(pending.plan.until, reached))
        budgets.rates.state = rates  # a raised rate is limited from its first step on
        if self._on_back is not None:
            self._on_back(target.step)

    def _load_checkpoint(self, tree: RunTree) -> None:
        state, weights = self._persistence.run_state, self._persistence.weights
        weights.forget_snapshots()
        state.load(tree)
        saved: dict[Any, Any] = tree["data"]["generators"]["saved"]
        generators = {int(entry): each for entry, each in saved.items()}
        rewind(state.position, DataPlace(tree["data"], tree["data"]["started"], generators))
        set_streams(tree["streams"])


def _recount(history: RunHistory, step: int, reached: int, counts: dict[str, int], by_kind: dict[str, int]) -> None:
    """The run has returned to `step`, whose state is loaded, and repeats the steps up to `reached`.

    `counts` and `by_kind` are the values before the return. Counts of observations are kept, the others start again.
    Actions at undone steps stay among the incidents, marked as such.
    """
    while history.history and history.history[-1].signals.step >= step:
        history.history.pop()
    for place, incident in enumerate(history.incidents):
        if incident.step >= step and incident.action not in ("none", "repeat"):
            history.incidents[place] = replace(incident, action="undone")
    history.by_kind = by_kind
    history.counts["alarms"] = counts["alarms"]
    history.counts["repeated"] = counts.get("repeated", 0) + reached - step


def _steps(steps: tuple[int, ...]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps == tuple(range(steps[0], steps[-1] + 1)):
        return f"steps {steps[0]} to {steps[-1]}"
    return f"steps {', '.join(map(str, steps))}"
