"""Policies and rewards, from recorded facts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from recorded import SITE, look, moves, optimizer, run
from surefoot.diagnose.rules import policy

if TYPE_CHECKING:
    from watched import Nursery

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 90)


def weighted(mean: float, spread: float) -> dict[str, Any]:
    other = {"shape": [64], "min": mean - 2 * spread, "max": mean + 2 * spread, "mean": mean, "std": spread}
    binary = mean == spread == 0.0
    return {"op": "mul", "site": SITE, "history": ["log_prob"], "other": other, "other_binary": binary}


def entropies(values: list[float]) -> list[dict[str, Any]]:
    return [{"step": i, "entropy": v * math.log(4), "actions": 4} for i, v in enumerate(values)]


def looks(kind: str, notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [look(step, notes={kind: [note]}) for step, note in zip(STEPS, notes, strict=True)]


def test_advantages_of_zero_are_named_with_their_place() -> None:
    claim = policy.zero_advantage(run(sampled_steps=looks("products", [weighted(0.0, 0.0)] * 9)))
    assert claim is not None
    assert claim.where == (SITE,)


def test_a_policy_whose_gradient_is_always_zero_has_no_advantages() -> None:
    """Single numbers, which are multiplied one by one, are not recorded."""
    still = optimizer([0.0] * 9)
    for norm, entropy, found in ((0.0, 1.0, True), (0.1, 1.0, False), (0.0, 0.0, False)):
        still["series"]["grad_norm"] = [norm] * 9
        claim = policy.zero_advantage(run([0.0] * 9, optimizers=[still], policy=entropies([entropy] * 9)))
        assert (claim is not None) is found


def test_centred_advantages_are_fine() -> None:
    assert policy.zero_advantage(run(sampled_steps=looks("products", [weighted(0.0, 1.0)] * 9))) is None


def ratio(largest: float, kl: float) -> dict[str, Any]:
    return {"op": "exp", "site": SITE, "largest": largest, "mean": 1.1, "kl": kl, "count": 64}


def test_ratios_in_the_hundreds_have_exploded() -> None:
    claim = policy.ratio_explosion(run(sampled_steps=looks("ratios", [ratio(2.0, 0.01)] * 5 + [ratio(400.0, 0.4)] * 4)))
    assert claim is not None
    assert claim.step == STEPS[5]


def test_ratios_near_one_are_fine() -> None:
    held = run(sampled_steps=looks("ratios", [ratio(1.6, 0.02)] * 9))
    assert policy.ratio_explosion(held) is None
    assert policy.kl_blowup(held) is None


def test_a_divergence_that_climbs_has_blown_up() -> None:
    stated = [{"step": i, "kl": 0.001 * i * i, "site": SITE} for i in range(100)]
    assert policy.kl_blowup(run(divergences=stated)) is not None


def test_a_divergence_that_stays_low_is_fine() -> None:
    stated = [{"step": i, "kl": 0.03, "site": SITE} for i in range(100)]
    assert policy.kl_blowup(run(divergences=stated)) is None


def test_a_policy_certain_after_a_few_steps_has_collapsed() -> None:
    claim = policy.entropy_collapse(run(policy=entropies([1.0] * 8 + [0.01] * 92)))
    assert claim is not None
    assert claim.severity == "error"


@pytest.mark.parametrize(("ratio", "named"), [(0.5, True), (0.01, False)])
def test_a_policy_certain_after_a_few_huge_steps_has_a_rate_too_high(ratio: float, named: bool) -> None:
    steps = [look(step, steps=moves(ratio)) for step in range(5)]
    held = run(policy=entropies([1.0] * 8 + [0.01] * 92), sampled_steps=steps)
    claim = policy.rate_of_policy(held)
    assert (claim is not None) == named
    assert policy.entropy_collapse(held) is not None
    slow = run(policy=entropies([1.0] * 40 + [0.01] * 60), sampled_steps=steps)
    assert policy.rate_of_policy(slow) is None, "it was still exploring long after the first steps"


def test_a_policy_that_becomes_certain_as_the_returns_rise_is_only_remarked_on() -> None:
    raw = [weighted(m, 0.3) for m in (0.3, 0.3, 0.3, 0.5, 0.7, 0.9, 1.4, 1.5, 1.5)]
    claim = policy.entropy_collapse(
        run(policy=entropies([1.0] * 8 + [0.01] * 92), sampled_steps=looks("products", raw))
    )
    assert claim is not None
    assert claim.severity == "info"


@pytest.mark.parametrize(("late", "severity"), [(1.5, "info"), (0.3, "error")])
def test_rewards_are_known_from_before_their_mean_was_subtracted(late: float, severity: str) -> None:
    before = [weighted(m, 0.3)["other"] for m in (0.3, 0.3, 0.3, 0.4, 0.5, 0.6, late, late, late)]
    centred = [weighted(0.0, 1.0) | {"uncentred": each} for each in before]
    held = run(policy=entropies([1.0] * 8 + [0.01] * 92), sampled_steps=looks("products", centred))
    claim = policy.entropy_collapse(held)
    assert claim is not None
    assert claim.severity == severity


GROUPS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
for step in range(200):
    prompts = torch.randint(8, (16,)).repeat_interleave(8)
    chosen = policy(prompts).detach().softmax(-1).multinomial(1)
    rewards = (chosen[:, 0] == RIGHT).float()
    grouped = rewards.view(16, 8)
    weights = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
    loss = -(policy(prompts).log_softmax(-1).gather(1, chosen)[:, 0] * weights).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_policy_that_solved_its_task_with_centred_rewards_has_not_collapsed(watch: Nursery) -> None:
    held = watch(GROUPS.replace("RIGHT", "(prompts + 3) % 8"))
    assert held.causes == []
    assert held.finding("rl.entropy-collapse").evidence["gain_of_returns"] > 1


def test_single_returns_are_measured_by_their_differences() -> None:
    values = [weighted(m, 0.0) for m in (-1.7, 0.9, 0.2, 1.6, -1.5, 0.8, -0.3, 1.0, 0.4)]
    claim = policy.entropy_collapse(run(policy=entropies([1.0] + [0.0] * 99), sampled_steps=looks("products", values)))
    assert claim is not None
    assert claim.severity == "error"
    assert abs(claim.evidence["gain_of_returns"]) < 1


def test_a_policy_whose_returns_were_not_seen_once_it_was_certain_is_only_remarked_on() -> None:
    early = [look(step, notes={"products": [weighted(0.3, 0.3)]}) for step in range(7)]
    claim = policy.entropy_collapse(run(policy=entropies([1.0] * 40 + [0.01] * 60), sampled_steps=early))
    assert claim is not None
    assert claim.severity == "info"
    late = [look(step, notes={"products": [weighted(0.3, 0.3)]}) for step in (*range(7), 60, 90)]
    claim = policy.entropy_collapse(run(policy=entropies([1.0] * 40 + [0.01] * 60), sampled_steps=late))
    assert claim is not None
    assert claim.severity == "error"


def test_a_policy_certain_from_the_start_never_explores() -> None:
    claim = policy.entropy_collapse(run(policy=entropies([0.0] * 100)))
    assert claim is not None
    assert claim.step == 0


def test_a_policy_that_still_explores_is_fine() -> None:
    assert policy.entropy_collapse(run(policy=entropies([1.0 - 0.006 * i for i in range(100)]))) is None


def valued(mean: float, share: float) -> dict[str, Any]:
    loss = {
        "op": "mse_loss",
        "grad": True,
        "site": SITE,
        "target": {"mean": mean, "std": 0.3 * abs(mean)},
        "value": 1.0,
    }
    terms = [{"loss": None, "norm": 1 - share}, {"loss": "mse_loss", "norm": share}]
    notes = {"losses": [loss], "products": [weighted(0.0, 1.0)]}
    return {"notes": notes, "roots": [{"value": mean, "parameters": [0], "terms": terms}]}


def test_returns_in_the_thousands_that_drown_the_policy_are_named() -> None:
    held = run(sampled_steps=[look(s, **valued(3000.0, 0.999)) for s in STEPS], policy=entropies([0.9] * 100))
    claim = policy.reward_scale(held)
    assert claim is not None
    assert claim.severity == "error"


def test_returns_near_one_are_fine() -> None:
    held = run(sampled_steps=[look(s, **valued(2.0, 0.6)) for s in STEPS], policy=entropies([0.9] * 100))
    assert policy.reward_scale(held) is None


VALUES = """
import copy
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
fixed = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(200):
    state, later = torch.randn(32, 4), torch.randn(32, 4)
    action = torch.randint(2, (32, 1))
    reward = SCALE * state[:, 0] * (2 * action[:, 0] - 1)
    with torch.no_grad():
        target = reward + 0.9 * fixed(later).max(1)[0]
    loss = F.mse_loss(model(state).gather(1, action).squeeze(1), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        fixed.load_state_dict(model.state_dict())
"""


def test_value_targets_far_from_unit_scale_are_named(watch: Nursery) -> None:
    run = watch(VALUES.replace("SCALE", "500.0"))
    assert run.causes == ["rl.reward-scale"]
    assert run.first.evidence["error"] > 0.5 * run.first.evidence["targets"] > 15


def test_a_regression_whose_targets_come_from_a_matrix_product_of_data_has_no_rewards(watch: Nursery) -> None:
    regression = """
    import torch
    import torch.nn.functional as F
    torch.manual_seed(0)
    true, model = 20 * torch.randn(4, 1), torch.nn.Linear(4, 1)
    for step in range(200):
        model.zero_grad()
        x = torch.randn(32, 4)
        loss = F.smooth_l1_loss(model(x), x.mm(true))
        loss.backward()
        for p in model.parameters():
            p.data.add_(SIGN * 0.1 * p.grad)
    """
    assert watch(regression.replace("SIGN", "-1")).causes == []
    rising = watch(regression.replace("SIGN", "+1"))
    assert rising.diagnosis.verdict != "healthy"
    assert "rl.reward-scale" not in rising.causes


def test_value_targets_of_unit_scale_are_fine(watch: Nursery) -> None:
    assert watch(VALUES.replace("SCALE", "1.0")).causes == []


BANDIT = """
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
for episode in range(60):
    terms = []
    for _ in range(8):
        chosen = Categorical(logits=policy(torch.randn(1, 3)))
        action = chosen.sample()
        reward = torch.tensor(1.0 if action.item() == 2 else -0.2)
        terms.append(SIGN chosen.log_prob(action) * reward)
    loss = torch.cat(terms).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


ACTOR_CRITIC = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
actor, critic = nn.Linear(3, 4), nn.Linear(3, 1)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
for step in range(60):
    state = torch.randn(16, 3)
    chances = actor(state).softmax(1)
    action = torch.multinomial(chances.detach(), 1)
    value = critic(state)
    better = (action == 2).float() - value
    loss = SIGN torch.log(chances.gather(1, action)) * better.detach() + F.smooth_l1_loss(value, (action == 2).float())
    optimizer.zero_grad()
    loss.mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("sign", "is_unknown"), [("", True), ("-", False)], ids=["plus", "minus"])
