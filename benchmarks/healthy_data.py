"""Data and small models that the healthy trainings share.

Data are real where scikit-learn bundles them; text is the standard library's own source.
"""

from __future__ import annotations

import argparse
import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from training_loops import Batch


@lru_cache
def bundled(name: str) -> tuple[Tensor, Tensor]:
    """A data set of scikit-learn, features standardised."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32)
    return (x - x.mean(0)) / (x.std(0) + 1e-3), torch.tensor(y)


def digits() -> tuple[Tensor, Tensor]:
    x, y = bundled("digits")
    return x.clamp(-4, 4), y


@lru_cache
def characters() -> tuple[Tensor, int]:
    """A few modules of the standard library as character ids, and how many different characters there are."""
    text = "".join(Path(module.__file__ or "").read_text("utf-8") for module in (argparse, json))[:100_000]
    alphabet = {char: i for i, char in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[char] for char in text]), len(alphabet)


def batches(seed: int, size: int, *tensors: Tensor, keep_last: bool = False) -> Callable[[], Batch]:
    """Shuffled epochs, one batch a call."""
    generator, rows, queue = torch.Generator().manual_seed(seed), len(tensors[0]), list[Tensor]()

    def batch() -> Batch:
        if not queue:
            parts = torch.randperm(rows, generator=generator).split(size)
            queue.extend(parts if keep_last or rows % size == 0 else parts[:-1])
        picked = queue.pop(0)
        return tuple(tensor[picked] for tensor in tensors)

    return batch


def windows(seed: int, size: int, length: int) -> Callable[[], Batch]:
    """Random windows of text, and the same windows one character later."""
    text, _ = characters()
    generator = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        starts = torch.randint(len(text) - length - 1, (size, 1), generator=generator)
        rows = starts + torch.arange(length + 1)
        return text[rows[:, :-1]], text[rows[:, 1:]]

    return batch


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), act()]
    return nn.Sequential(*layers[:-1])


def classifier(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y)


def after_clearing(model: nn.Module, batch: Callable[[], Batch]) -> Callable[[], Batch]:
    """Throw away first what another learner's backward left in this model's gradients."""

    def cleared() -> Batch:
        model.zero_grad(set_to_none=True)
        return batch()

    return cleared


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(64, 64, 16), mlp(8, 64, 64)

    def forward(self, x: Tensor, noise: Tensor, weight: float = 1.0) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, 1)
        made = self.decode(mean + noise * (0.5 * log_variance).exp())
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        error = (made - x).square().sum(1)
        return (error + (divergence if weight == 1.0 else weight * divergence)).mean()


class CharLSTM(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(letters, 24),
            nn.LSTM(24, 48, batch_first=True),
            nn.Linear(48, letters),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])  # type: ignore[no-any-return]


def next_character(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, after: F.cross_entropy(model(ids).flatten(0, 1), after.flatten())


class Transformer(nn.Module):
    def __init__(self, letters: int, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.join = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.think = nn.ModuleList(mlp(width, 4 * width, width, act=nn.GELU) for _ in range(2))
        self.head = nn.Linear(width, letters)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for i in range(2):
            parts = self.mix[i](self.norms[2 * i](x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.join[i](seen)
            x = x + self.think[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x))  # type: ignore[no-any-return]
