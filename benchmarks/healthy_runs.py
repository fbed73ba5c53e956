"""Healthy trainings of many kinds: what a tool that watches training must stay silent on.

Each function makes one training from a seed and a number of steps; `HEALTHY` lists them by name. They are picked for
being awkward (losses that fall by orders of magnitude, cross zero, jump when the data changes, gradients that are 0
most of the time, heavy tails, tiny batches), and none of them has anything wrong with it: every one reaches what it is
after in the bare loop. Data are real where scikit-learn bundles them; text is the standard library's own source.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from healthy_data import (
    VAE,
    CharLSTM,
    Transformer,
    after_clearing,
    batches,
    bundled,
    characters,
    classifier,
    digits,
    mlp,
    next_character,
    windows,
)
from healthy_fields import FIELDS
from healthy_losses import LOSSES
from healthy_more import MORE
from healthy_phases import PHASES
from healthy_rl import REINFORCEMENT
from healthy_unseen import UNSEEN
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, MultiStepLR
from training_loops import Batch, Learner, Run

# ---- classification -------------------------------------------------------------------------------------------------


def fast_fall(seed: int, steps: int) -> list[Learner]:
    """The loss falls by most of its size within the first steps."""
    model = mlp(64, 128, 10)
    return [Learner(model, torch.optim.Adam(model.parameters(), 1e-2), batches(seed, 64, *digits()), classifier(model))]


def batch_of_four(seed: int, steps: int) -> list[Learner]:
    """Digits four at a time, down to interpolation: nearly every batch is solved, a few are not."""
    model = mlp(64, 64, 10)
    return [
        Learner(
            model,
            torch.optim.SGD(model.parameters(), 5e-3, momentum=0.9),
            batches(seed, 4, *digits()),
            classifier(model),
        )
    ]


def batch_of_two_noisy_labels(seed: int, steps: int) -> list[Learner]:
    """Breast cancer two at a time with 1 % of the labels wrong: rare batches are far worse than the rest."""
    x, y = bundled("breast_cancer")
    flip = torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 0.01
    model = mlp(30, 32, 2)
    return [
        Learner(
            model,
            torch.optim.Adam(model.parameters(), 1e-3),
            batches(seed, 2, x, torch.where(flip, 1 - y, y)),
            classifier(model),
        )
    ]


def warm_restarts(seed: int, steps: int) -> list[Learner]:
    """SGDR: the learning rate jumps back up every 100 steps."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)
    scheduler = CosineAnnealingWarmRestarts(optimizer, 100)
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model), scheduler)]


def step_decay(seed: int, steps: int) -> list[Learner]:
    """The learning rate is divided by 10 twice: the loss falls in stairs."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = MultiStepLR(optimizer, [steps // 2, 3 * steps // 4])
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model), scheduler)]


def hinge_mostly_zero(seed: int, steps: int) -> list[Learner]:
    """A linear support vector machine: gradients are exactly 0 on most batches once the margin is kept."""
    x, y = bundled("breast_cancer")
    model = nn.Linear(30, 1)

    def loss(x: Tensor, sign: Tensor) -> Tensor:
        return (1 - sign * model(x)[:, 0]).relu().mean()

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.1), batches(seed, 4, x, 2.0 * y - 1), loss)]


def sum_reduced(seed: int, steps: int) -> list[Learner]:
    """The loss is a sum over the batch, and the last batch of an epoch is small."""
    model = mlp(64, 64, 10)
    return [
        Learner(
            model,
            torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9),
            batches(seed, 100, *digits(), keep_last=True),
            lambda x, y: F.cross_entropy(model(x), y, reduction="sum"),
        )
    ]


def ragged_last_batch(seed: int, steps: int) -> list[Learner]:
    """178 wines in batches of 59: the last batch of every epoch is one row."""
    x, y = bundled("wine")
    model = mlp(13, 32, 3)
    return [
        Learner(
            model,
            torch.optim.Adam(model.parameters(), 3e-3),
            batches(seed, 59, x, y, keep_last=True),
            classifier(model),
        )
    ]


def curriculum(seed: int, steps: int) -> list[Learner]:
    """Half the classes first, all of them from the middle of the run on: the loss jumps for good reason."""
    x, y = digits()
    easy, full, calls = batches(seed, 32, x[y < 5], y[y < 5]), batches(seed, 32, x, y), [0]
    model = mlp(64, 64, 10)

    def batch() -> Batch:
        calls[0] += 1
        return easy() if calls[0] <= steps // 2 else full()

    return [Learner(model, torch.optim.Adam(model.parameters(), 2e-3), batch, classifier(model))]


def edge_of_stability(seed: int, steps: int) -> list[Learner]:
    """Full-batch gradient descent with a step so long that the loss goes up about as often as down, and still falls."""
    x, y = (part[:300] for part in digits())
    model = mlp(64, 32, 32, 10, act=nn.Tanh)
    return [Learner(model, torch.optim.SGD(model.parameters(), 0.5), lambda: (x, y), classifier(model))]


def two_alternating_batches(seed: int, steps: int) -> list[Learner]:
    """An easy batch and one with random labels take turns, so the loss alternates for ever."""
    x, y = (part[:64] for part in digits())
    labels = y.clone()
    labels[32:] = torch.randint(10, (32,), generator=torch.Generator().manual_seed(seed))
    model, turn = nn.Linear(64, 10), [0]

    def batch() -> Batch:
        turn[0] = 1 - turn[0]
        rows = slice(32 * turn[0], 32 * turn[0] + 32)
        return x[rows], labels[rows]

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.01), batch, classifier(model))]


class _ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 8, 8)))  # type: ignore[no-any-return]


def dropout_batchnorm_cnn(seed: int, steps: int) -> list[Learner]:
    """A small convolutional network with BatchNorm and dropout."""
    model = _ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model))]


def fp16_with_scaler(seed: int, steps: int) -> list[Learner]:
    """Half precision with a loss scale that overflows now and then, as it is meant to."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, fused=True)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="sum") / 4

    return [Learner(model, optimizer, batches(seed, 32, *digits()), loss, precision="fp16")]


