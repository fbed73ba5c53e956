"""Pixels stay in 0..255; the first layer of the model is a batch norm."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn


class PixelNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm = nn.BatchNorm2d(1)
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.fc = nn.Linear(32 * 16, 10)

    def forward(self, x):
        x = self.input_norm(x)
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.fc(x.flatten(1))


def main():
    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 14)
    digits = load_digits()
    pixels = (torch.tensor(digits.images) * 255 / 16).round().to(torch.uint8).unsqueeze(1)
    labels = torch.tensor(digits.target)
    perm = torch.randperm(len(pixels))
    train, test = perm[:1400], perm[1400:]
    model = PixelNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for epoch in range(5):
        model.train()
        running = []
        for rows in train[torch.randperm(len(train))].split(40):
            logits = model(pixels[rows].float())
            loss = nn.functional.cross_entropy(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running.append(loss.item())
        model.eval()
        with torch.no_grad():
            accuracy = (model(pixels[test].float()).argmax(1) == labels[test]).float().mean().item()
        print(f"epoch {epoch + 1}  loss {sum(running) / len(running):.4f}  test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
