"""Which of eight numbers is the largest, by attention over them."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("seed", type=int, nargs="?", default=0)
torch.manual_seed(parser.parse_args().seed)


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return x + self.proj(out.transpose(1, 2).reshape(rows, length, width))


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 32)
        self.mix = nn.Sequential(Attention(), nn.LayerNorm(32), Attention())
        self.score = nn.Linear(32, 1)

    def forward(self, numbers):
        return self.score(self.mix(self.embed(numbers.unsqueeze(-1)))).squeeze(-1)


numbers = torch.rand(2400, 8)
largest = numbers.argmax(1)
picker, criterion = Picker(), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(picker.parameters(), lr=2e-3)


@torch.no_grad()
def validate():
    picker.eval()
    losses = [criterion(picker(numbers[i : i + 100]), largest[i : i + 100]).item() for i in range(2000, 2400, 100)]
    picker.train()
    return sum(losses) / len(losses)


for epoch in range(6):
    for rows in torch.randperm(2000).split(50):
        loss = criterion(picker(numbers[rows]), largest[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, validate())