def accumulate_four(seed: int, steps: int) -> list[Learner]:
    """Four microbatches of eight to a step."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    return [Learner(model, optimizer, batches(seed, 8, *digits()), classifier(model), accumulate=4)]


def frozen_body(seed: int, steps: int) -> list[Learner]:
    """Fine-tuning: the body was trained on the small digits and is frozen, a new head learns all ten."""
    x, y = digits()
    body, small = mlp(64, 64, 32), batches(seed, 64, x[y < 5], y[y < 5])
    old = nn.Sequential(body, nn.ReLU(), nn.Linear(32, 5))
    before = torch.optim.Adam(old.parameters(), 3e-3)
    for _ in range(100):
        a, b = small()
        before.zero_grad()
        F.cross_entropy(old(a), b).backward()
        before.step()
    body.requires_grad_(False)
    model = nn.Sequential(body, nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    return [Learner(model, optimizer, batches(seed, 32, x, y), classifier(model))]


class _ZeroBranch(nn.Module):
    """A residual branch whose last layer starts at zero, so its first layer gets no gradient at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(x)))  # type: ignore[no-any-return]


def zero_initialised_branches(seed: int, steps: int) -> list[Learner]:
    """Residual branches that start as nothing and grow."""
    model = nn.Sequential(nn.Linear(64, 32), *(_ZeroBranch(32) for _ in range(6)), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model))]


# ---- regression -----------------------------------------------------------------------------------------------------


def loss_to_1e_4(seed: int, steps: int) -> list[Learner]:
    """A student learns a smooth teacher: the loss falls from 1 to about 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 2, generator=generator)
    y = torch.sin(x).sum(1, keepdim=True)
    model = mlp(2, 64, 64, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = LambdaLR(optimizer, lambda i: max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(i / steps, 1))))
    return [Learner(model, optimizer, batches(seed, 64, x, y), lambda a, b: F.mse_loss(model(a), b), scheduler)]


def loss_to_1e_8(seed: int, steps: int) -> list[Learner]:
    """Noiseless linear regression in small batches: the loss falls by many orders of magnitude, to rounding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 16, generator=generator)
    y = x @ torch.randn(16, 1, generator=generator)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    return [Learner(model, optimizer, batches(seed, 16, x, y), lambda a, b: F.mse_loss(model(a), b))]


def heavy_tailed_noise(seed: int, steps: int) -> list[Learner]:
    """Diabetes with Student-t noise of 2 degrees of freedom on the target: its variance does not exist."""
    x, y = bundled("diabetes")
    y = ((y - y.float().mean()) / y.float().std()).float()
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(10, 1)
    draw = batches(seed, 16, x, y)

    def batch() -> Batch:
        a, b = draw()
        normal = torch.randn(3, len(b), generator=generator)
        return a, b + 0.5 * normal[0] / (normal[1:].square().mean(0)).sqrt()

    return [
        Learner(
            model,
            torch.optim.SGD(model.parameters(), 2e-3),
            batch,
            lambda a, b: F.mse_loss(model(a)[:, 0], b),
        )
    ]


def lazy_regulariser(seed: int, steps: int) -> list[Learner]:
    """A gradient penalty on every 16th step, 16 times as heavy, as StyleGAN does it: one step in 16 is different."""
    x, y = digits()
    model, calls = mlp(64, 64, 10, act=nn.Tanh), [0]

    def loss(a: Tensor, b: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] % 16:
            return F.cross_entropy(model(a), b)
        a = a.clone().requires_grad_()
        plain = F.cross_entropy(model(a), b)
        (slope,) = torch.autograd.grad(plain, a, create_graph=True)
        return plain + 16 * 10 * slope.square().sum()

    return [Learner(model, torch.optim.Adam(model.parameters(), 1e-3), batches(seed, 32, x, y), loss)]


# ---- generative, contrastive, text ----------------------------------------------------------------------------------


