"""Terms of a loss that are not learned because another one wins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from surefoot.diagnose.rules import loss_terms
from surefoot.diagnose.run import RecordedRun

if TYPE_CHECKING:
    from watched import Nursery

AUTOENCODER = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
codes = torch.randn(512, 3)
data = torch.sigmoid(3 * codes @ torch.randn(3, 20))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(120):
    rows = data[torch.randint(512, (64,))]
    output, mean, log_variance = model(rows)
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
    loss = RECONSTRUCTION + divergence
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("loss", ["F.mse_loss(output, rows)", "F.binary_cross_entropy_with_logits(output, rows)"])
def test_a_mean_beside_a_sum_leaves_the_code_unused(watch: Nursery, loss: str) -> None:
    run = watch(AUTOENCODER.replace("RECONSTRUCTION", loss))
    assert run.first.cause == "loss.term-dominates"
    found = loss_terms.unused_code(RecordedRun(*run.loaded))
    assert found is not None
    assert run.at("|divergence = -0.5") in found.where
    assert found.evidence["other_last"] < 0.1 * found.evidence["other_first"]
    assert found.evidence["reconstruction"] >= 0.95 * found.evidence["best_constant_answer"]


def test_two_sums_are_in_balance(watch: Nursery) -> None:
    summed = 'F.binary_cross_entropy_with_logits(output, rows, reduction="sum")'
    run = watch(AUTOENCODER.replace("RECONSTRUCTION", summed))
    assert run.causes == []
    assert loss_terms.unused_code(RecordedRun(*run.loaded)) is None


def test_the_terms_of_a_sum_that_is_divided_by_the_rows_are_measured(watch: Nursery) -> None:
    script = AUTOENCODER.replace("RECONSTRUCTION + divergence", "(F.mse_loss(output, rows) + divergence) / len(rows)")
    run = watch(script)
    assert run.first.cause == "loss.term-dominates"
    found = loss_terms.unused_code(RecordedRun(*run.loaded))
    assert found is not None
    assert run.at("|divergence = -0.5") in found.where
    summed = "(F.mse_loss(output, rows, reduction='sum') + 0.01 * divergence) / len(rows)"
    assert watch(AUTOENCODER.replace("RECONSTRUCTION + divergence", summed)).causes == []


def test_a_code_that_is_cut_off_before_the_decoder_is_named(watch: Nursery) -> None:
    """Without the gradient of the reconstruction, only the other term trains the encoder."""
    summed = AUTOENCODER.replace("RECONSTRUCTION", 'F.binary_cross_entropy_with_logits(output, rows, reduction="sum")')
    run = watch(summed.replace("self.decoder(code)", "self.decoder(code.detach())"))
    assert run.first.cause == "optim.detached-graph"
    assert run.at("|code.detach()") in run.first.where
    assert f" by `detach` at {run.at('|code.detach()')}: " in run.first.summary
    through = "code = code + (code.round() - code).detach()\n        return"  # a straight-through estimator
    assert watch(summed.replace("return", through)).causes == []


DRAWN = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

torch.manual_seed(0)
data = torch.randn(512, 3) @ torch.randn(3, 12)
encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=5e-3)
for step in range(150):
    rows = data[torch.randint(512, (64,))]
    mean, spread = encoder(rows).chunk(2, 1)
    code = Normal(mean, spread.exp())
    drawn = DRAW
    loss = F.mse_loss(decoder(drawn), rows) + 1e-3 * kl_divergence(code, Normal(0.0, 1.0)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("draw", ["code.sample()", "torch.normal(mean, spread.exp())"])
def test_a_code_that_is_drawn_without_a_gradient_is_named(watch: Nursery, draw: str) -> None:
    run = watch(DRAWN.replace("DRAW", draw))
    assert run.first.cause == "optim.detached-graph"
    assert run.at("|drawn = ") in run.first.where
    assert "`rsample()`" in run.first.fixes[0]


@pytest.mark.parametrize("draw", ["code.rsample()", "mean + spread.exp() * torch.normal(torch.zeros(64, 4), 1.0)"])
def test_a_code_that_is_drawn_with_its_gradient_is_fine(watch: Nursery, draw: str) -> None:
    assert watch(DRAWN.replace("DRAW", draw)).causes == []


def test_actions_whose_density_is_trained_may_go_through_a_critic(watch: Nursery) -> None:
    script = """
        import torch
        from torch import nn
        from torch.distributions import Normal

        torch.manual_seed(0)
        actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        critic = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=5e-3)
        for step in range(150):
            state = torch.randn(64, 4)
            policy = Normal(actor(state), 0.3)
            action = policy.sample()
            worth = -(action - state[:, :1]).pow(2)
            guess = critic(torch.cat([state, action], 1))
            advantage = (worth - worth.mean()).detach()
            loss = -(policy.log_prob(action) * advantage).mean() + (guess - worth).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """
    assert "optim.detached-graph" not in watch(script).causes


USED_OTHERWISE = {
    "noise on what it is made from": """
    h = torch.relu(first(rows))
    loss = F.mse_loss(last(h + torch.normal(0.0, 0.1 * h.std(0).expand_as(h))), rows)
""",
    "noise on weights": """
    noise = torch.normal(torch.zeros_like(last.weight), 0.05 * last.weight.abs())
    loss = F.mse_loss(F.linear(torch.relu(first(rows)), last.weight + noise, last.bias), rows)
""",
    "a policy whose action is limited": """
    policy = Normal(first(rows), 0.5)
    action = policy.sample().clamp(-3, 3)
    reward = -(action - rows.repeat(1, 2)).square().mean(1)
    gain = (reward - reward.mean()).detach() * policy.log_prob(action).sum(1)
    loss = F.mse_loss(last(action)[:, 0], reward) - gain.mean()
""",
    "a model of the world that is fed its own predictions": """
    state, following = Normal(first(rows), 0.5), rows.repeat(1, 2)
    own = torch.where(torch.rand(64, 1) < 0.3, state.sample(), following)
    loss = F.mse_loss(last(own), rows) - state.log_prob(following).mean()
""",
}


@pytest.mark.parametrize("name", USED_OTHERWISE)
def test_what_is_drawn_for_another_purpose_is_fine(watch: Nursery, name: str) -> None:
    body = DRAWN[DRAWN.index("    mean, spread") : DRAWN.index("    optimizer.zero_grad")]
    layers = DRAWN[DRAWN.index("encoder = ") : DRAWN.index("optimizer = ")]
    others = "first, last = nn.Linear(12, 24), nn.Linear(24, 12)\nencoder, decoder = first, last\n"
    run = watch(DRAWN.replace(body, USED_OTHERWISE[name]).replace(layers, others))
    assert "optim.detached-graph" not in run.causes
