"""How far weights have moved, and whether that is unusual."""

import pytest
import torch

import surefoot as sf
from surefoot.keep.snapshots import SnapshotRing
from surefoot.keep.weight_movement import MovementJumps, ScriptWrites
from trained import Run


def steady(name, first, end):
    """Gradients and rates of the same size all along."""
    return 1.0


def damaged(run, value=30.0):
    with torch.no_grad():
        run.model[2].bias += value


def test_weights_that_train_on_have_not_moved_unusually_and_damaged_ones_have():
    run = Run()
    ring = SnapshotRing(run.state, every_steps=10, keep=2, device_bytes=None)
    for step in (10, 20):
        run.train(10)
        ring.take(step)
    run.train(15)
    ring.note_trouble(35, before=30)
    assert not ring.movement.was_unusual(steady)
    ring.settle()
    damaged(run)
    ring.note_trouble(35, before=30)
    assert ring.movement.was_unusual(steady)


def test_what_happens_after_the_trouble_began_is_not_counted():
    """A harder task has larger gradients, and they move the weights further."""
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (10, 20):
        run.train(10)
        ring.take(step)
    run.train(5)
    ring.note_trouble(25, before=20)
    damaged(run)
    ring.note_trouble(26, before=20)
    assert not ring.movement.was_unusual(steady)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_have_moved(value):
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    for step in (1, 2):
        run.train(1)
        ring.take(step)
    damaged(run, value)
    ring.note_trouble(3, before=2)
    assert ring.movement.was_unusual(steady)


def test_without_two_states_nothing_shows_that_the_weights_have_moved_unusually():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    assert not ring.movement.was_unusual(steady)
    ring.take(1)
    run.train(1)
    ring.note_trouble(2, before=2)
    assert not ring.movement.was_unusual(steady)


def test_a_state_taken_after_the_damage_does_not_hide_it():
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (10, 20, 30):
        run.train(10)
        if step == 30:
            damaged(run)
        ring.take(step)
    run.train(1)
    ring.note_trouble(31, before=26)
    assert ring.movement.was_unusual(steady)


def test_where_nothing_has_moved_yet_a_first_small_move_is_no_damage():
    """As before the first reward of a policy."""
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (10, 20):
        ring.take(step)
    with torch.no_grad():
        run.model[2].bias += 1e-3
    ring.note_trouble(25, before=20)
    assert not ring.movement.was_unusual(steady)


def test_what_is_usual_is_known_when_a_return_has_left_one_state():
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (0, 10, 20):
        ring.take(step)
        run.train(10)
    ring.return_to(15, 0, keep_present=False)
    assert ring.steps == [10]
    run.train(5)
    ring.note_trouble(15, before=12)
    assert not ring.movement.was_unusual(steady)


def test_gradients_that_have_grown_explain_a_longer_way():
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    for step in (10, 20):
        run.train(10)
        ring.take(step)
    run.optimizer.param_groups[0]["lr"] *= 6
    run.train(10)
    ring.note_trouble(30, before=20)
    assert ring.movement.was_unusual(steady)
    assert not ring.movement.was_unusual(lambda name, first, end: 8.0 if end > 20 else 1.0)


@pytest.mark.parametrize(("at_the_last_step", "is_damage"), [(1.0, True), (10.0, False)])
def test_a_large_gradient_at_the_step_of_the_first_high_loss_explains_that_step_alone(at_the_last_step, is_damage):
    """Other data moves the weights from that step on, and damage came before it."""
    run = Run()
    ring = SnapshotRing(run.state, 20, 2, None)
    ring.take(0)
    run.train(20)
    ring.take(20)
    usual = float(torch.linalg.vector_norm(ring.newest.moved))
    weight = next(iter(run.model.parameters()))
    weight.data.add_(6 * 6 * usual / weight.numel() ** 0.5)  # six times as far per step, in six steps
    ring.note_trouble(26, before=21)

    def typical(name, first, end):
        return at_the_last_step if end - first == 1 else 1.0

    assert ring.movement.was_unusual(typical) is is_damage


@pytest.mark.parametrize(("earlier_rate", "is_damage"), [(1.0, False), (6.0, True)])
def test_a_way_as_long_as_in_an_earlier_interval_at_the_same_rate_is_usual(earlier_rate, is_damage):
    """As after each copy of a target network: weights that follow new targets go straight on for a while."""
    run = Run()
    ring = SnapshotRing(run.state, 10, 2, None)
    ring.take(0)
    weight = next(iter(run.model.parameters()))
    for step, way in ((10, 1.0), (20, 6.0), (30, 1.0), (40, 1.0)):
        weight.data.add_(way)
        ring.take(step)
    weight.data.add_(6.0)
    ring.note_trouble(50, before=40)
    assert ring.movement.was_unusual(lambda name, first, end: earlier_rate if end == 20 else 1.0) is is_damage


