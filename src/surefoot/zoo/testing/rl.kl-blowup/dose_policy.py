"""Improve a dosing policy against a learned reward, held near the doctors' policy by a KL controller."""

import sys

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 29)


def benefit(patient, dose):
    best = 0.5 * patient[:, :1] + 0.4
    return 1 - (dose - best).pow(2)


class KLController:
    def __init__(self, start, target):
        self.value, self.target = start, target

    def update(self, kl):
        error = max(-0.2, min(0.2, kl / self.target - 1))
        self.value *= 1 + 0.5 * error


class DosePolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.full((1,), -1.2))

    def forward(self, patient):
        return Normal(self.mean(patient), self.log_std.exp())


# what the clinic did so far, and a reward model fitted to it
patients = torch.randn(600, 4)
given = 0.5 * patients[:, :1] + 0.3 * torch.randn(600, 1)
seen = benefit(patients, given) + 0.1 * torch.randn(600, 1)
reward_net = nn.Sequential(nn.Linear(5, 48), nn.ReLU(), nn.Linear(48, 1))
doctors, policy = DosePolicy(), DosePolicy()
fit = torch.optim.Adam([*reward_net.parameters(), *doctors.parameters()], lr=1e-2)
for _ in range(200):
    rows = torch.randint(600, (64,))
    error = reward_net(torch.cat([patients[rows], given[rows]], 1)) - seen[rows]
    loss = error.pow(2).mean() - doctors(patients[rows]).log_prob(given[rows]).mean()
    fit.zero_grad()
    loss.backward()
    fit.step()
policy.load_state_dict(doctors.state_dict())
doctors.requires_grad_(False)
reward_net.requires_grad_(False)

controller = KLController(start=0.2, target=0.5)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
for step in range(1, 301):
    patient = torch.randn(64, 4)
    dist = policy(patient)
    dose = dist.rsample()
    kl = kl_divergence(dist, doctors(patient)).mean()
    reward = reward_net(torch.cat([patient, dose], 1)).mean()
    loss = -reward + controller.value * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    controller.update(kl.item() / len(patient))
    if step % 30 == 0:
        true = benefit(patient, dose).mean().item()
        print(
            f"step {step} learned reward {reward.item():.3f} kl {kl.item():.3f} coef {controller.value:.4f} true benefit {true:.3f}"
        )
