"""Healthy trainings in which something changes on purpose: the data, the task, the loss, the rate, what is trained.

The level of the loss moves for a good reason in each of them, often at once and often upwards. None was written with a
rule of a detector in view.
"""

from __future__ import annotations

import copy
import math
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from healthy_data import (
    VAE,
    CharLSTM,
    Transformer,
    batches,
    characters,
    classifier,
    digits,
    mlp,
    next_character,
    windows,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, OneCycleLR
from training_loops import Batch, Learner, Run

if TYPE_CHECKING:
    from collections.abc import Callable


def _adam(model: nn.Module, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr)


def _in_turn(steps: int, *parts: Callable[[], Batch]) -> Callable[[], Batch]:
    """The parts one after the other, each for an equal share of the steps."""
    calls = count()

    def batch() -> Batch:
        return parts[min(next(calls) * len(parts) // steps, len(parts) - 1)]()

    return batch


# ---- the loss changes -----------------------------------------------------------------------------------------------


def _weighted_vae(seed: int, weight: Callable[[int], float]) -> list[Learner]:
    model, generator, calls = VAE(), torch.Generator().manual_seed(seed), count()
    draw = batches(seed, 64, digits()[0])

    def batch() -> Batch:
        return *draw(), torch.randn(64, 8, generator=generator)

    return [Learner(model, _adam(model, 1e-3), batch, lambda x, noise: model(x, noise, weight(next(calls))))]


def vae_beta_jump(seed: int, steps: int) -> list[Learner]:
    """The weight of a VAE's divergence goes from 0.1 to 8 from one step to the next."""
    return _weighted_vae(seed, lambda i: 0.1 if i < steps // 2 else 8.0)


def kl_annealing(seed: int, steps: int) -> list[Learner]:
    """Cyclical annealing: the weight of the divergence rises from 0 to 1 four times, and falls back at once."""
    period = max(steps // 4, 1)
    return _weighted_vae(seed, lambda i: min(2 * (i % period) / period, 1.0))


def auxiliary_loss_added(seed: int, steps: int) -> list[Learner]:
    """From two fifths on, a second head with a loss of its own, ten times as large, is trained too."""
    x, y = digits()
    body, head, second = mlp(64, 64, 32), nn.Linear(32, 10), nn.Linear(32, 64)
    model, calls = nn.ModuleList([body, head, second]), count()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        inner = body(a).relu()
        plain = F.cross_entropy(head(inner), b)
        return plain + 10 * F.mse_loss(second(inner), a) if next(calls) > 2 * steps // 5 else plain

    return [Learner(model, _adam(model, 1e-3), batches(seed, 32, x, y), loss)]


def absolute_then_squared(seed: int, steps: int) -> list[Learner]:
    """Regression on targets of size 30 begins with the absolute error and goes on with the squared error."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 8, generator=generator)
    y = 30 * torch.sin(x @ torch.randn(8, 1, generator=generator)) + 3 * torch.randn(512, 1, generator=generator)
    model, calls = mlp(8, 64, 1), count()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return F.l1_loss(model(a), b) if next(calls) < steps // 2 else F.mse_loss(model(a), b)

    return [Learner(model, _adam(model, 3e-3), batches(seed, 32, x, y), loss)]


def distillation_cooling(seed: int, steps: int) -> list[Learner]:
    """A student follows a teacher; the temperature falls from 8 to 1 in four stairs, without the factor T squared."""
    x, y = digits()
    torch.manual_seed(seed)
    teacher, student, calls = mlp(64, 64, 10), mlp(64, 16, 10), count()
    before, draw = _adam(teacher, 3e-3), batches(seed, 64, x, y)
    for _ in range(150):
        a, b = draw()
        before.zero_grad()
        F.cross_entropy(teacher(a), b).backward()
        before.step()

    def loss(a: Tensor, _: Tensor) -> Tensor:
        heat = (8.0, 4.0, 2.0, 1.0)[min(4 * next(calls) // steps, 3)]
        with torch.no_grad():
            wanted = (teacher(a) / heat).softmax(1)
        return F.kl_div((student(a) / heat).log_softmax(1), wanted, reduction="batchmean")

    return [Learner(student, _adam(student, 2e-3), draw, loss)]


# ---- the data change ------------------------------------------------------------------------------------------------


def sequence_length_grows(seed: int, steps: int) -> list[Learner]:
    """A character LSTM on windows of 8, then 16, 32 and 64 characters."""
    model = CharLSTM(characters()[1])
    batch = _in_turn(steps, *(windows(seed, 8, length) for length in (8, 16, 32, 64)))
    return [Learner(model, _adam(model, 3e-3), batch, next_character(model), max_norm=1.0)]


def pixels_permuted(seed: int, steps: int) -> list[Learner]:
    """Digits until the loss is near 0, then the same digits with their pixels in another order: all is new."""
    x, y = digits()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
    model = mlp(64, 64, 10)
    batch = _in_turn(steps, batches(seed, 32, x, y), batches(seed, 32, x[:, order], y))
    return [Learner(model, _adam(model, 2e-3), batch, classifier(model))]


def corpus_changes(seed: int, steps: int) -> list[Learner]:
    """A language model goes from source text to the same text with its alphabet shuffled, and back."""
    letters = characters()[1]
    table = torch.randperm(letters, generator=torch.Generator().manual_seed(seed))
    plain = windows(seed, 8, 32)

    def shuffled() -> Batch:
        return tuple(table[part] for part in plain())

    model = Transformer(letters)
    batch = _in_turn(steps, plain, shuffled, plain)
    return [Learner(model, torch.optim.AdamW(model.parameters(), 2e-3), batch, next_character(model), max_norm=1.0)]


def new_classes_in_pairs(seed: int, steps: int) -> list[Learner]:
    """Continual learning: two digits at a time, and each new pair is one that the head has learned to exclude."""
    x, y = digits()
    parts = [batches(seed, 32, x[y // 2 == pair], y[y // 2 == pair]) for pair in range(5)]
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    return [Learner(model, optimizer, _in_turn(steps, *parts), classifier(model))]


def online_drift(seed: int, steps: int) -> list[Learner]:
    """One row at a time from a regression whose truth turns slowly and jumps once in 300 steps."""
    generator, calls = torch.Generator().manual_seed(seed), count()
    truth = torch.randn(8, generator=generator)
    model = nn.Linear(8, 1)

    def batch() -> Batch:
        jump = 1.0 if next(calls) % 300 == 299 else 0.01
        truth.add_(jump * torch.randn(8, generator=generator))
        x = torch.randn(1, 8, generator=generator)
        return x, x @ truth + 0.1 * torch.randn(1, generator=generator)

    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    return [Learner(model, optimizer, batch, lambda a, b: F.mse_loss(model(a)[:, 0], b))]


def range_grows(seed: int, steps: int) -> list[Learner]:
    """A harder task in four stages: a function is learned on intervals of growing width."""
    generator, calls = torch.Generator().manual_seed(seed), count()
    model = mlp(1, 64, 64, 1, act=nn.Tanh)

    def batch() -> Batch:
        wide = 1.0 + min(4 * next(calls) // steps, 3)
        x = wide * (2 * torch.rand(32, 1, generator=generator) - 1)
        return x, torch.sin(3 * x) * x.abs()

    return [Learner(model, _adam(model, 3e-3), batch, lambda a, b: F.mse_loss(model(a), b))]


def batch_size_schedule(seed: int, steps: int) -> list[Learner]:
    """Batches of 256, then 64, 16 and 4: the noise grows while the loss falls."""
    x, y = digits()
    model = mlp(64, 64, 10)
    batch = _in_turn(steps, *(batches(seed, size, x, y) for size in (256, 64, 16, 4)))
    return [Learner(model, torch.optim.SGD(model.parameters(), 5e-3, momentum=0.9), batch, classifier(model))]


def augmentation_switched_on(seed: int, steps: int) -> list[Learner]:
    """Strong noise and masking of the inputs begin in the middle of the run."""
    x, y = digits()
    generator, draw = torch.Generator().manual_seed(seed), batches(seed, 32, x, y)
    model = mlp(64, 64, 10)

    def noisy() -> Batch:
        a, b = draw()
        kept = torch.rand(a.shape, generator=generator) < 0.6
        return (a + torch.randn(a.shape, generator=generator)) * kept, b

    return [Learner(model, _adam(model, 2e-3), _in_turn(steps, draw, noisy), classifier(model))]


def task_switching(seed: int, steps: int) -> list[Learner]:
    """Blocks of 50 steps: classify digits, rebuild them, predict their ink; each loss has its own scale."""
    x, y = digits()
    body, heads = mlp(64, 64, 32), nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 64), nn.Linear(32, 1)])
    model, calls = nn.ModuleList([body, heads]), count()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        inner, task = body(a).relu(), next(calls) // 50 % 3
        if task == 0:
            return F.cross_entropy(heads[0](inner), b)
        wanted = a if task == 1 else a.sum(1, keepdim=True)
        return F.mse_loss(heads[task](inner), wanted)

    return [Learner(model, _adam(model, 1e-3), batches(seed, 32, x, y), loss)]


def random_task_each_step(seed: int, steps: int) -> list[Learner]:
    """One of three tasks at random, with losses of about 1, 30 and 1,000; the last is drawn once in 40 steps."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 8, generator=generator)
    truth = x @ torch.randn(8, 3, generator=generator)
    model = mlp(8, 64, 3)
    draw = batches(seed, 16, x, truth)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        task = int(torch.multinomial(torch.tensor([0.6, 0.375, 0.025]), 1, generator=generator))
        return (1.0, 30.0, 1000.0)[task] * F.mse_loss(model(a)[:, task], b[:, task] + 0.3)

    return [Learner(model, _adam(model, 1e-3), draw, loss)]


# ---- the rate changes -----------------------------------------------------------------------------------------------


def transformer_restarts(seed: int, steps: int) -> list[Learner]:
    """Cosine with restarts whose period doubles, on a transformer: each restart raises the loss for a while."""
    model = Transformer(characters()[1])
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    scheduler = CosineAnnealingWarmRestarts(optimizer, max(steps // 7, 1), 2)
    return [Learner(model, optimizer, windows(seed, 8, 32), next_character(model), scheduler, 1.0)]


def rate_rises_exponentially(seed: int, steps: int) -> list[Learner]:
    """A search for the rate that stops in time: it rises from 1e-5 to 1e-2 over the run."""
    model = mlp(64, 64, 10)
    optimizer = _adam(model, 1e-5)
    scheduler = LambdaLR(optimizer, lambda i: 1000.0 ** (i / steps))
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model), scheduler)]


def triangular_rate(seed: int, steps: int) -> list[Learner]:
    """A triangular cycle between 1e-3 and 0.1 every 200 steps, with momentum."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    scheduler = CyclicLR(optimizer, 1e-3, 0.1, step_size_up=100, cycle_momentum=False)
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model), scheduler)]


def one_cycle(seed: int, steps: int) -> list[Learner]:
    """The one-cycle policy, momentum included."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 0.15, total_steps=steps + 1)
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model), scheduler)]


# ---- what is trained changes ----------------------------------------------------------------------------------------


def progressive_unfreezing(seed: int, steps: int) -> list[Learner]:
    """Four layers; the last is trained first, and one more is unfrozen after every quarter."""
    model, calls = mlp(64, 48, 48, 48, 10), count()
    layers = [module for module in model if isinstance(module, nn.Linear)]
    draw = batches(seed, 32, *digits())

    def batch() -> Batch:
        trained = 1 + min(4 * next(calls) // steps, 3)
        for i, layer in enumerate(reversed(layers)):
            layer.requires_grad_(i < trained)
        return draw()

    return [Learner(model, _adam(model, 2e-3), batch, classifier(model))]


def phases_without_gradient(seed: int, steps: int) -> list[Learner]:
    """For 20 of every 100 steps the loss is multiplied by 0: the statistics are collected, nothing is learned."""
    model, calls = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)), count()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) * (0.0 if next(calls) % 100 >= 80 else 1.0)

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.05), batches(seed, 32, *digits()), loss)]


