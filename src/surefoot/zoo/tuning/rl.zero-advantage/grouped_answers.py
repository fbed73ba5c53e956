"""Group-relative policy gradient: several answers per question, rewards compared within the group."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 55)

MOD, QUESTIONS, GROUP = 7, 16, 8


class Solver(nn.Module):
    """Answers a + b modulo 7."""

    def __init__(self):
        super().__init__()
        self.left = nn.Embedding(MOD, 32)
        self.right = nn.Embedding(MOD, 32)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, MOD))

    def forward(self, a, b):
        return self.head(torch.cat([self.left(a), self.right(b)], -1))


@torch.no_grad()
def sample_answers(solver, a, b, temperature=1.0):
    logits = solver(a, b) / temperature
    answer = torch.multinomial(logits.softmax(-1), 1)
    return answer.expand(-1, GROUP)


solver = Solver()
optimizer = torch.optim.Adam(solver.parameters(), lr=3e-3)
for step in range(1, 401):
    a, b = torch.randint(MOD, (QUESTIONS,)), torch.randint(MOD, (QUESTIONS,))
    answers = sample_answers(solver, a, b)
    rewards = (answers == ((a + b) % MOD)[:, None]).float()
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    log_probs = F.log_softmax(solver(a, b), -1).gather(1, answers)
    loss = -(advantages * log_probs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f} reward {rewards.mean().item():.3f}")
