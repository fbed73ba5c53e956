import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch import nn


def build_encoder():
    return nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def pretrain(x, path):
    """Denoising autoencoder; only the encoder is kept."""
    encoder = build_encoder()
    decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 13))
    opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    for step in range(300):
        rows = x[torch.randint(len(x), (32,))]
        loss = F.mse_loss(decoder(encoder(rows + 0.2 * torch.randn_like(rows))), rows)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 100 == 0:
            print(f"[pretrain] step {step} reconstruction {loss.item():.4f}")
    torch.save(encoder.state_dict(), path)


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    torch.manual_seed(seed)
    x, y = load_wine(return_X_y=True)
    x_tr, x_te, y_tr, y_te = train_test_split(x, y, test_size=0.3, stratify=y, random_state=seed)
    mean, std = x_tr.mean(0), x_tr.std(0)
    x_tr, x_te = (torch.tensor((a - mean) / std, dtype=torch.float32) for a in (x_tr, x_te))
    y_tr, y_te = torch.tensor(y_tr), torch.tensor(y_te)

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "encoder.pt")
        pretrain(x_tr, path)
        encoder = build_encoder()
        encoder.load_state_dict(torch.load(path))

    # linear probe: the encoder stays as it was, the optimizer only knows the classifier
    model = nn.Sequential(encoder, nn.Linear(8, 3))
    opt = torch.optim.Adam(model[1].parameters(), lr=2e-2)
    for epoch in range(25):
        for idx in torch.randperm(len(x_tr)).split(16):
            loss = F.cross_entropy(model(x_tr[idx]), y_tr[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 5 == 4:
            with torch.no_grad():
                acc = (model(x_te).argmax(1) == y_te).float().mean().item()
            print(f"[probe] epoch {epoch + 1} loss {loss.item():.4f} test accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
