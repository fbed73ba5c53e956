import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser(description="keep a sliding mass near the origin")
parser.add_argument("seed", nargs="?", type=int, default=68)
parser.add_argument("--updates", type=int, default=150)
args = parser.parse_args()
torch.manual_seed(args.seed)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(2, 48), nn.ReLU())
        self.heads = nn.Linear(48, 4)  # three pushes and the value

    def forward(self, state):
        out = self.heads(self.shared(state))
        return out[:, :3].log_softmax(-1), out[:, 3]


def physics(state, push):
    x, v = state.unbind(1)
    v = 0.95 * v + 0.3 * push
    x = (x + 0.3 * v).clamp(-4, 4)
    cost = 800.0 * x.square() + 50.0 * push.square()
    return torch.stack([x, v], 1), -cost


agent = Agent()
optimizer = torch.optim.SGD(agent.parameters(), lr=0.03, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, args.updates)
history = []
for update in range(args.updates):
    state = torch.randn(24, 2)
    chosen, values, rewards = [], [], []
    for t in range(10):
        log_probs, value = agent(state)
        action = torch.multinomial(log_probs.detach().exp(), 1)
        state, reward = physics(state, action[:, 0].float() - 1)
        chosen.append(log_probs.gather(1, action)[:, 0])
        values.append(value)
        rewards.append(reward)
    ret = torch.zeros(24)
    actor = critic = 0.0
    for log_prob, value, reward in zip(chosen[::-1], values[::-1], rewards[::-1]):
        ret = reward + 0.9 * ret
        gain = (ret - value).detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        actor = actor - (log_prob * gain).mean() / 10
        critic = critic + (ret - value).square().mean() / 10
    loss = actor + 0.5 * critic
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    history.append(torch.stack(rewards).mean().item())
    if update % 15 == 14:
        mean = sum(history[-15:]) / 15
        print(f"update {update + 1} reward {mean:.2f} actor {actor.item():.3f} critic {critic.item():.3f}")
