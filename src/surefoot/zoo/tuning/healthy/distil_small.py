"""A wide teacher, then a narrow student that follows the teacher's softened outputs."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn


@dataclass(frozen=True)
class Config:
    temperature: float = 4.0
    soft_weight: float = 0.9
    batch: int = 64


def make(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def fit(model, x, y, epochs, lr, objective, name):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        model.train()
        running = 0.0
        for rows in torch.randperm(len(x)).split(Config.batch):
            loss = objective(model(x[rows]), x[rows], y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item() * len(rows) / len(x)
        if epoch % 3 == 0:
            print(f"{name} epoch {epoch:2d} loss {running:.4f}")


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 71
    torch.manual_seed(seed)
    c = Config()
    x, y = load_digits(return_X_y=True)
    x_tr, x_te, y_tr, y_te = train_test_split(x / 16, y, test_size=0.3, random_state=seed)
    x_tr, x_te = torch.tensor(x_tr, dtype=torch.float32), torch.tensor(x_te, dtype=torch.float32)
    y_tr, y_te = torch.tensor(y_tr), torch.tensor(y_te)

    teacher, student = make(256), make(16)
    fit(teacher, x_tr, y_tr, 10, 2e-3, lambda out, _, target: F.cross_entropy(out, target), "teacher")
    teacher.eval().requires_grad_(False)

    def distillation(out, inputs, target):
        soft_teacher = F.log_softmax(teacher(inputs) / c.temperature, dim=1)
        soft_student = F.log_softmax(out / c.temperature, dim=1)
        soft = F.kl_div(soft_student, soft_teacher, reduction="batchmean", log_target=True) * c.temperature**2
        return c.soft_weight * soft + (1 - c.soft_weight) * F.cross_entropy(out, target)

    fit(student, x_tr, y_tr, 16, 5e-3, distillation, "student")
    print(f"teacher {accuracy(teacher, x_te, y_te):.3f}  student {accuracy(student, x_te, y_te):.3f}")


main()