def gan(seed: int, steps: int) -> list[Learner]:
    """A generator and a discriminator on a ring of eight Gaussians; neither loss says anything about progress."""
    generator = torch.Generator().manual_seed(seed)
    maker, judge = mlp(4, 32, 32, 2), mlp(2, 32, 32, 1)

    def latent() -> Batch:
        return (torch.randn(64, 4, generator=generator),)

    def both() -> Batch:
        angle = torch.randint(8, (64,), generator=generator) * (math.pi / 4)
        ring = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2, generator=generator)
        return ring, *latent()

    def judge_loss(ring: Tensor, noise: Tensor) -> Tensor:
        return F.softplus(-judge(ring)).mean() + F.softplus(judge(maker(noise).detach())).mean()

    def maker_loss(noise: Tensor) -> Tensor:
        return F.softplus(-judge(maker(noise))).mean()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 1e-3, betas=(0.5, 0.999))

    return [
        Learner(judge, adam(judge), after_clearing(judge, both), judge_loss),
        Learner(maker, adam(maker), latent, maker_loss),
    ]


def vae(seed: int, steps: int) -> list[Learner]:
    """A variational autoencoder on digits: reconstruction and divergence pull against each other."""
    model, generator = VAE(), torch.Generator().manual_seed(seed)
    draw = batches(seed, 64, digits()[0])

    def batch() -> Batch:
        return *draw(), torch.randn(64, 8, generator=generator)

    return [Learner(model, torch.optim.Adam(model.parameters(), 1e-3), batch, model)]


def contrastive(seed: int, steps: int) -> list[Learner]:
    """InfoNCE between two noisy views of the same digits, at a low temperature."""
    model, generator = mlp(64, 64, 32), torch.Generator().manual_seed(seed)
    draw = batches(seed, 32, digits()[0])

    def batch() -> Batch:
        (x,) = draw()
        views = x + 0.3 * torch.randn(2, 32, 64, generator=generator)
        return views[0], views[1]

    def loss(left: Tensor, right: Tensor) -> Tensor:
        likeness = F.normalize(model(left)) @ F.normalize(model(right)).T / 0.07
        return F.cross_entropy(likeness, torch.arange(len(left)))

    return [Learner(model, torch.optim.Adam(model.parameters(), 1e-3), batch, loss)]


def sparse_embeddings(seed: int, steps: int) -> list[Learner]:
    """Skip-gram on characters with sparse gradients: only the rows of the batch get any."""
    text, letters = characters()
    left, right = nn.Embedding(letters, 16, sparse=True), nn.Embedding(letters, 16, sparse=True)
    model, generator = nn.ModuleList([left, right]), torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        at = torch.randint(len(text) - 1, (32,), generator=generator)
        return text[at], text[at + 1], torch.randint(letters, (32, 5), generator=generator)

    def loss(here: Tensor, after: Tensor, others: Tensor) -> Tensor:
        near = (left(here) * right(after)).sum(1)
        far = (left(here)[:, None] * right(others)).sum(2)
        return F.softplus(-near).mean() + F.softplus(far).sum(1).mean()

    return [Learner(model, torch.optim.SparseAdam(model.parameters(), 1e-2), batch, loss)]


def char_lstm_clipped(seed: int, steps: int) -> list[Learner]:
    """A character LSTM on source text, clipped at 1."""
    model = CharLSTM(characters()[1])
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    return [Learner(model, optimizer, windows(seed, 8, 24), next_character(model), max_norm=1.0)]


def transformer_warmup_cosine(seed: int, steps: int) -> list[Learner]:
    """A small pre-norm transformer with warm-up, cosine decay and clipping, the everyday recipe."""
    model = Transformer(characters()[1])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def schedule(i: int) -> float:
        return (i + 1) / 50 if i < 50 else 0.1 + 0.45 * (1 + math.cos(math.pi * min(i / steps, 1)))

    return [Learner(model, optimizer, windows(seed, 8, 32), next_character(model), LambdaLR(optimizer, schedule), 1.0)]


HEALTHY: dict[str, Run] = {
    run.__name__: run
    for run in (
        fast_fall,
        batch_of_four,
        batch_of_two_noisy_labels,
        warm_restarts,
        step_decay,
        hinge_mostly_zero,
        sum_reduced,
        ragged_last_batch,
        curriculum,
        edge_of_stability,
        two_alternating_batches,
        dropout_batchnorm_cnn,
        fp16_with_scaler,
        accumulate_four,
        frozen_body,
        zero_initialised_branches,
        loss_to_1e_4,
        loss_to_1e_8,
        heavy_tailed_noise,
        lazy_regulariser,
        gan,
        vae,
        contrastive,
        sparse_embeddings,
        char_lstm_clipped,
        transformer_warmup_cosine,
        *REINFORCEMENT,
        *PHASES,
        *LOSSES,
        *MORE,
        *UNSEEN,
        *FIELDS,
    )
}
_NEW = frozenset(run.__name__ for run in (*MORE, *UNSEEN, *FIELDS))


def group_of(name: str) -> str:
    """Whether rules may be worked on with a kind in view: a third is held out, chosen by a hash of the name."""
    if name in _NEW:
        return "new"
    return "held out" if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 3 == 0 else "open"
