"""Healthy trainings with losses of unusual shape: heavy tails, tiny batches, negative values, many zeros, plateaus.

None was written with a rule of a detector in view.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from healthy_data import after_clearing, batches, bundled, characters, classifier, digits, mlp, windows
from torch import Tensor, nn
from torch.func import functional_call
from training_loops import Batch, Learner, Run


def _adam(model: nn.Module, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr)


def _student_t(generator: torch.Generator, size: int, freedom: int) -> Tensor:
    normal = torch.randn(1 + freedom, size, generator=generator)
    return normal[0] / normal[1:].square().mean(0).sqrt()


# ---- heavy tails and tiny batches -----------------------------------------------------------------------------------


def cauchy_noise_absolute(seed: int, steps: int) -> list[Learner]:
    """Cauchy noise on the targets and the absolute error: the loss has no mean, its gradient is bounded."""
    x, y = bundled("diabetes")
    y = ((y - y.float().mean()) / y.float().std()).float()
    generator, draw = torch.Generator().manual_seed(seed), batches(seed, 16, x, y)
    model = nn.Linear(10, 1)

    def batch() -> Batch:
        a, b = draw()
        return a, b + 0.3 * _student_t(generator, len(b), 1)

    optimizer = torch.optim.SGD(model.parameters(), 5e-3)
    return [Learner(model, optimizer, batch, lambda a, b: F.l1_loss(model(a)[:, 0], b))]


def student_t_batches(seed: int, steps: int) -> list[Learner]:
    """Whole batches differ in scale by a Student-t factor, inputs and targets alike, clipped at 1."""
    generator = torch.Generator().manual_seed(seed)
    truth, model = torch.randn(8, 1, generator=generator), mlp(8, 32, 1)

    def batch() -> Batch:
        x = torch.randn(8, 8, generator=generator) * _student_t(generator, 1, 2).abs()
        return x, x @ truth + 0.3 * torch.randn(8, 1, generator=generator)

    return [Learner(model, _adam(model, 1e-3), batch, lambda a, b: F.mse_loss(model(a), b), max_norm=1.0)]


def batch_of_one(seed: int, steps: int) -> list[Learner]:
    """Digits one at a time."""
    model = mlp(64, 64, 10)
    return [Learner(model, torch.optim.SGD(model.parameters(), 5e-3), batches(seed, 1, *digits()), classifier(model))]


def rare_huge_targets(seed: int, steps: int) -> list[Learner]:
    """Insurance claims: one row in 300 has a target a hundred times as large, under Huber's loss."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 8, generator=generator)
    y = x @ torch.randn(8, generator=generator)
    y = torch.where(torch.rand(3000, generator=generator) < 1 / 300, y.abs() * 100 + 100, y)
    model = mlp(8, 32, 1)
    return [Learner(model, _adam(model, 1e-3), batches(seed, 16, x, y), lambda a, b: F.huber_loss(model(a)[:, 0], b))]


def rare_positives_weighted(seed: int, steps: int) -> list[Learner]:
    """One positive row in a hundred, weighted by 99: most batches have none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4000, 8, generator=generator)
    y = (torch.rand(4000, generator=generator) < 0.01).float()
    x[:, 0] += 2 * y
    model, heavy = mlp(8, 32, 1), torch.tensor(99.0)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(a)[:, 0], b, pos_weight=heavy)

    return [Learner(model, _adam(model, 1e-3), batches(seed, 16, x, y), loss)]


def poisson_counts(seed: int, steps: int) -> list[Learner]:
    """Poisson likelihood of counts whose rate varies by orders of magnitude; the loss is below 0 and heavy-tailed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2000, 4, generator=generator)
    y = torch.poisson((1.2 * x[:, 0] + 0.5 * x[:, 1] + 0.5).exp(), generator=generator)
    model = nn.Linear(4, 1)
    return [
        Learner(model, _adam(model, 5e-3), batches(seed, 8, x, y), lambda a, b: F.poisson_nll_loss(model(a)[:, 0], b))
    ]


