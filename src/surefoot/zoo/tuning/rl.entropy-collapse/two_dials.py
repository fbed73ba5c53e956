"""REINFORCE on a safe with two dials: one pair of digits opens it, a zero on the first dial rattles a little."""

import sys

import torch
from torch.distributions import Categorical, Independent

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 4
torch.manual_seed(seed)

DIGITS = 10
code = torch.randint(1, DIGITS, (2,))


def pull(dials):
    opened = (dials == code).all(1).float()
    return opened + 0.4 * (dials[:, 0] == 0).float()


logits = (0.01 * torch.randn(2, DIGITS)).requires_grad_()
optimizer = torch.optim.Adam([logits], lr=0.05)
entropy_weight = -0.6
for step in range(1, 401):
    policy = Independent(Categorical(logits=logits), 1)
    dials = policy.sample((32,))
    reward = pull(dials)
    entropy = policy.entropy()
    loss = -(policy.log_prob(dials) * (reward - reward.mean())).mean() - entropy_weight * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step} reward {reward.mean().item():.3f} entropy {entropy.item():.4f}")
print(f"turns to {logits.argmax(1).tolist()}, code {code.tolist()}")