def test_of_a_model_that_was_rebuilt_since_nothing_is_known():
    run = Run()
    ring = SnapshotRing(run.state, 1, 2, None)
    for step in (1, 2):
        run.train(1)
        ring.take(step)
    damaged(run)
    ring.note_trouble(3, before=2)
    run.model[2] = torch.nn.Linear(8, 1)
    assert [ring.movement.was_unusual(steady, if_unknown) for if_unknown in (False, True)] == [False, True]


def jumps(*moved, norm=10.0):
    watched = MovementJumps()
    found = []
    for number, each in enumerate(moved):
        watched.take(20 * number, 20 * number + 20, torch.tensor([each, 0.0], dtype=torch.float64), torch.tensor(norm))
        found.append(watched.found(20 * number + 26))
    return found


def test_an_interval_that_exceeds_all_before_it_many_times_is_a_jump_once():
    *before, jump, after = jumps(0.05, 0.02, 0.01, 1.0, 1.1)
    assert [*before, after] == [None] * 4
    assert (jump.first, jump.last, jump.times, jump.share) == (60, 80, pytest.approx(20.0), pytest.approx(0.1))
    assert "20 times as far per step from step 60 to 80" in str(jump)


@pytest.mark.parametrize(
    "moved",
    [
        (0.05, 0.02, 1.0),  # too early
        (0.05, 0.02, 0.01, 0.49),  # less than ten times the furthest
        (1e-6, 1e-6, 1e-6, 0.4),  # a rate that was next to nothing is raised: 4 % of the weights
        (0.0, 0.0, 0.0, 1.0),  # nothing has moved before
        (0.05, 0.02, 0.01, float("nan")),
    ],
)
def test_other_intervals_are_none(moved):
    assert jumps(*moved) == [None] * len(moved)


def test_a_rate_a_hundred_times_too_high_is_reported_although_no_loss_shows_it():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    stabilizer = sf.TrainingStabilizer(model, optimizer, recovery=sf.TrainingRecovery())
    for step in range(140):
        optimizer.param_groups[0]["lr"] = 0.1 if 90 <= step < 110 else 1e-3
        stabilizer.backward(model(torch.ones(1, 8)).sum() * 0.01 + torch.sin(torch.tensor(float(step))))
        stabilizer.step()
    (incident,) = stabilizer.incidents
    assert (incident.kind, incident.severity, incident.action) == ("weights.jump", "warning", "none")
    assert 90 <= incident.step <= 120


def record(step, lr=1e-3, grad_norm=1.0, skipped=False):
    return sf.types.StepRecord(sf.types.Signals(step, grad_norm=grad_norm, lr=lr), skipped)


def test_a_jump_that_rates_and_gradients_explain_is_no_reason_to_return():
    jump = jumps(0.05, 0.02, 0.01, 10.0)[-1]
    quiet = [record(step) for step in range(60)]
    assert jump.is_unexplained([*quiet, *map(record, range(60, 80))])
    assert not jump.is_unexplained([*quiet, *(record(step, lr=0.1) for step in range(60, 80))])
    assert not jump.is_unexplained([*quiet, record(60, grad_norm=100.0)])
    assert jump.is_unexplained([*quiet, record(60), record(61, grad_norm=100.0, skipped=True)])
    assert not jump.is_unexplained([*quiet, record(60, lr=None)])


def test_a_jump_that_was_undone_does_not_hide_the_next_one():
    watched = MovementJumps()
    for number, moved in enumerate((0.05, 0.02, 0.01, 1.0)):
        watched.take(20 * number, 20 * number + 20, torch.tensor([moved], dtype=torch.float64), torch.tensor(10.0))
    assert watched.found(85) is None
    assert watched.found(86) is not None
    watched.undo(60)
    watched.take(60, 80, torch.tensor([1.0], dtype=torch.float64), torch.tensor(10.0))
    assert watched.found(86) is not None


def test_writes_of_the_script_between_two_steps_are_found_unless_it_always_writes():
    weights, writes = [torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)], ScriptWrites()

    def step(number, write=None):
        writes.after_step(number, weights)
        if write is not None:
            write()
        writes.before_update(weights)
        with torch.no_grad():
            weights[0].add_(1.0)

    def by_script():
        with torch.no_grad():
            weights[1].fill_(2.0)

    for number in range(20):
        step(number)
    step(20, by_script)
    step(21, lambda: weights[1].data.fill_(3.0))
    assert writes.explain(20, 22)
    assert not writes.explain(10, 20)
    assert not writes.explain(21, 30)
    step(22, by_script)
    assert not writes.explain(22, 24)  # it wrote shortly before, too
    writes.after_step(40, weights)
    by_script()
    writes.forget()
    writes.before_update(weights)
    assert not writes.explain(40, 42)
