"""What optimizers divide by, decay, remember and clip, on real scripts; and settings that are unusual on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from recorded import falling, look, moves, optimizer, parameter, run
from surefoot.diagnose.rules import optimizer_settings
from watched import CLASSES, FIT, LOOP, NET, VALUES

if TYPE_CHECKING:
    from pathlib import Path

    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"
FITTED = VALUES + "loss_of = F.mse_loss\n"


def paced(rate: str, optimizer: str = "Adam", more: str = "") -> str:
    made = f"optim.{optimizer}(model.parameters(), lr={rate}{more})"
    return NET.replace("optim.Adam(model.parameters(), lr=1e-2)", made)


# What the optimizer divides by, decays, and remembers


def test_an_eps_that_outweighs_the_second_moment_is_named(watch: Nursery) -> None:
    run = watch(START, paced("1e-3", more=", eps=10.0"), LOOP)
    found = run.names_first(
        "optim.epsilon", step=1, at="|torch.optim.Adam", evidence={"eps", "root_second_moment", "ratio"}
    )
    assert found.evidence["ratio"] > 100


def test_an_eps_of_zero_where_a_second_moment_is_zero_is_named(watch: Nursery) -> None:
    silent = "x[:, 7] = 0.0"
    run = watch(START, silent, paced("1e-2", more=", eps=0.0"), LOOP)
    found = run.names_first("optim.epsilon", step=1, at="|torch.optim.Adam", evidence={"eps", "parameters"})
    assert found.evidence["parameters"] == ["0.weight"]


def test_an_eps_that_leaves_the_run_learning_is_fine(watch: Nursery) -> None:
    assert watch(START, paced("1e-2", more=", eps=1e-3"), LOOP).causes == []


def test_a_large_eps_that_does_no_harm_is_mentioned(watch: Nursery) -> None:
    run = watch(START, paced("3.0", more=", eps=10.0"), LOOP)
    assert run.causes == []
    found = run.finding("optim.epsilon")
    assert found.severity == "info"
    assert found.evidence["ratio"] > 100


LONG = LOOP.replace("range(60)", "range(400)")


def test_an_eps_that_makes_the_steps_too_small_is_named_though_the_run_learns(watch: Nursery) -> None:
    run = watch(START, paced("3e-3", more=", eps=0.3"), LONG)
    assert run.diagnosis.findings[0].cause == "optim.epsilon"
    assert run.diagnosis.findings[0].severity != "info"


@pytest.mark.parametrize(("optimizer", "rate", "decay"), [("SGD", "0.1", "1.0"), ("AdamW", "1e-2", "10.0")])
def test_a_decay_that_outweighs_the_gradient_is_named(watch: Nursery, optimizer: str, rate: str, decay: str) -> None:
    run = watch(START, paced(rate, optimizer, f", weight_decay={decay}"), LOOP)
    found = run.names_first(
        "optim.weight-decay",
        step=run.facts["sampled_steps"][-1]["step"],
        at="|torch.optim.",
        evidence={"weight_decay", "decay_to_gradient", "norm_left"},
    )
    assert found.evidence["norm_left"] < 0.6


def test_a_decay_that_only_brings_back_what_too_large_steps_threw_out_is_not_the_cause(watch: Nursery) -> None:
    loop = LOOP.replace("range(60)", "range(300)")
    run = watch(FITTED, FIT.replace("Adam", "AdamW").replace("1e-2", "10.0, weight_decay=0.02"), loop)
    assert run.first.cause == "lr.too-high"
    assert "optim.weight-decay" not in run.causes


def test_a_usual_decay_is_fine(watch: Nursery) -> None:
    assert watch(START, paced("1e-2", "AdamW", ", weight_decay=0.1"), LOOP).causes == []


STATE = """
held = optimizer.state_dict()
FRESH
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
optimizer.load_state_dict(held)
"""


def test_moments_loaded_beside_fresh_weights_are_stale(watch: Nursery) -> None:
    fresh = "model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))"
    run = watch(START, NET, LOOP, STATE.replace("FRESH", fresh), LOOP)
    found = run.finding("optim.stale-state")
    assert found.cause in run.causes
    assert found.evidence["age"] == 60
    assert found.step == 60


def test_moments_emptied_while_their_age_goes_on_are_stale(watch: Nursery) -> None:
    emptied = LOOP + "    if step == 35:\n        for held in optimizer.state.values(): held['exp_avg_sq'].mul_(1e-6)\n"
    run = watch(START, NET, emptied)
    found = run.names_first(
        "optim.stale-state", step=run.look_after(36), at="0.weight", evidence={"parameters", "share_of_least"}
    )
    assert found.evidence["share_of_least"] < 0.3


def test_moments_emptied_and_half_refilled_when_they_are_seen_are_stale(watch: Nursery) -> None:
    """Nothing lowers a second moment below what its decay leaves of it, so a fall by half is proof enough."""
    emptied = LOOP.replace("range(60)", "range(400)") + (
        "    if step == 300:\n        for held in optimizer.state.values(): held['exp_avg_sq'].mul_(0.2)\n"
    )
    run = watch(START, NET.replace("lr=1e-2", "lr=1e-2, betas=(0.9, 0.9999)"), emptied)
    assert "optim.stale-state" in run.causes
    assert 0.3 < run.finding("optim.stale-state").evidence["share_of_least"] < 0.7


@pytest.mark.parametrize("settings", [[{"lr": 1.0}], [{"lr": 0.01, "betas": [0.9, 0.999]}, {"betas": [0.9, 0.95]}]])
def test_moments_that_decay_faster_than_those_of_the_first_group_are_fine(settings: list[dict[str, Any]]) -> None:
    """Adadelta and RMSprop have no betas, and another group may have its own."""

    def seen(step: int, size: float) -> dict[str, Any]:
        rows = [{"id": number, "grad": 1.0, "ratio": 0.01, "second_moment": size, "age": step} for number in (0, 1)]
        return look(step, steps=[{"optimizer": 0, "rows": rows}])

    looks = [seen(10, 1.0), seen(20, 0.6), seen(30, 0.4)]
    facts = {"parameters": [parameter(0), parameter(1)], "sampled_steps": looks}
    held = [optimizer(falling(60), settings=settings)]
    assert optimizer_settings.stale_state(run(falling(60), optimizers=held, **facts)) is None
    held = [optimizer(falling(60), settings=[{"lr": 0.01, "betas": [0.9, 0.999]}])]
    assert optimizer_settings.stale_state(run(falling(60), optimizers=held, **facts)) is not None
    halves = [
        parameter(number) | {"dtype": "float16"} for number in (0, 1)
    ]  # where the squares of small gradients are 0
    assert optimizer_settings.stale_state(run(falling(60), optimizers=held, **facts | {"parameters": halves})) is None


def test_moments_loaded_with_their_weights_are_fine(watch: Nursery) -> None:
    same = "model.load_state_dict(model.state_dict())"
    run = watch(START, NET, LOOP, STATE.replace("FRESH", same), LOOP)
    assert "optim.stale-state" not in run.causes


WEIGHTS_COPIED = """
saved = [p.detach().clone() for p in model.parameters()]
held = optimizer.state_dict()
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
COPY
optimizer.load_state_dict(held)
"""


@pytest.mark.parametrize(
    "copy",
    [
        "for p, s in zip(model.parameters(), saved): p.data.copy_(s)",
        "with torch.no_grad(): [p.copy_(s) for p, s in zip(model.parameters(), saved)]",
    ],
)
def test_moments_loaded_beside_weights_that_were_copied_are_fine(watch: Nursery, copy: str) -> None:
    run = watch(START, NET, LOOP, WEIGHTS_COPIED.replace("COPY", copy), LOOP)
    assert "optim.stale-state" not in run.causes


STABILIZED = """
import surefoot as sf

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=sf.CheckpointManager(FOLDER, every_steps=30))
for step in stabilizer.resume(range(120)):
    rows = torch.randint(len(x), (32,))
    stabilizer.backward(F.cross_entropy(model(x[rows]), y[rows]))
    stabilizer.step()
    if stabilizer.steps == STOP:
        stabilizer.save()
        break
