"""Fine-tune a small token policy on a reward model, next to a frozen reference."""

import copy
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, kl_divergence

VOCAB, LENGTH = 12, 10
seed = int(sys.argv[1]) if len(sys.argv) > 1 else 17
torch.manual_seed(seed)


class Policy(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.hidden = nn.Linear(dim, 32)
        self.out = nn.Linear(32, VOCAB)

    def forward(self, previous):
        return self.out(torch.tanh(self.hidden(self.embed(previous))))


def reward_model(tokens):
    return (tokens == 3).float().sum(1) + 0.5 * (tokens == 7).float().sum(1)


def human_score(tokens):
    wanted = (tokens == 3).float().sum(1).clamp(max=3)
    too_many = ((tokens == 3) | (tokens == 7)).float().sum(1) - 4
    return wanted - too_many.clamp(min=0)


# supervised start: follow the chain i -> i + 1 or i + 4
policy = Policy()
pretrain = torch.optim.Adam(policy.parameters(), lr=0.02)
for _ in range(80):
    now = torch.randint(VOCAB, (64,))
    after = (now + torch.where(torch.rand(64) < 0.5, 1, 4)) % VOCAB
    loss = F.cross_entropy(policy(now), after, label_smoothing=0.2)
    pretrain.zero_grad()
    loss.backward()
    pretrain.step()
reference = copy.deepcopy(policy).requires_grad_(False)

kl_coef = 0.002
optimizer = torch.optim.Adam(policy.parameters(), lr=4e-3)
for step in range(1, 121):
    token = torch.randint(VOCAB, (32,))
    tokens, log_prob, kl = [token], 0.0, 0.0
    for _ in range(LENGTH):
        dist = Categorical(logits=policy(token))
        kl = kl + kl_divergence(dist, Categorical(logits=reference(token)))
        token = dist.sample()
        log_prob = log_prob + dist.log_prob(token)
        tokens.append(token)
    tokens = torch.stack(tokens, 1)
    reward = reward_model(tokens)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    loss = -(advantage * log_prob).mean() + kl_coef * kl.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 0:
        score = human_score(tokens).mean().item()
        print(f"step {step} reward {reward.mean().item():.2f} kl {kl.mean().item():.2f} human score {score:.2f}")