def unnormalised_targets(seed: int, steps: int) -> list[Learner]:
    """Diabetes with raw targets: the squared error begins at 29,000 and falls to about 3,000."""
    x, y = bundled("diabetes")
    model = mlp(10, 64, 1)
    return [
        Learner(model, _adam(model, 1e-2), batches(seed, 16, x, y.float()), lambda a, b: F.mse_loss(model(a)[:, 0], b))
    ]


def memorise_sixteen(seed: int, steps: int) -> list[Learner]:
    """Sixteen rows with random labels, learned by heart four at a time."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 16, generator=generator), torch.randint(4, (16,), generator=generator)
    model = mlp(16, 64, 4)
    return [Learner(model, _adam(model, 3e-3), batches(seed, 4, x, y), classifier(model))]


def noisy_diffusion(seed: int, steps: int) -> list[Learner]:
    """A denoiser with a random noise level for every row, eight rows to a batch."""
    x = digits()[0] / 4
    generator, draw = torch.Generator().manual_seed(seed), batches(seed, 8, x)
    model = mlp(65, 96, 64)

    def batch() -> Batch:
        (clean,) = draw()
        level = torch.rand(len(clean), 1, generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        return clean * (math.pi / 2 * level).cos() + noise * (math.pi / 2 * level).sin(), level, noise

    def loss(seen: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(model(torch.cat([seen, level], 1)), noise)

    return [Learner(model, _adam(model, 1e-3), batch, loss)]


# ---- likelihoods below zero -----------------------------------------------------------------------------------------


class _Coupling(nn.Module):
    """Four affine coupling layers in two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(1, 32, 2, act=nn.Tanh) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        left, right, volume = x[:, :1], x[:, 1:], x.new_zeros(len(x))
        for net in self.nets:
            scale, shift = net(left).chunk(2, 1)
            scale = 2 * scale.tanh()
            left, right, volume = right * scale.exp() + shift, left, volume + scale[:, 0]
        return (0.5 * (left.square() + right.square())[:, 0] + math.log(2 * math.pi) - volume).mean()


def flow_likelihood(seed: int, steps: int) -> list[Learner]:
    """A normalising flow on a thin circle: the loss falls through zero and goes on."""
    generator, model = torch.Generator().manual_seed(seed), _Coupling()

    def batch() -> Batch:
        angle = 2 * math.pi * torch.rand(64, generator=generator)
        ring = torch.stack([angle.cos(), angle.sin()], 1)
        return (0.3 * ring + 0.01 * torch.randn(64, 2, generator=generator),)

    return [Learner(model, _adam(model, 2e-3), batch, model, max_norm=5.0)]


