"""How far each step goes, on real scripts; and paces that are unusual on purpose."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from recorded import SITE, falling, look, moves, optimizer, run
from surefoot.diagnose.rules import pace
from surefoot.diagnose.rules.scale import attention_logit_growth
from watched import CLASSES, FIT, LOOP, NET, VALUES

if TYPE_CHECKING:
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"
COMPARED = {"step": 0, "op": "mse_loss", "index": 3, "grad": True, "site": SITE, "reduction": "mean"}
"""Outputs that are compared with targets."""
FITTED = VALUES + "loss_of = F.mse_loss\n"


def paced(rate: str, optimizer: str = "Adam", more: str = "") -> str:
    made = f"optim.{optimizer}(model.parameters(), lr={rate}{more})"
    return NET.replace("optim.Adam(model.parameters(), lr=1e-2)", made)


# The rate


@pytest.mark.parametrize(("start", "optimizer", "rate"), [(FITTED, "SGD", "3.0"), (START, "Adam", "3.0")])
def test_a_rate_too_high_is_named_with_the_update_it_makes(
    watch: Nursery, start: str, optimizer: str, rate: str
) -> None:
    model = paced(rate, optimizer) if start == START else FIT.replace("Adam", optimizer).replace("1e-2", rate)
    run = watch(start, model, LOOP)
    evidence = {"update_to_weight", "lr", "first", "peak", "last"}
    found = run.names_first("lr.too-high", step=run.first.step, at="|torch.optim.", evidence=evidence)
    assert found.evidence["lr"] == 3.0
    assert found.evidence["update_to_weight"] > 0.1


def test_a_rate_too_low_is_named_with_the_way_it_went(watch: Nursery) -> None:
    run = watch(START, paced("1e-6", "SGD"), LOOP)
    found = run.names_first(
        "lr.too-low", step=0, at="|torch.optim.", evidence={"update_to_weight", "lr", "grad_norm", "first", "last"}
    )
    assert found.evidence["update_to_weight"] < 1e-5
    assert found.evidence["grad_norm"] > 0.01


@pytest.mark.parametrize(
    ("optimizer", "rate", "severity", "usual"),
    [("Adam", "1e-4", "error", "1e-2"), ("AdamW", "3e-4", "info", "3e-2")],
)
def test_a_rate_whose_steps_lead_straight_down_to_the_end_is_named_if_the_weights_hardly_move(
    watch: Nursery, optimizer: str, rate: str, severity: str, usual: str
) -> None:
    long = LOOP.replace("range(60)", "range(400)")
    found = watch(START, paced(rate, optimizer), long).finding("lr.too-low")
    assert found.severity == severity  # weights that move more may be at the beginning of a long training
    assert found.evidence["slope_kept"] > 0.6
    assert watch(START, paced(usual, optimizer), long).causes == []


def test_a_loss_that_falls_to_the_end_without_a_prediction_is_only_mentioned() -> None:
    slow = [2.0 - 0.002 * step for step in range(200)]
    claim = pace.too_low(run(slow, sampled_steps=[look(step, steps=moves(1e-4)) for step in range(0, 200, 20)]))
    assert claim is not None
    assert claim.severity == "info"


@pytest.mark.parametrize(("steps", "severity"), [(200, "info"), (400, "error")])
def test_a_short_run_whose_steps_lead_straight_down_may_be_the_start_of_a_long_training(
    steps: int, severity: str
) -> None:
    slow = [2.0 - 0.0005 * step for step in range(steps)]
    path = {"since": 60, "start": -1.0, "end": -0.9, "length": 0.1}
    looks = [look(step, steps=moves(5e-4)) for step in range(0, 80, 20)]
    looks.append(look(150, steps=[moves(5e-4)[0] | {"path": path}]))
    claim = pace.too_low(run(slow, sampled_steps=looks))
    assert claim is not None
    assert claim.evidence["slope_kept"] == pytest.approx(0.9)
    assert claim.severity == severity


@pytest.mark.parametrize(
    ("settings", "wave", "is_named"),
    [
        ({"momentum": 0.99}, 0.8, True),
        ({"betas": [0.999, 0.99]}, 0.8, True),
        ({"momentum": 0.9}, 0.8, False),
        ({"momentum": 0.99}, 0.0, False),
    ],
)
def test_heavy_momentum_is_named_if_the_loss_rises_again(settings: dict[str, Any], wave: float, is_named: bool) -> None:
    losses = [0.5 + 1.5 * 0.97**step + wave * (1 - math.cos(step / 10)) * (step > 63) for step in range(120)]
    held = optimizer(losses) | {"type": "SGD", "settings": [settings | {"lr": 0.01}]}
    claim = pace.overshoots(run(losses, optimizers=[held]))
    assert (claim is not None) == is_named
    assert claim is None or claim.severity == "warning"


def test_heavy_momentum_is_only_mentioned_if_the_loss_ends_where_it_was_lowest() -> None:
    losses = [0.5 + 1.5 * 0.96**step + 1.2 * math.exp(-(((step - 60) / 8) ** 2)) for step in range(160)]
    held = optimizer(losses) | {"type": "SGD", "settings": [{"momentum": 0.99, "lr": 0.01}]}
    claim = pace.overshoots(run(losses, optimizers=[held]))
    assert claim is not None
    assert claim.severity == "info"


@pytest.mark.parametrize(("optimizer", "rate"), [("SGD", "0.3"), ("AdamW", "3e-2")])
def test_usual_rates_are_fine(watch: Nursery, optimizer: str, rate: str) -> None:
    assert watch(START, paced(rate, optimizer), LOOP).causes == []


def test_a_second_phase_at_a_tiny_rate_is_fine(watch: Nursery) -> None:
    second = "optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)"
    assert watch(START, NET, LOOP, second, LOOP).causes == []


BREAKS_ONCE = """
for step in range(60):
    rows = torch.randint(len(x), (32,))
    optimizer.zero_grad()
    loss = loss_of(model(x[rows]), y[rows])
    loss.backward()
    if step == 40:
        model[0].weight.grad[0, 0] = torch.nan
    optimizer.step()
