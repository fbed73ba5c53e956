import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
torch.manual_seed(seed)

centers = torch.randn(5, 20)
y = torch.randint(0, 5, (3000,))
x = centers[y] * 0.7 + torch.randn(3000, 20)


class Tower(nn.Module):
    def __init__(self, width=64, depth=5):
        super().__init__()
        sizes = [20] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.out = nn.Linear(width, 5)
        self.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, mean=0.0, std=1.0)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.out(x)


net = Tower()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(6):
    losses, hits = [], 0
    for idx in torch.randperm(2500).split(50):
        logits = net(x[idx])
        loss = F.cross_entropy(logits, y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        hits += (logits.argmax(1) == y[idx]).sum().item()
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f} train acc {hits / 2500:.3f}")
with torch.no_grad():
    print("test acc", (net(x[2500:]).argmax(1) == y[2500:]).float().mean().item())
