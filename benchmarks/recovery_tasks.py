"""Three small trainings for `recovery.py`: a character transformer, a convolutional network and a policy.

Each has a model, an optimizer, a schedule and batches by number, so that every guard sees the same one at the same
step, and a number that says how good the model is on data it has not seen; lower is better.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

if TYPE_CHECKING:
    from collections.abc import Callable

    from recovery_faults import Batch

CONTEXT, WIDTH, ROWS = 48, 64, 24
CLASSES, ACTIONS = 8, 6


class Task(Protocol):
    """A training of one seed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    seed: int
    steps: int

    def batch(self, number: int, held_out: bool = False) -> Batch:
        """A batch by its number."""

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a batch."""

    def held_out_loss(self) -> float:
        """How bad the model is on data it has not seen."""


class Characters(nn.Module):
    """A two-layer transformer over characters."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x) + self.places, mask=self.mask, is_causal=True))


class Transformer:
    """Characters of the standard library's own text."""

    def __init__(self, seed: int, steps: int) -> None:
        text = "".join(Path(module.__file__ or "").read_text("utf-8") for module in (argparse, json, logging))
        alphabet = {char: i for i, char in enumerate(sorted(set(text)))}
        self.text = torch.tensor([alphabet[char] for char in text])
        torch.manual_seed(seed)
        self.model = Characters(len(alphabet))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = sf.warmup_cosine(self.optimizer, warmup_steps=steps // 20, total_steps=steps)
        self.seed, self.steps = seed, steps

    def batch(self, number: int, held_out: bool = False) -> Batch:
        split = int(0.9 * len(self.text))
        low, high = (split, len(self.text) - CONTEXT - 1) if held_out else (0, split - CONTEXT - 1)
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + number)
        rows = torch.randint(low, high, (ROWS, 1), generator=generator) + torch.arange(CONTEXT + 1)
        return self.text[rows[:, :-1]], self.text[rows[:, 1:]]

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return statistics.fmean(float(self.loss(self.batch(-1 - i, held_out=True))) for i in range(20))


class Convolutional:
    """Noisy pictures of one of eight patterns, batch norm and dropout included."""

    def __init__(self, seed: int, steps: int) -> None:
        self.patterns = torch.randn(CLASSES, 1, 12, 12, generator=torch.Generator().manual_seed(5))
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU()
        ).extend([nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, CLASSES)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.scheduler = sf.warmup_cosine(self.optimizer, warmup_steps=steps // 20, total_steps=steps)
        self.seed, self.steps = seed, steps

    def batch(self, number: int, held_out: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + number)
        y = torch.randint(CLASSES, (32,), generator=generator)
        return self.patterns[y] + 2.0 * torch.randn(32, 1, 12, 12, generator=generator), y

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    @torch.no_grad()
    def held_out_loss(self) -> float:
        self.model.eval()
        found = statistics.fmean(float(self.loss(self.batch(-1 - i))) for i in range(40))
        self.model.train()
        return found


class Policy:
    """An actor and a critic choose one of six actions in a context; the rewards are noisy. Its loss means little."""

    def __init__(self, seed: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rewards = torch.randn(8, ACTIONS, generator=generator)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ACTIONS + 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.scheduler = sf.warmup_cosine(self.optimizer, warmup_steps=steps // 20, total_steps=steps)
        self.seed, self.steps = seed, steps

    def batch(self, number: int, held_out: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + number)
        x = torch.randn(64, 8, generator=generator)
        return x, x @ self.rewards + torch.randn(64, ACTIONS, generator=generator)

    def loss(self, batch: Batch) -> Tensor:
        x, rewards = batch
        found = self.model(x)
        chances, value = found[:, :-1].log_softmax(1), found[:, -1]
        action = torch.multinomial(chances.detach().exp().nan_to_num(1.0), 1)  # it refuses what is not finite
        reward = rewards.gather(1, action)[:, 0]
        gain = -(chances.gather(1, action)[:, 0] * (reward - value.detach())).mean()
        entropy = -(chances.exp() * chances).sum(1).mean()
        return gain + 0.5 * F.mse_loss(value, reward) - 0.01 * entropy

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The reward that is missed against the best action."""
        x = torch.cat([self.batch(-1 - i)[0] for i in range(40)])
        means = x @ self.rewards
        chances = self.model(x)[:, :-1].softmax(1)
        return float((means.max(1).values - (chances * means).sum(1)).mean())


TASKS: dict[str, Callable[[int, int], Task]] = {
    "transformer": Transformer,
    "convolutional": Convolutional,
    "policy": Policy,
}