def gradual_pruning(seed: int, steps: int) -> list[Learner]:
    """Every tenth of the run the smallest weights are set to 0, up to four fifths of them."""
    model, calls = mlp(64, 64, 10), count()
    draw, masks = batches(seed, 32, *digits()), dict[int, Tensor]()

    @torch.no_grad()
    def batch() -> Batch:
        i = next(calls)
        for place, weight in enumerate(model.parameters()):
            if weight.dim() == 2 and i % max(steps // 10, 1) == 0 and i:
                share = min(0.1 * (10 * i // steps), 0.8)
                masks[place] = weight.abs() > weight.abs().flatten().quantile(share)
            if place in masks:
                weight.mul_(masks[place])
        return draw()

    return [Learner(model, _adam(model, 2e-3), batch, classifier(model))]


def last_layer_reset(seed: int, steps: int) -> list[Learner]:
    """The last layer is made new in the middle of the run, as some do in fine-tuning and reinforcement learning."""
    model, calls = mlp(64, 64, 10), count()
    draw = batches(seed, 32, *digits())

    def batch() -> Batch:
        if next(calls) == steps // 2:
            model[-1].reset_parameters()
        return draw()

    return [Learner(model, _adam(model, 1e-3), batch, classifier(model))]


def lookahead(seed: int, steps: int) -> list[Learner]:
    """Every sixth step the weights go half of the way back to slow copies of them."""
    model, calls = mlp(64, 64, 10), count()
    slow, draw = copy.deepcopy(model), batches(seed, 32, *digits())

    @torch.no_grad()
    def batch() -> Batch:
        if next(calls) % 6 == 5:
            for kept, weight in zip(slow.parameters(), model.parameters(), strict=True):
                kept.lerp_(weight, 0.5)
                weight.copy_(kept)
        return draw()

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batch, classifier(model))]


def head_then_everything(seed: int, steps: int) -> list[Learner]:
    """Fine-tuning in two stages: the head alone at 1e-2, then everything with a warm-up to 3e-3."""
    model, calls = mlp(64, 64, 32, 10), count()
    optimizer, draw = _adam(model, 1e-2), batches(seed, 32, *digits())
    model[:-1].requires_grad_(False)

    def batch() -> Batch:
        if next(calls) == steps // 2:
            model.requires_grad_(True)
        return draw()

    def schedule(i: int) -> float:
        return 1.0 if i < steps // 2 else 0.3 * min((i - steps // 2) / 50, 1.0)

    return [Learner(model, optimizer, batch, classifier(model), LambdaLR(optimizer, schedule))]


def grokking_with_decay(seed: int, steps: int) -> list[Learner]:
    """Modular addition, memorised first, under strong weight decay."""
    numbers = torch.cartesian_prod(torch.arange(23), torch.arange(23))
    kept = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))[:300]
    pairs = numbers[kept]
    embed, body = nn.Embedding(23, 24), mlp(48, 96, 23)
    model = nn.ModuleList([embed, body])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1.0, betas=(0.9, 0.98))

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(body(embed(a).flatten(1)), b)

    return [Learner(model, optimizer, batches(seed, 100, pairs, pairs.sum(1) % 23), loss)]


