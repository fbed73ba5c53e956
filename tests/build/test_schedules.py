import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.build import (
    warmup_constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_stable_decay,
    warmup_step,
)

WARMUP, TOTAL = 10, 100


def optimizer(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (0.5,)]
    return torch.optim.SGD(groups)


def rates_of(make, steps, *base):
    chosen = optimizer(*base)
    scheduler = make(chosen)
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in chosen.param_groups])
        chosen.step()
        scheduler.step()
    return seen


def ramp(step):
    return (step + 1) / (WARMUP + 1)


SCHEDULES = {
    "constant": (lambda o: warmup_constant(o, WARMUP), lambda s: 1.0),
    "linear": (lambda o: warmup_linear(o, WARMUP, TOTAL), lambda s: max(0.0, 1 - s / 90)),
    "linear with floor": (lambda o: warmup_linear(o, WARMUP, TOTAL, floor=0.2), lambda s: max(0.2, 1 - 0.8 * s / 90)),
    "cosine": (lambda o: warmup_cosine(o, WARMUP, TOTAL), lambda s: 0.5 * (1 + math.cos(math.pi * min(1, s / 90)))),
    "cosine with floor": (
        lambda o: warmup_cosine(o, WARMUP, TOTAL, floor=0.1),
        lambda s: 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, s / 90))),
    ),
    "cosine with restarts": (
        lambda o: warmup_cosine(o, WARMUP, TOTAL, restarts=2),
        lambda s: 0.5 * (1 + math.cos(math.pi * (s % 30) / 30)) if s < 90 else 0.0,
    ),
    "cosine with growing cycles": (
        lambda o: warmup_cosine(o, WARMUP, TOTAL, restarts=1, cycle_growth=2.0),
        lambda s: 0.5 * (1 + math.cos(math.pi * (s / 30 if s < 30 else (s - 30) / 60))) if s < 90 else 0.0,
    ),
    "step": (lambda o: warmup_step(o, WARMUP, [40, 70], gamma=0.1), lambda s: 0.1 ** ((s >= 30) + (s >= 60))),
    "inverse sqrt": (lambda o: warmup_inverse_sqrt(o, WARMUP), lambda s: math.sqrt(10 / (10 + s))),
    "stable decay": (
        lambda o: warmup_stable_decay(o, WARMUP, TOTAL, 20),
        lambda s: 1.0 if s < 70 else max(0.0, 1 - (s - 70) / 20),
    ),
    "stable 1-sqrt": (
        lambda o: warmup_stable_decay(o, WARMUP, TOTAL, 20, floor=0.05, shape="1-sqrt"),
        lambda s: 1.0 if s < 70 else 0.05 + 0.95 * (1 - math.sqrt(min(1, (s - 70) / 20))),
    ),
}
every_schedule = pytest.mark.parametrize(("make", "after"), SCHEDULES.values(), ids=SCHEDULES)


@every_schedule
def test_the_rate_equals_its_closed_form_at_every_step_in_every_group(make, after):
    for step, seen in enumerate(rates_of(make, TOTAL + 20, 0.5, 0.01)):
        factor = ramp(step) if step < WARMUP else after(step - WARMUP)
        assert seen == pytest.approx([0.5 * factor, 0.01 * factor], rel=1e-12, abs=1e-15), step


@every_schedule
def test_the_first_step_learns_and_so_does_the_last(make, after):
    seen = rates_of(make, TOTAL)
    assert seen[0][0] > 0.0
    assert seen[-1][0] > 0.0


@every_schedule
@pytest.mark.parametrize("stop", [3, WARMUP, 55])
def test_a_resumed_run_continues_bitwise(make, after, stop):
    whole = rates_of(make, TOTAL)
    chosen = optimizer()
    scheduler = make(chosen)
    for _ in range(stop):
        chosen.step()
        scheduler.step()
    file = io.BytesIO()
    torch.save({"optimizer": chosen.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = optimizer()
    again = make(resumed)
    resumed.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["scheduler"])
    seen = []
    for _ in range(stop, TOTAL):
        seen.append([group["lr"] for group in resumed.param_groups])
        resumed.step()
        again.step()
    assert seen == whole[stop:]


def test_a_first_rate_of_zero_is_there_for_who_asks():
    seen = rates_of(lambda o: warmup_cosine(o, WARMUP, TOTAL, start=0.0), WARMUP + 1)
    assert seen[0] == [0.0]
    assert seen[WARMUP] == [0.5]


def test_no_warmup_starts_at_the_peak():
    assert rates_of(lambda o: warmup_cosine(o, 0, TOTAL), 1) == [[0.5]]


@given(warmup=st.integers(0, 50), span=st.integers(1, 200), floor=st.floats(0, 1), restarts=st.integers(0, 5))
def test_the_factor_stays_between_zero_and_one_for_any_settings(warmup, span, floor, restarts):
    seen = rates_of(lambda o: warmup_cosine(o, warmup, warmup + span, floor=floor, restarts=restarts), 20, 1.0)
    assert all(0.0 <= rate <= 1.0 for (rate,) in seen)
    assert seen[0][0] > 0.0


def test_a_run_can_be_made_longer_on_resume():
    chosen = optimizer()
    short = warmup_linear(chosen, 0, 10)
    for _ in range(5):
        chosen.step()
        short.step()
    longer = warmup_linear(optimizer(), 0, 20)
    longer.load_state_dict(short.state_dict())
    longer.optimizer.step()
    longer.step()
    assert longer.get_last_lr() == pytest.approx([0.5 * (1 - 6 / 20)])


def test_a_tensor_rate_is_scheduled_in_place():
    chosen = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    scheduler = warmup_linear(chosen, 4, 10)
    chosen.step()
    scheduler.step()
    assert float(chosen.param_groups[0]["lr"]) == pytest.approx(0.5 * 2 / 5)


def test_a_scheduler_can_be_copied_and_pickled():
    scheduler = warmup_cosine(optimizer(), WARMUP, TOTAL)
    assert copy.deepcopy(scheduler).get_last_lr() == scheduler.get_last_lr()
    assert pickle.loads(pickle.dumps(scheduler)).get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda o: warmup_cosine(o, 100, 100), "total_steps"),
        (lambda o: warmup_cosine(o, 0, 10, floor=3e-4 * 1e5), "fraction"),
        (lambda o: warmup_cosine(o, 0, 10, restarts=-1), "restarts"),
        (lambda o: warmup_linear(o, -1, 10), "negative"),
        (lambda o: warmup_constant(o, 5, start=2.0), "start"),
        (lambda o: warmup_step(o, 50, [40]), "after the warm-up"),
        (lambda o: warmup_step(o, 5, [40, 30]), "rise"),
        (lambda o: warmup_step(o, 5, [40], gamma=0.0), "gamma"),
        (lambda o: warmup_inverse_sqrt(o, 0), "at least 1"),
        (lambda o: warmup_stable_decay(o, 10, 100, 91), "decay_steps"),
        (lambda o: warmup_stable_decay(o, 10, 100, 5, shape="cubic"), "shape"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_the_reason(make, says):
    with pytest.raises(ValueError, match=says):
        make(optimizer())


def test_resume_is_exact_from_the_first_step_when_both_states_are_loaded_after_building():
    def built():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, warmup_cosine(optimizer, 5, 20)

    optimizer, scheduler = built()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    resumed, schedule = built()
    resumed.load_state_dict(optimizer.state_dict())
    schedule.load_state_dict(scheduler.state_dict())
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 4 / 6
