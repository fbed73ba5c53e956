"""Half precision on the CPU with a gradient scaler that starts far too high and finds its level."""

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(SEED)
X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X / 16.0, y, test_size=0.2, random_state=SEED)
X_train, X_test = torch.tensor(X_train, dtype=torch.float32), torch.tensor(X_test, dtype=torch.float32)
y_train, y_test = torch.tensor(y_train), torch.tensor(y_test)

model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=150)

step = 0
for epoch in range(14):
    model.train()
    for idx in torch.randperm(len(X_train)).split(64):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(X_train[idx]), y_train[idx])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        step += 1
    if epoch % 2 == 1:
        print(
            f"epoch {epoch + 1:2d}  step {step}  loss {loss.item():.4f}  scale 2^{torch.tensor(scaler.get_scale()).log2():.0f}"
        )

model.eval()
with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
    accuracy = (model(X_test).argmax(1) == y_test).float().mean().item()
print(f"test accuracy {accuracy:.3f}")