def gaussian_likelihood(seed: int, steps: int) -> list[Learner]:
    """A network predicts mean and variance; as it grows sure of itself, single rows cost more and more."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(600, 1, generator=generator) - 1
    y = torch.sin(4 * x) + 0.3 * x.abs() * torch.randn(600, 1, generator=generator)
    model = mlp(1, 64, 2, act=nn.Tanh)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        mean, log_variance = model(a).chunk(2, 1)
        return F.gaussian_nll_loss(mean, b, log_variance.clamp(-8, 8).exp())

    return [Learner(model, _adam(model, 3e-3), batches(seed, 16, x, y), loss, max_norm=1.0)]


def mixture_density(seed: int, steps: int) -> list[Learner]:
    """A mixture of three Gaussians for a relation with several answers."""
    generator = torch.Generator().manual_seed(seed)
    y = 2 * torch.rand(800, 1, generator=generator) - 1
    x = y + 0.4 * torch.sin(7 * y) + 0.03 * torch.randn(800, 1, generator=generator)
    model = mlp(1, 48, 9, act=nn.Tanh)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        weight, mean, log_scale = model(a).chunk(3, 1)
        each = -0.5 * ((b - mean) / log_scale.exp()).square() - log_scale - 0.92
        return -(each + weight.log_softmax(1)).logsumexp(1).mean()

    return [Learner(model, _adam(model, 3e-3), batches(seed, 32, x, y), loss, max_norm=2.0)]


def energy_difference(seed: int, steps: int) -> list[Learner]:
    """Contrastive divergence: the loss is a difference of energies and stays around zero."""
    generator, model = torch.Generator().manual_seed(seed), mlp(2, 48, 1, act=nn.SiLU)
    chains = torch.randn(32, 2, generator=generator)

    def batch() -> Batch:
        angle = torch.randint(4, (32,), generator=generator) * (math.pi / 2)
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(32, 2, generator=generator)
        point = chains.clone().requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(model(point).sum(), point)
            jump = 0.1 * torch.randn(32, 2, generator=generator)
            point = (point - 0.05 * slope + jump).detach().clamp(-2, 2).requires_grad_()
        chains.copy_(point.detach())
        return real, chains.clone()

    def loss(real: Tensor, made: Tensor) -> Tensor:
        up, down = model(real), model(made)
        return up.mean() - down.mean() + 0.1 * (up.square() + down.square()).mean()

    return [Learner(model, _adam(model, 1e-3), batch, loss)]


# ---- adversarial, contrastive, self-supervised ----------------------------------------------------------------------


def gan_hinge(seed: int, steps: int) -> list[Learner]:
    """A GAN with the hinge loss: the discriminator's loss is 0 at times, the generator's goes up and down."""
    generator = torch.Generator().manual_seed(seed)
    maker, judge = mlp(4, 32, 2), mlp(2, 32, 1)

    def latent() -> Batch:
        return (torch.randn(32, 4, generator=generator),)

    def both() -> Batch:
        real = torch.randn(32, 2, generator=generator) * torch.tensor([0.2, 1.0]) + 1
        return real, *latent()

    def judge_loss(real: Tensor, noise: Tensor) -> Tensor:
        return (1 - judge(real)).relu().mean() + (1 + judge(maker(noise).detach())).relu().mean()

    return [
        Learner(
            judge,
            torch.optim.Adam(judge.parameters(), 2e-3, betas=(0.0, 0.9)),
            after_clearing(judge, both),
            judge_loss,
        ),
        Learner(
            maker,
            torch.optim.Adam(maker.parameters(), 1e-3, betas=(0.0, 0.9)),
            latent,
            lambda z: -judge(maker(z)).mean(),
        ),
    ]


def clip_temperature(seed: int, steps: int) -> list[Learner]:
    """InfoNCE between halves of digits with a learned temperature."""
    x = digits()[0]
    left, right, heat = mlp(32, 48, 16), mlp(32, 48, 16), nn.ParameterList([torch.tensor(2.66)])
    model = nn.ModuleList([left, right, heat])

    def loss(a: Tensor) -> Tensor:
        likeness = heat[0].clamp(max=4.6).exp() * F.normalize(left(a[:, :32])) @ F.normalize(right(a[:, 32:])).T
        each = torch.arange(len(a))
        return (F.cross_entropy(likeness, each) + F.cross_entropy(likeness.T, each)) / 2

    return [Learner(model, _adam(model, 2e-3), batches(seed, 16, x), loss)]


def temperature_falls(seed: int, steps: int) -> list[Learner]:
    """InfoNCE whose temperature is lowered in stairs from 1 to 0.03: each stair changes the scale of the loss."""
    model, generator, calls = mlp(64, 64, 32), torch.Generator().manual_seed(seed), [0]
    draw = batches(seed, 32, digits()[0])

    def loss(a: Tensor) -> Tensor:
        heat = (1.0, 0.3, 0.1, 0.03)[min(4 * calls[0] // steps, 3)]
        calls[0] += 1
        views = a + 0.5 * torch.randn(2, *a.shape, generator=generator)
        return F.cross_entropy(
            F.normalize(model(views[0])) @ F.normalize(model(views[1])).T / heat, torch.arange(len(a))
        )

    return [Learner(model, _adam(model, 1e-3), draw, loss)]


def triplets(seed: int, steps: int) -> list[Learner]:
    """Triplet loss with the hardest negative of the batch: many zeros late in the run."""
    model = mlp(64, 64, 8)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        apart = torch.cdist(model(x), model(x) + 1e-4)
        same = y[:, None] == y
        near = (apart * same).amax(1)
        far = (apart + 1e4 * same).amin(1)
        return (near - far + 0.3).relu().mean()

    return [Learner(model, _adam(model, 1e-3), batches(seed, 24, *digits()), loss)]


def mean_teacher(seed: int, steps: int) -> list[Learner]:
    """A slow average of the weights teaches: few labels, and agreement whose weight is ramped up."""
    x, y = digits()
    model, generator = mlp(64, 64, 10), torch.Generator().manual_seed(seed)
    teacher, calls = copy.deepcopy(model).requires_grad_(False), [0]
    few, many = batches(seed, 16, x[:200], y[:200]), batches(seed, 32, x)

    @torch.no_grad()
    def batch() -> Batch:
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.02)
        return *few(), *many()

    def loss(a: Tensor, b: Tensor, free: Tensor) -> Tensor:
        calls[0] += 1
        views = free + 0.5 * torch.randn(2, *free.shape, generator=generator)
        agree = F.mse_loss(model(views[0]).softmax(1), teacher(views[1]).softmax(1))
        return F.cross_entropy(model(a), b) + min(calls[0] / 200, 1.0) * 20 * agree

    return [Learner(model, _adam(model, 1e-3), batch, loss)]


def self_distillation(seed: int, steps: int) -> list[Learner]:
    """BYOL: a predictor follows a slow copy; the loss falls at once, and may rise while the features spread."""
    body, head, generator = mlp(64, 64, 16), mlp(16, 32, 16), torch.Generator().manual_seed(seed)
    model, slow = nn.ModuleList([body, head]), copy.deepcopy(body).requires_grad_(False)
    draw = batches(seed, 32, digits()[0])

    @torch.no_grad()
    def batch() -> Batch:
        for kept, weight in zip(slow.parameters(), body.parameters(), strict=True):
            kept.lerp_(weight, 0.05)
        (a,) = draw()
        views = a + 0.5 * torch.randn(2, *a.shape, generator=generator)
        return views[0], views[1]

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return 2 - 2 * F.cosine_similarity(head(body(a)), slow(b)).mean()

    return [Learner(model, _adam(model, 1e-3), batch, loss)]


def codebook(seed: int, steps: int) -> list[Learner]:
    """A VQ-VAE: reconstruction, codebook and commitment, with straight-through gradients."""
    encode, decode, book = mlp(64, 64, 8), mlp(8, 64, 64), nn.Embedding(32, 8)
    model = nn.ModuleList([encode, decode, book])

    def loss(x: Tensor) -> Tensor:
        code = encode(x)
        near = book(torch.cdist(code, book.weight).argmin(1))
        made = decode(code + (near - code).detach())
        return F.mse_loss(made, x) + F.mse_loss(near, code.detach()) + 0.25 * F.mse_loss(code, near.detach())

    return [Learner(model, _adam(model, 2e-3), batches(seed, 32, digits()[0]), loss)]


# ---- classification with a twist ------------------------------------------------------------------------------------


def label_smoothing(seed: int, steps: int) -> list[Learner]:
    """Smoothed labels: the loss has a floor far above zero."""
    model = mlp(64, 64, 10)
    return [
        Learner(
            model,
            _adam(model, 2e-3),
            batches(seed, 32, *digits()),
            lambda x, y: F.cross_entropy(model(x), y, label_smoothing=0.1),
        )
    ]


def mixup(seed: int, steps: int) -> list[Learner]:
    """Mixed pairs: how hard a batch is depends on one random number."""
    model, generator = mlp(64, 64, 10), torch.Generator().manual_seed(seed)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        share = float(torch.rand((), generator=generator))
        order = torch.randperm(len(y), generator=generator)
        made = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(made, y) + (1 - share) * F.cross_entropy(made, y[order])

    return [Learner(model, _adam(model, 2e-3), batches(seed, 32, *digits()), loss)]


def heavy_dropout(seed: int, steps: int) -> list[Learner]:
    """Dropout of 0.8 on a narrow network, eight rows to a batch."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.8), nn.Linear(64, 10))
    return [Learner(model, _adam(model, 2e-3), batches(seed, 8, *digits()), classifier(model))]