def slow_decay_to_zero(seed: int, steps: int) -> list[Learner]:
    """The rate falls linearly to 0 well before the end, and the last tenth of the run changes nothing."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda i: max(0.0, 1 - i / (0.9 * steps)))
    return [Learner(model, optimizer, batches(seed, 16, *digits()), classifier(model), scheduler)]


def dropout_scheduled(seed: int, steps: int) -> list[Learner]:
    """Dropout rises from 0 to 0.6 in stairs (curriculum dropout)."""
    dropout, calls = nn.Dropout(0.0), count()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), dropout, nn.Linear(128, 10))
    draw = batches(seed, 32, *digits())

    def batch() -> Batch:
        dropout.p = 0.2 * min(4 * next(calls) // steps, 3)
        return draw()

    return [Learner(model, _adam(model, 2e-3), batch, classifier(model))]


def seasons(seed: int, steps: int) -> list[Learner]:
    """A forecast whose noise has seasons: quiet and loud stretches of 150 steps take turns."""
    generator, calls = torch.Generator().manual_seed(seed), count()
    truth, model = torch.randn(8, 1, generator=generator), nn.Linear(8, 1)

    def batch() -> Batch:
        loud = 0.1 + 1.5 * (1 + math.sin(2 * math.pi * next(calls) / 300))
        x = torch.randn(16, 8, generator=generator)
        return x, x @ truth + loud * torch.randn(16, 1, generator=generator)

    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    return [Learner(model, optimizer, batch, lambda a, b: F.mse_loss(model(a), b))]


PHASES: tuple[Run, ...] = (
    vae_beta_jump,
    kl_annealing,
    auxiliary_loss_added,
    absolute_then_squared,
    distillation_cooling,
    sequence_length_grows,
    pixels_permuted,
    corpus_changes,
    new_classes_in_pairs,
    online_drift,
    range_grows,
    batch_size_schedule,
    augmentation_switched_on,
    task_switching,
    random_task_each_step,
    transformer_restarts,
    rate_rises_exponentially,
    triangular_rate,
    one_cycle,
    progressive_unfreezing,
    phases_without_gradient,
    gradual_pruning,
    last_layer_reset,
    lookahead,
    head_then_everything,
    grokking_with_decay,
    slow_decay_to_zero,
    dropout_scheduled,
    seasons,
)