"""


def test_the_exact_resume_of_a_stabilizer_is_fine(watch: Nursery, tmp_path: Path) -> None:
    saving = STABILIZED.replace("FOLDER", repr(str(tmp_path / "kept")))
    first = watch(START, saving.replace("STOP", "60"))
    resumed = watch(START, saving.replace("STOP", "None"))
    assert (first.facts["steps"], resumed.facts["steps"]) == (60, 60)
    assert resumed.causes == []
    assert {"optimizer-loaded", "model-loaded"} <= {event["event"] for event in resumed.facts["events"]}
    assert all(parameter["loaded"] for parameter in resumed.facts["parameters"])


# Clipping


def clipped(limit: str) -> str:
    clip = f"    nn.utils.clip_grad_norm_(model.parameters(), {limit})\n    optimizer.step"
    return LOOP.replace("    optimizer.step", clip)


def test_clipping_nearly_everything_away_is_named(watch: Nursery) -> None:
    run = watch(START, paced("0.1", "SGD"), clipped("1e-3"))
    found = run.names_first(
        "clip.saturated", step=0, at="|clip_grad_norm_", evidence={"clipped", "norm_to_limit", "limit"}
    )
    assert found.evidence["limit"] == 1e-3
    assert found.evidence["clipped"] == 1


def test_clipping_that_makes_the_steps_too_small_is_named_though_the_run_learns(watch: Nursery) -> None:
    run = watch(START, paced("0.1", "SGD", ", momentum=0.9"), clipped("1e-2").replace("range(60)", "range(400)"))
    assert run.causes == ["clip.saturated"]


@pytest.mark.parametrize(("optimizer", "rate", "limit"), [("SGD", "300.0", "1e-3"), ("Adam", "1e-2", "1e-3")])
def test_tight_clipping_with_a_rate_to_match_is_fine(watch: Nursery, optimizer: str, rate: str, limit: str) -> None:
    assert watch(START, paced(rate, optimizer), clipped(limit)).causes == []


def test_decay_is_measured_by_all_weights_together_if_small_matrices_hide_it() -> None:
    norms = [(5.5, 0.7), (5.6, 0.7), (4.2, 2.8), (1.9, 1.4), (2.1, 1.5), (1.8, 1.3)]
    held = [
        parameter(number) | {"first": {"norm": first}, "last": {"norm": last}}
        for number, (first, last) in enumerate(norms)
    ]
    assert optimizer_settings._norm_left(run(falling(), parameters=held)) == pytest.approx(0.4, abs=0.02)
    assert optimizer_settings._norm_left(run(falling(), parameters=[])) == 1.0


@pytest.mark.parametrize(("kind", "severity"), [("SGD", "error"), ("AdamW", "info")])
def test_clipping_is_only_mentioned_if_steps_do_not_depend_on_the_size_of_gradients(kind: str, severity: str) -> None:
    losses = [25.0 - 0.01 * step for step in range(40)]
    held = optimizer(losses) | {"type": kind}
    held["series"] |= {"clip_norm": [22.0] * 40, "clip_limit": [1.0] * 40}
    found = optimizer_settings.clip_saturated(run(losses, optimizers=[held]))
    assert found is not None
    assert found.severity == severity


def test_a_policy_whose_loss_rises_is_not_said_to_be_held_back_by_its_clipping() -> None:
    losses = [25.0 + 0.02 * step for step in range(400)]
    held = optimizer(losses)
    held["series"] |= {"clip_norm": [22.0] * 400, "clip_limit": [0.5] * 400}
    assert optimizer_settings.clip_saturated(run(losses, optimizers=[held])) is not None
    assert (
        optimizer_settings.clip_saturated(
            run(losses, optimizers=[held], policy=[{"step": 0, "backward": 0, "entropy": 0.6, "actions": 2}])
        )
        is None
    )


@pytest.mark.parametrize(("weight", "end", "is_named"), [(5.0, 0.6, True), (5.0, 0.2, False), (0.5, 0.6, False)])
def test_a_decay_as_strong_as_the_gradient_is_named_in_a_run_that_learned_if_much_is_left(
    weight: float, end: float, is_named: bool
) -> None:
    rows = [{"id": 0, "grad": 1.0, "weight": weight, "update": 0.1, "ratio": 0.02}]
    looks = [look(step, steps=[{"optimizer": 0, "rows": rows, "lr": [0.1]}]) for step in range(0, 80, 10)]
    held = optimizer(losses := falling(end=end), type="SGD", settings=[{"lr": 0.1, "weight_decay": 0.1}])
    claim = optimizer_settings.weight_decay(run(losses, optimizers=[held], sampled_steps=looks))
    assert (claim.severity if claim is not None else None) == ("warning" if is_named else None)


def test_clipping_does_not_hold_back_steps_that_are_large() -> None:
    losses = [2.0 + 0.02 * step for step in range(400)]
    held = optimizer(losses)
    held["series"] |= {"clip_norm": [22.0] * 400, "clip_limit": [0.5] * 400}
    for ratio, is_named in ((0.1, False), (1e-3, True)):
        looks = [look(step, steps=moves(ratio)) for step in range(0, 400, 50)]
        claim = optimizer_settings.clip_saturated(run(losses, optimizers=[held], sampled_steps=looks))
        assert (claim is not None) == is_named