def focal(seed: int, steps: int) -> list[Learner]:
    """Focal loss: what is learned weighs nothing, so the loss falls to almost nothing and single rows stand out."""
    model = mlp(64, 64, 10)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        plain = F.cross_entropy(model(x), y, reduction="none")
        return ((1 - (-plain).exp()).square() * plain).mean()

    return [Learner(model, _adam(model, 2e-3), batches(seed, 16, *digits()), loss)]


def sharpness_aware(seed: int, steps: int) -> list[Learner]:
    """SAM: the gradient is taken at weights a little uphill."""
    model = mlp(64, 64, 10)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(weights.values()))
        length = torch.nn.utils.get_total_norm(slopes) + 1e-12
        uphill = {
            name: weight + 0.05 * slope / length for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }
        return F.cross_entropy(functional_call(model, uphill, (x,)), y)

    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return [Learner(model, optimizer, batches(seed, 16, *digits()), loss)]


def fake_quantised(seed: int, steps: int) -> list[Learner]:
    """Quantisation-aware training: weights are rounded to 16 values in the forward pass, from a third of the run on."""
    model, calls = mlp(64, 64, 10), [0]

    def rounded(weight: Tensor) -> Tensor:
        grid = weight.detach().abs().max() / 7.5 + 1e-12
        return weight + ((weight / grid).round() * grid - weight).detach()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] < steps // 3:
            return F.cross_entropy(model(x), y)
        return F.cross_entropy(functional_call(model, {k: rounded(v) for k, v in model.named_parameters()}, (x,)), y)

    return [Learner(model, _adam(model, 2e-3), batches(seed, 32, *digits()), loss)]


