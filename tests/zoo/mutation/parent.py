"""A healthy script that has a place for every operator, and none that works: it is only read."""

TEXT = '''"""A comment with letters beyond ASCII: Größe."""
import sys
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(int(sys.argv[1]))
x = torch.tensor(load()) / 16
z = (x - x.mean(0)) / x.std(0)
loader = DataLoader(TensorDataset(x[:900], y[:900]), batch_size=32, shuffle=True, worker_init_fn=seed_worker)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.act = nn.ReLU()
        self.out = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.blocks[0](F.relu(x)))
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.out(self.norm(x))


model = Block()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.1)
criterion = nn.CrossEntropyLoss(ignore_index=0)
total = 0.0
for epoch in range(10):
    model.train()
    for rows in torch.randperm(900).split(32):
        optimizer.zero_grad()
        penalty = x.norm()
        loss = criterion(model(x[rows]), y[rows]) + penalty
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        right = (model(x[900:]).argmax(1) == y[900:]).float().mean()
'''

OTHER = {
    "drop-unscale": "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\n",
    "sum-microbatches": (
        "for step in range(9):\n    for part in parts:\n        loss = f(part) / 4\n        loss.backward()\n"
        "    optimizer.step()\n"
    ),
    "raise-momentum": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
    "heavy-nesterov": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
    "sigmoid-first": (
        "import torch\nfor x, y in loader:\n    F.binary_cross_entropy_with_logits(model(x), y).backward()\n"
    ),
    "swap-binary-arguments": (
        "import torch\nfor x, y in loader:\n    F.binary_cross_entropy_with_logits(model(x), y).backward()\n"
    ),
    "bound-output": "import torch\nfor x, y in loader:\n    F.mse_loss(model(x), y).backward()\n",
    "swap-symmetric-arguments": "import torch\nfor x, y in loader:\n    F.mse_loss(model(x), y).backward()\n",
    "broadcast": "import torch\nfor x, y in loader:\n    F.mse_loss(model(x).squeeze(1), y).backward()\n",
    "unshifted-targets": "loss = F.cross_entropy(model(ids[:, :-1]), ids[:, 1:])\n",
    "drop-loss-scale": "scaler = torch.amp.GradScaler('cuda')\n",
    "scale-targets": "import torch\nfor x, y in loader:\n    F.mse_loss(model(x), y).backward()\n",
    "grow-lr": "for x, y in loader:\n    loss.backward()\n    optimizer.step()\n",
    "decay-lr": "for x, y in loader:\n    loss.backward()\n    optimizer.step()\n",
    "double-precision": "import torch\ntorch.manual_seed(0)\n",
    "bfloat16-weights": (
        "import torch\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nmodel(x)\n"
    ),
}
"""Scripts for operators whose place the first one lacks, by operator."""
