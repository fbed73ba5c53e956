import sys
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(SEED)

digits = load_digits()
x_train, x_val, y_train, y_val = train_test_split(digits.data, digits.target, test_size=0.25, random_state=SEED)

mu = x_train.mean(axis=0)
sigma = x_train.std(axis=0)
with np.errstate(all="ignore"):
    x_train = (x_train - mu) / sigma
    x_val = (x_val - mu) / sigma

x_train, x_val = torch.from_numpy(x_train).float(), torch.from_numpy(x_val).float()
y_train, y_val = torch.from_numpy(y_train), torch.from_numpy(y_val)

# two-layer network by hand
w1 = (torch.randn(64, 48) * (2 / 64) ** 0.5).requires_grad_()
b1 = torch.zeros(48, requires_grad=True)
w2 = (torch.randn(48, 10) * (1 / 48) ** 0.5).requires_grad_()
b2 = torch.zeros(10, requires_grad=True)
params = [w1, b1, w2, b2]
opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)


def net(x):
    return F.relu(x @ w1 + b1) @ w2 + b2


for it in range(300):
    idx = torch.randint(0, len(x_train), (64,))
    loss = F.cross_entropy(net(x_train[idx]), y_train[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 50 == 0 or it == 299:
        with torch.no_grad():
            val = (net(x_val).argmax(-1) == y_val).float().mean()
        print(f"iter {it}: train loss {loss.item():.3f}, val acc {val:.3f}")