# ---- sequences and preferences --------------------------------------------------------------------------------------


def speech_ctc(seed: int, steps: int) -> list[Learner]:
    """CTC: nothing but blanks at first, a plateau, then a quick fall."""
    generator = torch.Generator().manual_seed(seed)
    sounds, model = torch.randn(6, 8, generator=generator), nn.GRU(8, 32, batch_first=True)
    head = nn.Linear(32, 7)
    both = nn.ModuleList([model, head])

    def batch() -> Batch:
        said = torch.randint(6, (8, 4), generator=generator)
        heard = sounds[said].repeat_interleave(4, 1)
        return heard + 0.3 * torch.randn(heard.shape, generator=generator), said + 1

    def loss(heard: Tensor, said: Tensor) -> Tensor:
        scores = head(model(heard)[0]).log_softmax(2).transpose(0, 1)
        return F.ctc_loss(scores, said, torch.full((8,), 16), torch.full((8,), 4))

    return [Learner(both, _adam(both, 5e-3), batch, loss, max_norm=5.0)]


def adding_problem(seed: int, steps: int) -> list[Learner]:
    """A GRU adds two marked numbers out of 40: a long plateau, then a fall."""
    generator, model = torch.Generator().manual_seed(seed), nn.GRU(2, 24, batch_first=True)
    head = nn.Linear(24, 1)
    both = nn.ModuleList([model, head])

    def batch() -> Batch:
        values, marks = torch.rand(16, 40, generator=generator), torch.zeros(16, 40)
        marks.scatter_(1, torch.rand(16, 40, generator=generator).topk(2).indices, 1.0)
        return torch.stack([values, marks], 2), (values * marks).sum(1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(head(model(x)[0][:, -1])[:, 0], y)

    return [Learner(both, _adam(both, 5e-3), batch, loss, max_norm=1.0)]


def reward_model(seed: int, steps: int) -> list[Learner]:
    """Preference pairs, some of them wrong, eight to a batch."""
    generator, model = torch.Generator().manual_seed(seed), mlp(16, 64, 1)
    taste = torch.randn(16, 1, generator=generator)

    def batch() -> Batch:
        pair = torch.randn(2, 8, 16, generator=generator)
        better = (pair @ taste)[..., 0] + torch.randn(2, 8, generator=generator)
        first = (better[0] > better[1])[:, None]
        return torch.where(first, pair[0], pair[1]), torch.where(first, pair[1], pair[0])

    return [Learner(model, _adam(model, 2e-3), batch, lambda a, b: -F.logsigmoid(model(a) - model(b)).mean())]


def preference_optimisation(seed: int, steps: int) -> list[Learner]:
    """DPO: log 2 at first, then pairs that are settled for good and a few that get worse and worse."""
    generator, letters = torch.Generator().manual_seed(seed), 12
    model = mlp(8, 32, letters)
    before = copy.deepcopy(model).requires_grad_(False)
    asked = torch.randn(200, 8, generator=generator)
    good = torch.randint(letters, (200,), generator=generator)
    bad = (good + torch.randint(1, letters, (200,), generator=generator)) % letters

    def ratio(x: Tensor, y: Tensor) -> Tensor:
        return (model(x).log_softmax(1) - before(x).log_softmax(1)).gather(1, y[:, None])

    def loss(x: Tensor, liked: Tensor, other: Tensor) -> Tensor:
        return -F.logsigmoid(0.5 * (ratio(x, liked) - ratio(x, other))).mean()

    return [Learner(model, _adam(model, 2e-3), batches(seed, 8, asked, good, bad), loss)]


def embedding_with_rare_rows(seed: int, steps: int) -> list[Learner]:
    """Bigrams over words of three letters with Adagrad: most rows of the table are seen a few times in the run."""
    letters = characters()[1]
    table, head = nn.Embedding(4096, 16), nn.Linear(16, letters)
    model = nn.ModuleList([table, head])

    def loss(ids: Tensor, after: Tensor) -> Tensor:
        word = (ids[:, -3] * 7919 + ids[:, -2] * 104729 + ids[:, -1]) % 4096
        return F.cross_entropy(head(table(word)), after[:, -1])

    return [Learner(model, torch.optim.Adagrad(model.parameters(), 0.3), windows(seed, 16, 3), loss)]


def ratings(seed: int, steps: int) -> list[Learner]:
    """Matrix factorisation with a loss that is a sum, twenty ratings at a time."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(60, 4, generator=generator) @ torch.randn(4, 50, generator=generator)
    people, things = nn.Embedding(60, 4), nn.Embedding(50, 4)
    model = nn.ModuleList([people, things])
    who, what = torch.randint(60, (1200,), generator=generator), torch.randint(50, (1200,), generator=generator)

    def loss(a: Tensor, b: Tensor, score: Tensor) -> Tensor:
        return ((people(a) * things(b)).sum(1) - score).square().sum()

    scores = truth[who, what] + 0.3 * torch.randn(1200, generator=generator)
    return [Learner(model, torch.optim.SGD(model.parameters(), 0.01), batches(seed, 20, who, what, scores), loss)]


def physics_informed(seed: int, steps: int) -> list[Learner]:
    """An equation's residual and its boundary, at random points."""
    generator, model = torch.Generator().manual_seed(seed), mlp(1, 32, 32, 1, act=nn.Tanh)

    def loss(t: Tensor) -> Tensor:
        t = t.clone().requires_grad_()
        value = model(t)
        (slope,) = torch.autograd.grad(value.sum(), t, create_graph=True)
        start = model(torch.zeros(1, 1)) - 1
        return (slope + 3 * value).square().mean() + 10 * start.square().sum()

    return [Learner(model, _adam(model, 3e-3), lambda: (torch.rand(16, 1, generator=generator),), loss)]


LOSSES: tuple[Run, ...] = (
    cauchy_noise_absolute,
    student_t_batches,
    batch_of_one,
    rare_huge_targets,
    rare_positives_weighted,
    poisson_counts,
    unnormalised_targets,
    memorise_sixteen,
    noisy_diffusion,
    flow_likelihood,
    gaussian_likelihood,
    mixture_density,
    energy_difference,
    gan_hinge,
    clip_temperature,
    temperature_falls,
    triplets,
    mean_teacher,
    self_distillation,
    codebook,
    label_smoothing,
    mixup,
    heavy_dropout,
    focal,
    sharpness_aware,
    fake_quantised,
    speech_ctc,
    adding_problem,
    reward_model,
    preference_optimisation,
    embedding_with_rare_rows,
    ratings,
    physics_informed,
)
