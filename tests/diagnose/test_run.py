"""What several rules read off a run: chance, phases, turns, and losses that say nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from recorded import falling, look, optimizer, parameter, run
from surefoot.diagnose.run import RecordedRun
from surefoot.record.facts import ModelLoadedEvent, SpikeEvent
from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery


def classified(step: int, value: float, **more: Any) -> dict[str, Any]:
    note = {"op": "cross_entropy", "grad": True, "site": "train.py:9", "reduction": "mean", "value": value}
    note |= {"labels": {"0": 16, "1": 16}, "target": {"shape": [32]}} | more
    root = {"site": "train.py:10", "step": step, "factor": 1.0, "sign": {"function": "cross_entropy", "factor": 1.0}}
    return look(step, notes={"losses": [note]}, roots=[root])


def test_chance_is_the_entropy_of_the_labels() -> None:
    held = run(sampled_steps=[classified(step, 1.0) for step in range(4)])
    assert held.sampled.chance == pytest.approx(math.log(2))


@pytest.mark.parametrize("more", [{"reduction": "sum"}, {"weighted": True}, {"smoothing": 0.1}, {"labels": None}])
def test_chance_is_not_known_for_losses_on_another_scale(more: dict[str, Any]) -> None:
    assert run(sampled_steps=[classified(step, 1.0, **more) for step in range(4)]).sampled.chance is None


def test_chance_is_known_for_a_sum_that_is_divided_by_its_number_of_targets() -> None:
    looks = [classified(step, 32.0, reduction="sum", valid=32) for step in range(4)]
    assert run(sampled_steps=looks).sampled.chance is None
    for each in looks:
        each["roots"][0]["sign"]["factor"] = 1 / 32
    assert run(sampled_steps=looks).sampled.chance == pytest.approx(math.log(2))
    for each in looks:  # two were counted that the model leaves out
        each["roots"][0]["sign"]["factor"] = 1 / 34
    assert run(sampled_steps=looks).sampled.chance == pytest.approx(math.log(2) * 32 / 34)


def test_a_second_phase_on_trained_weights_is_continued_and_a_fresh_model_is_not() -> None:
    phases = [optimizer(falling(60), 0), optimizer([0.2] * 60, 1, created_at_step=60)]
    trained = parameter(0, optimizers=(0, 1)) | {"loaded": False}
    fresh = parameter(0, optimizers=(1,)) | {"loaded": False}
    assert run(optimizers=phases, parameters=[trained]).curve.continued
    assert not run(optimizers=phases, parameters=[fresh]).curve.continued


def test_turns_taken_by_two_optimizers_are_adversarial_and_phases_are_not() -> None:
    turns = [optimizer(falling(60), 0), optimizer(falling(60), 1)]
    phases = [optimizer(falling(60), 0), optimizer(falling(60), 1, created_at_step=60)]
    assert run(optimizers=turns, steps=60).adversarial
    assert not run(optimizers=phases, steps=120).adversarial


@pytest.mark.parametrize(("lowest", "ratios", "is_blind"), [(-1.2, 1, True), (0.0, 1, False), (-1.2, 0, False)])
def test_a_loss_of_importance_ratios_times_advantages_is_blind(lowest: float, ratios: int, is_blind: bool) -> None:
    other = {"shape": [8, 1], "dtype": "float32", "grad": False, "nonfinite": 0, "min": lowest, "max": 1.4}
    place = {"site": "train.py:9", "module": "", "index": 1}
    product = {"op": "mul", "history": ["exp", "log"], "other": other, "other_binary": False, **place}
    ratio = {"op": "exp", "largest": 1.0, "mean": 1.0, "kl": 0.0, "count": 64, **place}
    looks = [look(step, notes={"products": [product], "ratios": [ratio] * ratios}) for step in range(4)]
    assert run(sampled_steps=looks).blind == is_blind


def test_a_loss_whose_targets_come_from_a_model_is_blind() -> None:
    looks = [classified(step, 1.0, target_from_model=True) for step in range(4)]
    assert run(sampled_steps=looks).blind
    assert not run(sampled_steps=[classified(step, 1.0) for step in range(4)]).blind


def test_events_are_asked_for_by_their_type() -> None:
    spike = {"event": "spike", "step": 3, "value": 9.0, "level": 1.0}
    held = run(events=[{"event": "model-loaded", "step": 1}, spike])
    assert [event.step for event in held.events(SpikeEvent)] == [3]
    assert [event.step for event in held.events(ModelLoadedEvent)] == [1]


def test_the_main_optimizer_is_the_one_that_stepped_most() -> None:
    held = run(optimizers=[optimizer(falling(60), 0), optimizer(falling(20), 1)])
    assert held.main is held.facts.optimizers[0]
    assert held.series is held.facts.optimizers[0].series


def test_a_loop_without_an_optimizer_is_read_by_its_backwards() -> None:
    held = run(optimizers=[], backward_series={"loss": [2.0, 1.0, "nan"], "step": [0, 1, 2]})
    assert held.curve.finite == [2.0, 1.0]
    assert held.curve.first_bad == 2
    assert held.lr == []


def test_a_loss_that_is_maximized_is_turned_round() -> None:
    held = run(optimizers=[optimizer([-2.0, -1.0], settings=[{"maximize": True}])])
    assert held.curve.values == [2.0, 1.0]


def test_a_model_that_begins_far_below_chance_was_trained_before() -> None:
    def begins(value: float, **more: Any) -> bool:
        shape = {"distribution": {"classes": 65}, "labels": None, "valid": 32} | more
        looks = [classified(step, value, **shape) for step in range(4)]
        return run(sampled_steps=looks, optimizers=[optimizer([value] * 60, 0)]).curve.continued

    assert begins(1.9)
    assert not begins(4.2)
    assert not begins(1.9, reduction="sum")
    assert not begins(0.5, labels={"0": 28, "1": 4}), "what most rows are can be said without training"


PHASES = """
loss_of = F.cross_entropy
LOOP
model[0].requires_grad_(False)
optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-5)
LOOP
"""


def test_updates_are_those_of_the_phase_whose_curve_is_judged(watch: Nursery) -> None:
    run = watch(CLASSES, NET.replace("1e-2", "0.1"), PHASES.replace("LOOP", LOOP))
    recorded = RecordedRun(*run.loaded)
    assert recorded.main is not None
    assert recorded.main.number == 1
    assert max(recorded.sampled.update_ratios()) > 0.1
    assert max(recorded.update_ratios()) < 1e-3


TRIALS = """
for rate in (RATES):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_a_search_that_ends_with_a_rate_that_learns_nothing_is_judged_by_its_best_training(watch: Nursery) -> None:
    run = watch(CLASSES, TRIALS.replace("RATES", "1e-5, 1e-2, 3e-3, 1e-6"))
    recorded = RecordedRun(*run.loaded)
    assert recorded.main is not None
    assert recorded.main.number == 1
    assert run.causes == []
    assert "The loss of the best of 4 trainings went from" in run.diagnosis.summary


def test_trainings_that_all_learn_nothing_are_no_search_that_succeeded(watch: Nursery) -> None:
    assert watch(CLASSES, TRIALS.replace("RATES", "1e-6, 1e-6, 1e-6")).causes != []


def test_phases_of_one_model_are_no_trials(watch: Nursery) -> None:
    made = "    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))\n"
    run = watch(CLASSES, NET, TRIALS.replace(made, "").replace("RATES", "1e-2, 3e-3, 1e-6"))
    main = RecordedRun(*run.loaded).main
    assert main is not None
    assert main.number == 3
