"""Images come two at a time (a large-volume setting in miniature), so the net uses group norm."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.GroupNorm(4, cout), nn.ReLU(inplace=True), nn.AvgPool2d(2)
    )


def main(seed):
    torch.manual_seed(seed)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    x = (x - x.mean()) / x.std()
    data = TensorDataset(x, torch.tensor(digits.target))
    train_set, test_set = random_split(data, [900, 897])
    model = nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(32 * 4, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    running = None
    step = 0
    for epoch in range(2):
        model.train()
        for images, target in DataLoader(train_set, batch_size=2, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss = loss_fn(model(images), target)
            loss.backward()
            optimizer.step()
            running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
            step += 1
            if step % 200 == 0:
                print(f"epoch {epoch} step {step} smoothed loss {running:.4f}")
        model.eval()
        hits = 0
        with torch.no_grad():
            for images, target in DataLoader(test_set, batch_size=200):
                hits += (model(images).argmax(1) == target).sum().item()
        print(f"epoch {epoch} test accuracy {hits / len(test_set):.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
