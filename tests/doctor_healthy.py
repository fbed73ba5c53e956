"""Healthy setups as people write them: each gives (model, loader, loss_fn, optimizer) for a seed."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader_of(*tensors, batch_size=32, shuffle=True):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle)


def clusters(rows=512, features=16, classes=4):
    """Points around a centre per class, standardised."""
    y = torch.randint(classes, (rows,))
    x = 1.5 * torch.randn(classes, features)[y] + torch.randn(rows, features)
    return (x - x.mean(0)) / x.std(0), y


def mlp():
    x, y = clusters()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    return model, loader_of(x, y), nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3)


def mlp_sgd():
    x, y = clusters()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return model, loader_of(x, y), F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def cnn():
    y = torch.randint(4, (512,))
    x = torch.randn(512, 1, 8, 8) * 0.5
    for label in range(4):
        x[y == label, :, label * 2 : label * 2 + 2] += 1.0
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 4),
    )
    return model, loader_of(x, y), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class LSTMClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def lstm():
    x = torch.randn(512, 12, 4)
    model = LSTMClassifier()
    y = (x[:, :, 0].sum(1) > 0).long()
    return model, loader_of(x, y), nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=3e-3)


class TinyGPT(nn.Module):
    def __init__(self, vocabulary=32, width=32):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(16, width)
        block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(ids) + self.positions(torch.arange(length))
        return self.head(self.body(x, mask=mask, is_causal=True)).transpose(1, 2)


def transformer():
    start = torch.randint(32, (512, 1))
    ids = (start + torch.arange(13) * torch.randint(1, 4, (512, 1))) % 32
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, loader_of(ids[:, :-1], ids[:, 1:]), nn.CrossEntropyLoss(), optimizer


def regression():
    x = torch.randn(512, 8)
    y = (x @ torch.randn(8, 1)).tanh() + 0.1 * torch.randn(512, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, loader_of(x, y), nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=1e-3)


def linear_regression():
    x = torch.randn(256, 3)
    y = x @ torch.randn(3) + 0.3 * torch.randn(256)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    return model, loader_of(x, y), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05)


def multi_label():
    x = torch.randn(512, 12)
    y = (x @ torch.randn(12, 5) > 0).float()
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 5))
    return model, loader_of(x, y), nn.BCEWithLogitsLoss(), torch.optim.AdamW(model.parameters(), lr=2e-3)


def binary():
    x = torch.randn(512, 12)
    y = (x @ torch.randn(12) > 0).float()
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    return model, loader_of(x, y), nn.BCEWithLogitsLoss(), torch.optim.AdamW(model.parameters(), lr=2e-3)


def label_smoothing_sum():
    """A sum over the batch with a rate that matches, and smoothed labels: unusual, and fine."""
    x, y = clusters()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")
    return model, loader_of(x, y), loss_fn, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def vae():
    def loss_fn(outputs, x):
        reconstruction, mean, log_variance = outputs
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return ((reconstruction - x) ** 2).sum(1).mean() + divergence

    x, _ = clusters()
    model = VAE()
    return model, loader_of(x), loss_fn, torch.optim.Adam(model.parameters(), lr=1e-3)


class HuggingLike(nn.Module):
    """Takes keywords and returns an object with `.loss` and `.logits`, as the transformers library does."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        vectors = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.head(vectors.sum(1) / attention_mask.sum(1, keepdim=True))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def own_loss():
    ids = torch.randint(50, (512, 10))
    rows = [{"input_ids": i, "attention_mask": torch.ones(10), "labels": i[0] % 3} for i in ids]
    model = HuggingLike()
    loader = DataLoader(rows, batch_size=32, shuffle=True)
    return model, loader, None, torch.optim.AdamW(model.parameters(), lr=3e-3)


def frozen_body():
    """Fine-tuning: the body is frozen on purpose, and the optimizer was given everything."""
    x, y = clusters()
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
    model[0].requires_grad_(False)
    return model, loader_of(x, y), nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2)


def warming_up():
    """A schedule that has only just begun to warm up: the rate is nearly 0, on purpose."""
    model, loader, loss_fn, optimizer = transformer()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    return model, loader, loss_fn, optimizer


def small_batches():
    """Batches of 2, without BatchNorm."""
    x, y = clusters(256)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 4))
    return model, loader_of(x, y, batch_size=2), nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3)


class ZeroInit(nn.Module):
    """A residual branch and a head that start at 0, as they should."""

    def __init__(self):
        super().__init__()
        self.stem, self.up, self.down, self.head = (
            nn.Linear(16, 32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 4),
        )
        for layer in (self.down, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.down(F.relu(self.up(x))))


def zero_init():
    x, y = clusters()
    model = ZeroInit()
    return model, loader_of(x, y), nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3)


HEALTHY = {
    function.__name__: function
    for function in (
        mlp,
        mlp_sgd,
        cnn,
        lstm,
        transformer,
        regression,
        linear_regression,
        multi_label,
        binary,
        label_smoothing_sum,
        vae,
        own_loss,
        frozen_body,
        warming_up,
        small_batches,
        zero_init,
    )
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return HEALTHY[name]()
