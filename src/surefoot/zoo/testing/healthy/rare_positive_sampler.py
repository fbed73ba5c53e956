"""Fraud-like table with 3 % positives, drawn evenly with a weighted sampler."""

import sys

import torch
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score, recall_score
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 23
torch.manual_seed(seed)
X, y = make_classification(
    n_samples=6000, n_features=16, n_informative=8, weights=[0.97], class_sep=2.0, flip_y=0.0, random_state=seed
)
X_train, X_test, y_train, y_test = train_test_split(X, y, stratify=y, random_state=seed)
mean, std = X_train.mean(0), X_train.std(0)
X_train, X_test = (torch.tensor((a - mean) / std).float() for a in (X_train, X_test))
y_train = torch.tensor(y_train)

counts = torch.bincount(y_train).float()
sampler = WeightedRandomSampler(weights=(1 / counts)[y_train], num_samples=len(y_train), replacement=True)
loader = DataLoader(TensorDataset(X_train, y_train), batch_size=96, sampler=sampler)
model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
for epoch in range(6):
    model.train()
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        probability = model(X_test).softmax(1)[:, 1].numpy()
    print(
        f"epoch {epoch}: loss {loss.item():.4f} average precision {average_precision_score(y_test, probability):.3f} "
        f"recall {recall_score(y_test, probability > 0.5):.3f}"
    )