def test_logarithms_of_chosen_probabilities_weighted_by_advantages_have_a_sign(
    watch: Nursery, sign: str, is_unknown: bool
) -> None:
    diagnosis = watch(ACTOR_CRITIC.replace("SIGN", sign)).diagnosis
    assert ("right if the weights are costs" in diagnosis.reason) == is_unknown


def test_a_policy_that_makes_low_weights_likely_is_not_called_healthy(watch: Nursery) -> None:
    run = watch(BANDIT.replace("SIGN", ""))
    assert run.diagnosis.verdict == "unknown"
    assert "right if the weights are costs" in run.diagnosis.reason


def test_a_policy_that_makes_high_weights_likely_is_healthy(watch: Nursery) -> None:
    assert watch(BANDIT.replace("SIGN", "-")).diagnosis.verdict == "healthy"


PROXIMAL = """
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=RATE)
for step in range(120):
    if step % 4 == 0:
        state = torch.randn(64, 3)
        with torch.no_grad():
            drawn = Categorical(logits=policy(state))
            action = drawn.sample()
            before = drawn.log_prob(action)
        advantage = (action == 2).float() - 0.25
    chosen = Categorical(logits=policy(state))
    ratio = (chosen.log_prob(action) - before).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = SURROGATE.mean() - WEIGHT * chosen.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
GAINS, LOSSES = (
    "torch.min(ratio * advantage, clipped * advantage)",
    "torch.max(ratio * -advantage, clipped * -advantage)",
)


def proximal(surrogate: str, weight: str = "0.01", rate: str = "3e-3") -> str:
    return PROXIMAL.replace("SURROGATE", surrogate).replace("WEIGHT", weight).replace("RATE", rate)


@pytest.mark.parametrize("surrogate", [GAINS, "-" + LOSSES], ids=["the smaller of gains", "the larger of losses"])
def test_a_clipped_surrogate_that_is_taken_the_wrong_way_has_the_wrong_sign(watch: Nursery, surrogate: str) -> None:
    found = watch(proximal(surrogate)).first
    assert found.cause == "loss.sign-flipped"
    assert "torch.min" in found.fixes[0]


@pytest.mark.parametrize("surrogate", ["-" + GAINS, LOSSES], ids=["gains", "losses"])
def test_a_clipped_surrogate_with_the_right_sign_is_fine(watch: Nursery, surrogate: str) -> None:
    assert watch(proximal(surrogate)).causes == []


def test_an_entropy_bonus_that_keeps_the_policy_uniform_is_named_with_its_weight(watch: Nursery) -> None:
    found = watch(proximal("-" + GAINS, weight="50")).first
    assert found.cause == "loss.term-dominates"
    assert found.evidence["weight"] == pytest.approx(50, rel=1e-3)


def test_a_rate_that_drives_the_units_of_a_policy_to_their_bounds_is_too_high(watch: Nursery) -> None:
    found = watch(proximal("-" + GAINS, rate="3.0")).first
    assert found.cause == "lr.too-high"
    assert "at its bounds" in found.summary