"""


def test_one_nan_in_a_run_that_learned_does_not_make_its_rate_too_high(watch: Nursery) -> None:
    run = watch(START, paced("5e-2"), "nn.init.zeros_(model[2].weight)", BREAKS_ONCE)
    assert max(row["ratio"] or 0 for row in run.facts["sampled_steps"][1]["steps"][0]["rows"]) > 0.1
    assert not {"lr.too-high", "init.too-small"} & set(run.causes)


def test_small_steps_through_noise_that_lead_down_are_no_rate_too_high() -> None:
    falls = [value + (0.5 if step % 2 else 0.0) for step, value in enumerate(falling(240, 1.2, 0.4))]
    looks = [look(step, steps=moves(0.03), notes={"losses": [COMPARED]}) for step in range(8)]
    assert pace.too_high(run(falls, sampled_steps=looks)) is None
    flat = [0.6 + (0.5 if step % 2 else 0.0) for step in range(240)]
    assert pace.too_high(run(flat, sampled_steps=looks)) is not None


@pytest.mark.parametrize(("end", "severity"), [(0.5, "warning"), (0.05, "info")])
def test_a_loss_thrown_far_up_at_first_that_has_recovered_is_mentioned(end: float, severity: str) -> None:
    thrown = [1.0, 5.0, 100.0, 30.0, 8.0, *falling(100, 2.0, end)]
    claim = pace.too_high(run(thrown, sampled_steps=[look(step, steps=moves(0.5)) for step in range(8)]))
    assert claim is not None
    assert claim.severity == severity


def test_attention_logits_that_climb_under_very_large_steps_are_the_work_of_the_rate() -> None:
    def sharpened(ratio: float) -> Any:
        sharp = [(step, 2.0 * 1.5**step, 3.4 * 0.8**step) for step in range(16)]
        notes = [
            {"op": "softmax", "site": SITE, "shape": [4, 8, 8], "fully_masked_rows": 0, "attends": True}
            | {"largest": largest, "entropy": entropy}
            for _, largest, entropy in sharp
        ]
        looks = [
            look(10 * step, steps=moves(ratio), notes={"softmaxes": [note]})
            for (step, _, _), note in zip(sharp, notes, strict=True)
        ]
        return run(falling(160, 4.6, 2.7), sampled_steps=looks)

    assert attention_logit_growth(sharpened(0.29)) is not None
    assert pace.too_high(sharpened(0.29)) is not None
    assert pace.too_high(sharpened(0.01)) is None


def test_units_that_die_under_steps_larger_than_the_weights_are_the_work_of_the_rate() -> None:
    def dying(ratio: float, at_first: int) -> Any:
        looks = []
        for step in range(10):
            dead = list(range(at_first if step == 0 else 14))
            note = {"op": "relu", "site": SITE, "rows": 32, "units": 16, "dead": len(dead)}
            note |= {"dead_units": dead, "grad": True}
            looks.append(look(10 * step, steps=moves(ratio), notes={"activations": [note]}))
        return run(falling(100, 2.4, 1.2), sampled_steps=looks)

    found = pace.too_high(dying(2.0, 1))
    assert found is not None
    assert "88% of the 16 units" in found.summary
    assert pace.too_high(dying(2.0, 14)) is None  # dead from the start: the initial weights did it
    assert pace.too_high(dying(0.2, 1)) is None


def test_a_rate_that_drives_the_loss_up_until_it_breaks_is_too_high(watch: Nursery) -> None:
    run = watch(FITTED, FIT.replace("Adam", "SGD").replace("1e-2", "0.6"), LOOP.replace("range(60)", "range(200)"))
    assert run.first.cause == "lr.too-high"
    assert run.first.severity == "error"


def test_a_loss_that_is_not_finite_because_of_its_data_has_no_rate_too_high(watch: Nursery) -> None:
    run = watch(START, "x[7] = torch.inf", paced("0.1"), LOOP)
    assert run.first.cause == "data.nonfinite-input"
    assert "lr.too-high" not in run.causes


# Warm-up

TRANSFORMER = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randint(16, (256, 10))
y = x.flip(1)
loss_of = lambda given, target: F.cross_entropy(given.transpose(1, 2), target)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 32), nn.Parameter(torch.randn(10, 32))
        block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=False)
        self.body = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 16)

    def forward(self, ids):
        return self.head(self.body(self.tokens(ids) + self.places))

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
pace = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: SHAPE)
"""
SCHEDULED = LOOP + "    pace.step()\n"


