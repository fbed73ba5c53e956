import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from surefoot.act.loss_scale import TorchLossScaler
from surefoot.core.state_tree import pack, unpack

CPU = torch.device("cpu")
overflows = st.lists(st.booleans(), min_size=10, max_size=60)
mostly_clean = st.lists(st.sampled_from([False] * 6 + [True]), min_size=20, max_size=80)


def scales(scaler, stream, state=None):
    """The scale after each step."""
    state, found = scaler.init() if state is None else state, []
    for overflow in stream:
        state = scaler.update(state, torch.tensor(overflow))
        found.append(scaler.scale_of(state).item())
    return found


@given(st.one_of(overflows, mostly_clean), st.integers(1, 7))
def test_it_moves_as_the_scaler_of_torch_does(stream, interval):
    ours = sf.DynamicLossScaler(growth_interval=interval, floor=2.0**-120, ceiling=2.0**120)
    scale, tracker = torch.full((), 2.0**16), torch.zeros((), dtype=torch.int32)
    expected = []
    for overflow in stream:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, interval)
        expected.append(scale.item())
    assert scales(ours, stream) == expected


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_it_grows_only_after_a_full_window_of_clean_steps(interval):
    scaler = sf.DynamicLossScaler(initial_scale=4.0, growth_interval=interval)
    assert scales(scaler, [False] * (2 * interval)) == [4.0] * (interval - 1) + [8.0] * interval + [16.0]


def test_an_overflow_starts_the_window_again():
    scaler = sf.DynamicLossScaler(initial_scale=64.0, growth_interval=3)
    assert scales(scaler, [False, False, True, False, False, False]) == [64.0, 64.0, 32.0, 32.0, 32.0, 64.0]


def test_hysteresis_waits_for_the_nth_overflow_and_refills_on_growth():
    scaler = sf.DynamicLossScaler(initial_scale=64.0, growth_interval=2, hysteresis=3)
    stream = [True, False, True, True, True, False, False, True, True, True]
    assert scales(scaler, stream) == [64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 32.0, 32.0, 32.0, 16.0]


@given(overflows, st.integers(1, 4), st.integers(1, 3))
def test_the_scale_never_leaves_its_floor_and_ceiling(stream, interval, hysteresis):
    scaler = sf.DynamicLossScaler(
        initial_scale=4.0, growth_interval=interval, hysteresis=hysteresis, floor=3.0, ceiling=10.0
    )
    assert all(3.0 <= scale <= 10.0 for scale in scales(scaler, stream))


def test_floor_and_ceiling_are_reached_exactly():
    scaler = sf.DynamicLossScaler(initial_scale=4.0, growth_interval=1, floor=3.0, ceiling=10.0)
    assert scales(scaler, [True, True, False, False, False]) == [3.0, 3.0, 6.0, 10.0, 10.0]


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.data())
def test_a_saved_scale_continues_where_it_stopped(stream, data):
    scaler = sf.DynamicLossScaler(growth_interval=3, hysteresis=2)
    cut = data.draw(st.integers(1, len(stream) - 1))
    state = scaler.init()
    for overflow in stream[:cut]:
        state = scaler.update(state, torch.tensor(overflow))
    again = unpack(scaler.init(), pack(state))
    assert scales(scaler, stream[cut:], again) == scales(scaler, stream)[cut:]


# ---- over torch's own -----------------------------------------------------------------------------------------------


@given(mostly_clean, st.integers(1, 5))
def test_a_grad_scaler_that_is_driven_moves_as_one_that_is_updated(stream, interval):
    driven, bare = (torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=interval) for _ in range(2))
    ours = TorchLossScaler(driven, CPU)
    bare._lazy_init_scale_growth_tracker(CPU)
    for overflow in stream:
        ours.update((), torch.tensor(overflow))
        torch._amp_update_scale_(bare._scale, bare._growth_tracker, torch.tensor(float(overflow)), 2.0, 0.5, interval)
        assert driven.state_dict() == bare.state_dict()


def test_a_disabled_grad_scaler_is_refused():
    with pytest.raises(sf.SettingError, match="pass no scaler instead"):
        TorchLossScaler(torch.amp.GradScaler("cpu", enabled=False), CPU)


def training(scaler, overflow_at=(), loss_nan_at=(), steps=6):
    """A run whose gradient is Inf at some steps and whose loss is NaN at others."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stabilizer = sf.TrainingStabilizer(model, optimizer, scaler=scaler, escalation=None)
    records = []
    for step in range(steps):
        before = model.weight.detach().clone()
        loss = model(torch.ones(1, 2)).mean()
        if step in loss_nan_at:
            loss = loss * torch.nan
        stabilizer.backward(loss)
        if step in overflow_at:
            model.weight.grad.view(-1)[0] = torch.inf
        outcome = stabilizer.step()
        records.append((outcome, not torch.equal(before, model.weight)))
    return stabilizer, records


def test_overflow_is_judged_on_the_gradients_and_the_step_is_skipped():
    stabilizer, records = training(sf.DynamicLossScaler(initial_scale=64.0), overflow_at=(2,))
    assert [moved for _, moved in records] == [True, True, False, True, True, True]
    assert [outcome.record.overflow for outcome, _ in records] == [step == 2 for step in range(6)]
    assert [outcome.record.signals.loss_scale for outcome, _ in records] == [64.0] * 3 + [32.0] * 3
    assert stabilizer.counts["overflows"] == 1


def test_an_overflow_is_no_incident():
    stabilizer, _ = training(sf.DynamicLossScaler(initial_scale=64.0), overflow_at=(2,))
    assert [incident for incident in stabilizer.incidents if incident.kind != "clip.before-unscale"] == []


def test_a_loss_that_is_nan_does_not_lower_the_scale():
    stabilizer, records = training(sf.DynamicLossScaler(initial_scale=64.0), loss_nan_at=(2,))
    assert [moved for _, moved in records] == [True, True, False, True, True, True]
    assert {outcome.record.signals.loss_scale for outcome, _ in records} == {64.0}
    assert [incident.kind for incident in stabilizer.incidents] == ["nonfinite"]


def test_a_scale_stuck_at_the_floor_is_reported():
    scaler = sf.DynamicLossScaler(initial_scale=2.0, floor=1.0)
    stabilizer, _ = training(scaler, overflow_at=(1, 2, 3))
    stuck = [incident for incident in stabilizer.incidents if incident.kind == "precision.scaler-stuck"]
    assert [incident.step for incident in stuck] == [2, 3]
    assert stuck[0].evidence["loss_scale"] == 1.0


def test_a_grad_scaler_of_the_users_own_sees_the_overflow():
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0)
    training(theirs, overflow_at=(2,))
    assert theirs.get_scale() == 32.0


def test_scaling_by_a_power_of_two_leaves_the_update_bitwise():
    runs = [[outcome.loss for outcome, _ in training(scaler)[1]] for scaler in (None, sf.DynamicLossScaler(2.0**10))]
    assert runs[0] == runs[1]
    assert all(a > b for a, b in itertools.pairwise(runs[0]))


def test_a_loop_of_ones_own_may_give_a_plain_bool():
    scaler = sf.DynamicLossScaler(initial_scale=8.0, growth_interval=2)
    state, scales = scaler.init(), []
    for overflow in (False, False, True, False):
        state = scaler.update(state, overflow)
        scales.append(float(scaler.scale_of(state)))
    assert scales == [8.0, 16.0, 8.0, 8.0]
