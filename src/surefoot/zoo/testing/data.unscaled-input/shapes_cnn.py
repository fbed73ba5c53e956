"""Tell discs, bars and crosses apart in small grey-level pictures."""

import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def draw(kind, rng):
    img = rng.integers(0, 60, size=(16, 16))
    cy, cx = rng.integers(5, 11, size=2)
    yy, xx = np.mgrid[:16, :16]
    if kind == 0:
        on = (yy - cy) ** 2 + (xx - cx) ** 2 <= 12
    elif kind == 1:
        on = np.abs(yy - cy) <= 1
    else:
        on = (np.abs(yy - cy) <= 1) & (np.abs(xx - cx) <= 4) | (np.abs(xx - cx) <= 1) & (np.abs(yy - cy) <= 4)
    img[on] += 150
    return img.astype(np.uint8)


def make_set(n, rng):
    kinds = rng.integers(0, 3, size=n)
    images = np.stack([draw(k, rng) for k in kinds])
    return torch.from_numpy(images).unsqueeze(1).float(), torch.from_numpy(kinds)


class ShapeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 16, 32)
        self.fc2 = nn.Linear(32, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def main(seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    train_x, train_y = make_set(1200, rng)
    test_x, test_y = make_set(300, rng)
    model = ShapeNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for epoch in range(6):
        losses = []
        for idx in torch.randperm(len(train_x)).split(32):
            loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        with torch.inference_mode():
            acc = (model(test_x).argmax(1) == test_y).float().mean()
        print(f"epoch {epoch}: first batch {losses[0]:.3f}, mean {np.mean(losses):.3f}, test acc {acc:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 11)