def test_a_transformer_thrown_off_course_in_its_first_steps_lacks_a_warm_up(watch: Nursery) -> None:
    run = watch(TRANSFORMER.replace("RATE", "6e-2").replace("SHAPE", "1 - step / 60"), SCHEDULED)
    found = run.names_first(
        "lr.no-warmup", step=run.first.step, at="|torch.optim.Adam", evidence={"lr", "update_to_weight", "peak", "last"}
    )
    assert found.step is not None
    assert found.step < 20
    assert found.evidence["lr"][0] == pytest.approx(6e-2)


def test_steps_that_are_larger_than_the_weights_are_too_large_after_a_warm_up_as_well(watch: Nursery) -> None:
    run = watch(TRANSFORMER.replace("RATE", "3.0").replace("SHAPE", "1 - step / 60"), SCHEDULED)
    assert run.first.cause == "lr.too-high"
    assert "lr.no-warmup" not in run.causes


@pytest.mark.parametrize("shape", ["1", "min(step / 5, 1)"], ids=["constant", "warm-up from 0"])
def test_the_rate_to_try_is_a_part_of_the_highest_one_and_leaves_steps_smaller_than_the_weights(
    watch: Nursery, shape: str
) -> None:
    run = watch(TRANSFORMER.replace("RATE", "3.0").replace("SHAPE", shape), SCHEDULED)
    found = run.finding("lr.too-high")
    words = re.fullmatch(r"Divide the rate by (.+) to (.+): (.+) to (.+)\.", found.fixes[0])
    assert words is not None
    least, most, lowest, highest = (float(word.replace(",", "")) for word in words.groups())
    assert most == pytest.approx(10 * least)
    assert (lowest, highest) == (pytest.approx(3.0 / most, rel=0.5), pytest.approx(3.0 / least, rel=0.5))
    assert not any("3 to 10" in fix for fix in found.fixes[1:])
    changes = found.evidence["update_to_weight"]
    assert changes > 1.0
    assert changes / most < 0.1


def test_the_same_transformer_warmed_up_is_fine(watch: Nursery) -> None:
    shape = "min(1, (step + 1) / 30) * (1 - step / 60)"
    assert watch(TRANSFORMER.replace("RATE", "6e-2").replace("SHAPE", shape), SCHEDULED).causes == []


def with_attention(losses: list[float]) -> Any:
    """A run of a model with attention, whose first updates are large, with these losses."""
    note = {"op": "softmax", "shape": [8, 2, 9, 9]}
    looks = [look(step, steps=moves(0.15), notes={"softmaxes": [note]}) for step in range(8)]
    return run(losses, sampled_steps=looks)


def test_a_loss_that_falls_slowly_through_its_noise_from_the_first_step_on_needs_no_warm_up() -> None:
    slow = [3.73 - 0.0055 * step + 0.05 * (-1) ** step for step in range(60)]
    assert pace.no_warmup(with_attention(slow)) is None
    level = [3.73 + 0.05 * (-1) ** step for step in range(60)]
    assert pace.no_warmup(with_attention(level)) is not None


def test_one_broken_batch_in_a_loss_that_falls_is_not_a_lack_of_warm_up() -> None:
    steady = falling(60, 3.7, 2.0)
    assert pace.no_warmup(with_attention([*steady[:33], math.nan, *steady[34:]])) is None
    assert pace.no_warmup(with_attention([*steady[:33], *[math.nan] * 27])) is not None


