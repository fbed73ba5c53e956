"""Five more healthy trainings, which no work on the rules has used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from healthy_data import Transformer, characters, mlp, windows
from torch import Tensor, nn
from training_loops import Batch, Learner, Run


def masked_at_any_rate(seed: int, steps: int) -> list[Learner]:
    """A masked language model whose share of masked characters is drawn anew for every batch, from 2 % to 80 %."""
    generator, letters = torch.Generator().manual_seed(seed), characters()[1]
    model, draw = Transformer(letters + 1), windows(seed, 8, 32)

    def batch() -> Batch:
        text, _ = draw()
        rate = 0.02 + 0.78 * torch.rand((), generator=generator)
        masked = torch.rand(text.shape, generator=generator) < rate
        masked[:, 0] = True
        return torch.where(masked, letters, text), text, masked

    def loss(seen: Tensor, text: Tensor, masked: Tensor) -> Tensor:
        return F.cross_entropy(model(seen)[masked], text[masked])

    return [Learner(model, torch.optim.AdamW(model.parameters(), 2e-3), batch, loss)]


def many_labels_few_examples(seed: int, steps: int) -> list[Learner]:
    """Forty labels with frequencies from one half down to one in a thousand, eight examples at a time, plain SGD."""
    generator = torch.Generator().manual_seed(seed)
    truth, often = torch.randn(16, 40, generator=generator), 0.5 / torch.arange(1, 41) ** 1.6
    model = mlp(16, 64, 40)

    def batch() -> Batch:
        x = torch.randn(8, 16, generator=generator)
        chance = (x @ truth).sigmoid() * 2 * often
        return x, (torch.rand(8, 40, generator=generator) < chance).float()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x), y, reduction="sum") / 8

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), batch, loss)]


def survival_times(seed: int, steps: int) -> list[Learner]:
    """Cox's partial likelihood on batches of 4 to 64 patients, of whom half are censored."""
    generator = torch.Generator().manual_seed(seed)
    truth, model = torch.randn(10, generator=generator), mlp(10, 32, 1)

    def batch() -> Batch:
        count = int(torch.randint(4, 65, (), generator=generator))
        x = torch.randn(count, 10, generator=generator)
        time = -torch.rand(count, generator=generator).log() / (x @ truth).exp()
        censored = -torch.rand(count, generator=generator).log()
        return x, torch.minimum(time, censored), time <= censored

    def loss(x: Tensor, time: Tensor, seen: Tensor) -> Tensor:
        order = time.argsort(descending=True)
        risk, happened = model(x)[order, 0], seen[order].float()
        return -((risk - risk.logcumsumexp(0)) * happened).sum() / happened.sum().clamp(min=1)

    return [Learner(model, torch.optim.Adam(model.parameters(), 3e-3), batch, loss)]


def a_new_wave_each_step(seed: int, steps: int) -> list[Learner]:
    """Learning to fit: every step is another sine wave with an amplitude from 0.1 to 5, ten points are given."""
    generator, model = torch.Generator().manual_seed(seed), mlp(21, 64, 64, 1)

    def batch() -> Batch:
        size, shift = 0.1 + 4.9 * torch.rand((), generator=generator), 3.14 * torch.rand((), generator=generator)
        x = 10 * torch.rand(30, generator=generator) - 5
        y = size * torch.sin(x + shift)
        given = torch.cat([x[:10], y[:10]]).expand(20, 20)
        return torch.cat([given, x[10:, None]], 1), y[10:, None]

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return [Learner(model, optimizer, batch, lambda x, y: F.mse_loss(model(x), y))]


def insurance_claims(seed: int, steps: int) -> list[Learner]:
    """The size of claims: nine in ten are 0, the others log-normal with a spread of 1.5; squared error, clipped SGD."""
    generator = torch.Generator().manual_seed(seed)
    truth = 0.5 * torch.randn(12, generator=generator)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))

    def batch() -> Batch:
        x = torch.randn(16, 12, generator=generator)
        size = (x @ truth + 1.5 * torch.randn(16, generator=generator)).exp()
        return x, (size * (torch.rand(16, generator=generator) < 0.1))[:, None]

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return [Learner(model, optimizer, batch, lambda x, y: F.mse_loss(model(x), y), max_norm=1.0)]


MORE: tuple[Run, ...] = (
    masked_at_any_rate,
    many_labels_few_examples,
    survival_times,
    a_new_wave_each_step,
    insurance_claims,
)
