import argparse

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, n_in, n_hidden=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_in, n_hidden),
            nn.ReLU(),
            nn.Linear(n_hidden, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("seed", type=int, nargs="?", default=0)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    torch.manual_seed(args.seed)

    X, y = load_breast_cancer(return_X_y=True)
    X_tr, X_te, y_tr, y_te = train_test_split(X, y, stratify=y, random_state=args.seed)
    scaler = StandardScaler().fit(X_tr)
    X_tr = torch.tensor(scaler.transform(X_tr), dtype=torch.float32)
    X_te = torch.tensor(scaler.transform(X_te), dtype=torch.float32)
    y_tr, y_te = torch.tensor(y_tr).float(), torch.tensor(y_te).float()

    model = Classifier(X.shape[1])
    loss_fn = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(TensorDataset(X_tr, y_tr), batch_size=32, shuffle=True)
    for epoch in range(20):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(xb), yb)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            test_loss = loss_fn(model(X_te), y_te).item()
        if epoch % 2 == 1:
            print(f"epoch {epoch + 1:2d} train {loss.item():.4f} test {test_loss:.4f}")


if __name__ == "__main__":
    main()