def test_a_network_without_attention_needs_no_warm_up(watch: Nursery) -> None:
    assert "lr.no-warmup" not in watch(START, paced("3.0"), LOOP).causes


def test_batches_that_make_single_losses_high_say_nothing_about_the_rate() -> None:
    """Targets that say nothing: the loss stays at their variance, and a batch of outliers is half as high again."""
    losses = [0.9 + 0.2 * (step % 2) for step in range(200)]
    losses[40] = 1.5
    looks = [look(step, steps=moves(0.03), notes={"losses": [COMPARED]}) for step in range(8)]
    assert pace.too_high(run(losses, sampled_steps=looks)) is None
    losses[40] = 4.0
    assert pace.too_high(run(losses, sampled_steps=looks)) is not None
    looks = [look(step, steps=moves(0.03)) for step in range(8)]
    assert pace.too_high(run(losses, sampled_steps=looks)) is None, "a loss over the hardest pairs need not fall"


@pytest.mark.parametrize(("count", "named"), [(30, False), (60, True)])
def test_a_short_run_that_has_come_down_is_not_stalled(count: int, named: bool) -> None:
    """It ends at the loss of the best constant answer, with the noise of small batches."""
    losses = [max(1.7 * 0.8**step, 0.25 + 0.2 * (step % 2)) for step in range(count)]
    loss = {"op": "mse_loss", "grad": True, "site": SITE, "reduction": "mean", "target_variance": 0.36}
    sign = {"function": "mse_loss", "site": SITE, "factor": 1.0, "index": 0}
    root = {"site": SITE, "value": 0.4, "factor": 1.0, "sign": sign, "parameters": [0]}
    looks = [look(step, roots=[root], notes={"losses": [loss]}, steps=moves(0.07)) for step in range(8)]
    assert (pace.too_high(run(losses, sampled_steps=looks)) is not None) == named


def test_a_distribution_that_refuses_nan_after_a_huge_step_has_a_rate_too_high(watch: Nursery) -> None:
    run = watch(
        """
        import torch
        from torch import nn
        from torch.distributions import Categorical

        torch.manual_seed(0)
        policy = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(policy.parameters(), lr=RATE)
        for step in range(40):
            chosen = Categorical(logits=policy(torch.randn(16, 3)))
            action = chosen.sample()
            loss = -(chosen.log_prob(action) * (action == 2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """.replace("RATE", "1e16")
    )
    assert "found invalid values" in run.facts["crash"]["message"]
    assert run.first.cause == "lr.too-high"


@pytest.mark.parametrize(("ratio", "named"), [(1e-8, True), (1e-6, False)])
def test_weights_that_do_not_move_have_not_lowered_the_loss(ratio: float, named: bool) -> None:
    held = run(falling(), sampled_steps=[look(step, steps=moves(ratio)) for step in range(8)])
    assert held.curve.learned
    claim = pace.too_low(held)
    assert (claim is not None and claim.severity == "error") == named


@pytest.mark.parametrize(("kept", "is_named"), [(0.9, False), (-0.5, True)])
def test_steps_that_lead_straight_down_are_not_too_large_however_large_they_are(kept: float, is_named: bool) -> None:
    flat = [2.0 - 0.001 * step for step in range(200)]
    path = {"since": 60, "start": -1.0, "end": -kept, "length": 1.0}
    looks = [look(step, steps=moves(0.5)) for step in range(0, 80, 10)]
    looks.append(look(150, steps=[moves(0.5)[0] | {"path": path}]))
    assert (pace.too_high(run(flat, sampled_steps=looks)) is not None) == is_named


@pytest.mark.parametrize(("momentum", "is_named"), [(0.99, True), (0.0, False)])
def test_updates_that_momentum_builds_up_count_as_the_first_ones(momentum: float, is_named: bool) -> None:
    rising = [2.0 + 0.05 * step for step in range(200)]
    looks = [look(step, steps=moves(1e-2 if step < 10 else 0.2)) for step in (*range(10), 50, 150)]
    held = optimizer(rising, type="SGD", settings=[{"lr": 0.01, "momentum": momentum}])
    claim = pace.too_high(run(rising, optimizers=[held], sampled_steps=looks))
    assert (claim is not None) == is_named


def test_a_loss_thrown_up_that_never_recovers_is_named() -> None:
    thrown = [2.0, *(12.0 - 0.1 * step for step in range(100)), *([1.4] * 100)]
    found = pace.too_high(run(thrown, sampled_steps=[look(step, steps=moves(0.5)) for step in range(0, 80, 10)]))
    assert found is not None
    assert found.severity == "warning"
