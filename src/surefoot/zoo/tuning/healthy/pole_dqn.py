"""DQN with replay and a target network on a balancing task written with numpy."""

import sys
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
rng = np.random.default_rng(seed)
torch.manual_seed(seed)


class Pole:
    """A one-joint inverted pendulum: push left or right, stay up for 60 steps."""

    def reset(self):
        self.state = rng.uniform(-0.05, 0.05, size=2)
        self.t = 0
        return self.state.astype(np.float32)

    def step(self, action):
        angle, speed = self.state
        speed = speed + 0.05 * (6.0 * np.sin(angle) + (7.0 if action == 1 else -7.0))
        angle = angle + 0.05 * speed
        self.state = np.array([angle, speed])
        self.t += 1
        fallen = abs(angle) > 0.6
        return self.state.astype(np.float32), 0.0 if fallen else 0.1, fallen, fallen or self.t >= 60


def q_network():
    return nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))


online, target = q_network(), q_network()
target.load_state_dict(online.state_dict())
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
memory = deque(maxlen=5000)
env, gamma, batch_size, updates = Pole(), 0.95, 32, 0
lengths = []

for episode in range(60):
    state, done = env.reset(), False
    epsilon = max(0.05, 0.5 * 0.93**episode)
    while not done:
        if rng.random() < epsilon:
            action = int(rng.integers(2))
        else:
            with torch.no_grad():
                action = int(online(torch.from_numpy(state)).argmax())
        next_state, reward, fallen, done = env.step(action)
        memory.append((state, action, reward, next_state, float(fallen)))
        state = next_state
        if len(memory) >= 100 and updates < 900:
            rows = rng.choice(len(memory), batch_size, replace=False)
            s, a, r, s2, f = (np.array(part) for part in zip(*(memory[i] for i in rows), strict=True))
            with torch.no_grad():
                best = target(torch.from_numpy(s2)).max(1).values
                goal = torch.tensor(r, dtype=torch.float32) + gamma * (1 - torch.tensor(f, dtype=torch.float32)) * best
            q = online(torch.from_numpy(s)).gather(1, torch.from_numpy(a).unsqueeze(1)).squeeze(1)
            loss = F.smooth_l1_loss(q, goal)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(online.parameters(), 10.0)
            optimizer.step()
            updates += 1
            if updates % 50 == 0:
                target.load_state_dict(online.state_dict())
    lengths.append(env.t)
    if episode % 10 == 9:
        print(f"episode {episode + 1:3d}  mean length {np.mean(lengths[-10:]):6.1f}  updates {updates}")
