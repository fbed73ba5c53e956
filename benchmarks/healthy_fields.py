"""Twenty healthy trainings from different fields: what people do on purpose to data, losses, rates and weights."""

from __future__ import annotations

import copy
import math
from itertools import count

import torch
import torch.nn.functional as F
from healthy_data import after_clearing, batches, bundled, classifier, digits, mlp
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import CyclicLR
from training_loops import Batch, Learner, Run


def _moons(size: int, generator: torch.Generator) -> Tensor:
    angle, side = math.pi * torch.rand(size, generator=generator), torch.randint(2, (size,), generator=generator)
    x = torch.where(side > 0, 1 - angle.cos(), angle.cos())
    y = torch.where(side > 0, 0.5 - angle.sin(), angle.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(size, 2, generator=generator)


def diffusion_weighted_steps(seed: int, steps: int) -> list[Learner]:
    """Denoising diffusion on two moons; the loss of a time step is weighted by its signal-to-noise ratio, up to 5."""
    generator, model = torch.Generator().manual_seed(seed), mlp(3, 64, 64, 2, act=nn.SiLU)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 200), 0)

    def batch() -> Batch:
        return (
            _moons(64, generator),
            torch.randint(200, (64,), generator=generator),
            torch.randn(64, 2, generator=generator),
        )

    def loss(x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        share = kept[time][:, None]
        found = model(torch.cat([share.sqrt() * x + (1 - share).sqrt() * noise, time[:, None] / 200], 1))
        return ((share / (1 - share)).clamp(max=5.0) * (found - noise).square()).mean()

    return [Learner(model, torch.optim.AdamW(model.parameters(), 2e-3), batch, loss)]


def meta_learning(seed: int, steps: int) -> list[Learner]:
    """MAML: sinusoids of random phase and size; the loss is that after one inner step."""
    generator, model = torch.Generator().manual_seed(seed), mlp(1, 40, 40, 1, act=nn.Tanh)

    def batch() -> Batch:
        size = 0.1 + 4.9 * torch.rand(4, 1, 1, generator=generator)
        x = 10 * torch.rand(4, 20, 1, generator=generator) - 5
        return x, size * torch.sin(x + math.pi * torch.rand(4, 1, 1, generator=generator))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        total, names = torch.zeros(()), dict(model.named_parameters())
        for a, b in zip(x, y, strict=True):
            inner = F.mse_loss(model(a[:10]), b[:10])
            slopes = torch.autograd.grad(inner, tuple(names.values()), create_graph=True)
            fast = {name: value - 0.01 * slope for (name, value), slope in zip(names.items(), slopes, strict=True)}
            total = total + F.mse_loss(torch.func.functional_call(model, fast, (a[10:],)), b[10:])
        return total / 4

    return [Learner(model, torch.optim.Adam(model.parameters(), 1e-3), batch, loss)]


def self_play(seed: int, steps: int) -> list[Learner]:
    """Rock, paper, scissors against an older copy of itself, which is replaced every 100 steps; policy gradient."""
    generator, policy, calls = torch.Generator().manual_seed(seed), mlp(3, 32, 3, act=nn.Tanh), count(1)
    other, wins = copy.deepcopy(policy), torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])

    @torch.no_grad()
    def batch() -> Batch:
        if next(calls) % 100 == 0:
            other.load_state_dict(policy.state_dict())
        seen = torch.randn(64, 3, generator=generator)
        mine, theirs = (
            torch.multinomial(who(seen).softmax(1), 1, generator=generator)[:, 0] for who in (policy, other)
        )
        return seen, mine, wins[mine, theirs]

    def loss(seen: Tensor, taken: Tensor, won: Tensor) -> Tensor:
        chances = policy(seen).log_softmax(1)
        gain = (chances.gather(1, taken[:, None])[:, 0] * won).mean()
        return -gain + 0.01 * (chances.exp() * chances).sum(1).mean()

    return [Learner(policy, torch.optim.Adam(policy.parameters(), 3e-3), batch, loss)]


def critic_head_reset(seed: int, steps: int) -> list[Learner]:
    """An actor and a critic; the last layer of the critic is initialised again every third of the run, on purpose."""
    generator, calls = torch.Generator().manual_seed(seed), count(1)
    model = nn.ModuleDict({"actor": mlp(8, 32, 4, act=nn.Tanh), "critic": mlp(8, 32, 1, act=nn.Tanh)})
    pays = torch.randn(8, 4, generator=generator)

    @torch.no_grad()
    def batch() -> Batch:
        if next(calls) % max(steps // 3, 1) == 0:
            model["critic"][-1].reset_parameters()
        x = torch.randn(32, 8, generator=generator)
        taken = torch.multinomial(model["actor"](x).softmax(1), 1, generator=generator)
        return x, taken, (x @ pays).gather(1, taken)[:, 0]

    def loss(x: Tensor, taken: Tensor, paid: Tensor) -> Tensor:
        value, chances = model["critic"](x)[:, 0], model["actor"](x).log_softmax(1)
        return F.mse_loss(value, paid) - (chances.gather(1, taken)[:, 0] * (paid - value.detach())).mean()

    return [Learner(model, torch.optim.Adam(model.parameters(), 2e-3), batch, loss)]


def radiance_coarse_to_fine(seed: int, steps: int) -> list[Learner]:
    """Fourier features of a picture's coordinates; finer frequencies are switched on as the run goes."""
    generator, model, calls = torch.Generator().manual_seed(seed), mlp(24, 64, 64, 1), count()
    rates = 2.0 ** torch.arange(6) * math.pi

    def batch() -> Batch:
        at = 2 * torch.rand(128, 2, generator=generator) - 1
        picture = torch.sin(9 * at[:, :1]) * torch.cos(7 * at[:, 1:]) + (at.norm(dim=1, keepdim=True) < 0.5)
        waves = (at[:, None] * rates[:, None]).flatten(1)
        open_bands = 6 * min(2 * next(calls) / steps, 1.0)
        shown = (open_bands - torch.arange(6)).clamp(0, 1).repeat_interleave(2)
        return torch.cat([waves.sin() * shown, waves.cos() * shown], 1), picture

    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    return [Learner(model, optimizer, batch, lambda x, y: F.mse_loss(model(x), y))]


def physics_weights_change(seed: int, steps: int) -> list[Learner]:
    """A physics-informed network for u'' = -u; the weight of the boundary condition is raised to 100 in four stages."""
    generator, model, calls = torch.Generator().manual_seed(seed), mlp(1, 32, 32, 1, act=nn.Tanh), count()
    ends = torch.tensor([[0.0], [math.pi / 2]])

    def batch() -> Batch:
        return (math.pi / 2 * torch.rand(48, 1, generator=generator),)

    def loss(x: Tensor) -> Tensor:
        weight = (1.0, 5.0, 25.0, 100.0)[min(4 * next(calls) // steps, 3)]
        x = x.requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (second + u).square().mean() + weight * (model(ends) - ends.sin()).square().mean()

    return [Learner(model, torch.optim.Adam(model.parameters(), 2e-3), batch, loss)]


def momentum_contrast(seed: int, steps: int) -> list[Learner]:
    """Contrast of two views with a queue of 256 keys of a slow copy; the queue begins with noise."""
    generator, model = torch.Generator().manual_seed(seed), mlp(64, 64, 24)
    slow, draw = copy.deepcopy(model), batches(seed, 32, digits()[0])
    queue = F.normalize(torch.randn(256, 24, generator=generator))

    @torch.no_grad()
    def batch() -> Batch:
        nonlocal queue
        (x,) = draw()
        views = x + 0.3 * torch.randn(2, 32, 64, generator=generator)
        for mine, own in zip(slow.parameters(), model.parameters(), strict=True):
            mine.lerp_(own, 0.01)
        keys, old = F.normalize(slow(views[1])), queue
        queue = torch.cat([queue[32:], keys])
        return views[0], keys, old

    def loss(view: Tensor, keys: Tensor, old: Tensor) -> Tensor:
        found = F.normalize(model(view))
        likeness = torch.cat([(found * keys).sum(1, keepdim=True), found @ old.T], 1) / 0.1
        return F.cross_entropy(likeness, torch.zeros(32, dtype=torch.long))

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), batch, loss)]


def continual_tasks(seed: int, steps: int) -> list[Learner]:
    """Four tasks one after another: the same digits with their pixels in another order."""
    x, y = digits()
    generator, calls, model = torch.Generator().manual_seed(seed), count(), mlp(64, 64, 10)
    orders = [torch.randperm(64, generator=generator) for _ in range(4)]
    draw = batches(seed, 32, x, y)

    def batch() -> Batch:
        a, b = draw()
        return a[:, orders[min(4 * next(calls) // steps, 3)]], b

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), batch, classifier(model))]


def smoothing_then_mixup(seed: int, steps: int) -> list[Learner]:
    """Label smoothing that grows to 0.3, and mixup in the middle third of the run."""
    generator, model, calls = torch.Generator().manual_seed(seed), mlp(64, 64, 10), count()
    draw = batches(seed, 32, *digits())

    def batch() -> Batch:
        x, y = draw()
        at, target = next(calls) / steps, F.one_hot(y, 10).float()
        if 1 / 3 < at < 2 / 3:
            share, order = torch.rand((), generator=generator), torch.randperm(32, generator=generator)
            x, target = share * x + (1 - share) * x[order], share * target + (1 - share) * target[order]
        return x, (1 - 0.3 * at) * target + 0.03 * at

    return [Learner(model, torch.optim.AdamW(model.parameters(), 2e-3), batch, classifier(model))]


def progressive_resizing(seed: int, steps: int) -> list[Learner]:
    """A convolutional network on digits of 4 x 4, then 8 x 8, then 16 x 16 pixels."""
    calls, draw = count(), batches(seed, 32, *digits())
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
    ).extend([nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)])

    def batch() -> Batch:
        x, y = draw()
        size = (4, 8, 16)[min(3 * next(calls) // steps, 2)]
        return F.interpolate(x.view(-1, 1, 8, 8), size=(size, size), mode="bilinear"), y

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), batch, classifier(model))]


def cyclical_rate(seed: int, steps: int) -> list[Learner]:
    """The learning rate goes from 0.0005 up to 0.1 and back every 200 steps."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 5e-4, momentum=0.9)
    scheduler = CyclicLR(optimizer, 5e-4, 0.1, step_size_up=100, cycle_momentum=False)
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model), scheduler)]


def averaged_weights_taken_over(seed: int, steps: int) -> list[Learner]:
    """A moving average of the weights is exchanged for the weights to evaluate, and taken over for good twice."""
    x, y = digits()
    model, calls, draw = mlp(64, 64, 10), count(1), batches(seed, 32, x, y)
    average = copy.deepcopy(model)

    @torch.no_grad()
    def batch() -> Batch:
        now = next(calls)
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.02)
        if now % 100 == 0:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            F.cross_entropy(model(x), y)
            if now not in (steps // 3, 2 * steps // 3):
                model.load_state_dict(own)
        if now in (steps // 3, 2 * steps // 3):
            model.load_state_dict(average.state_dict())
        return draw()

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batch, classifier(model))]


def pruned_while_training(seed: int, steps: int) -> list[Learner]:
    """Magnitude pruning: every tenth of the run more weights are set to 0 and kept there, up to nine in ten."""
    model, calls, draw = mlp(64, 96, 96, 10), count(), batches(seed, 32, *digits())
    masks: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def batch() -> Batch:
        now = next(calls)
        if now and now % max(steps // 10, 1) == 0:
            for weight in (part for part in model.parameters() if part.ndim == 2):
                limit = weight.abs().flatten().kthvalue(int(0.9 * now / steps * weight.numel()) + 1).values
                masks[weight] = weight.abs() >= limit
        for weight, mask in masks.items():
            weight.mul_(mask)
        return draw()

    return [Learner(model, torch.optim.Adam(model.parameters(), 2e-3), batch, classifier(model))]


def gradual_unfreezing(seed: int, steps: int) -> list[Learner]:
    """Only the head learns at first; each quarter of the run one more layer does."""
    model, calls, draw = mlp(64, 64, 64, 64, 10), count(), batches(seed, 32, *digits())
    layers = [part for part in model if isinstance(part, nn.Linear)]

    def batch() -> Batch:
        free = min(4 * next(calls) // steps, 3) + 1
        for place, layer in enumerate(reversed(layers)):
            layer.requires_grad_(place < free)
        return draw()

    return [Learner(model, torch.optim.AdamW(model.parameters(), 2e-3), batch, classifier(model))]


def dropout_schedule(seed: int, steps: int) -> list[Learner]:
    """Dropout of 0 in the first third, then 0.6, then 0.1."""
    dropout, calls, draw = nn.Dropout(0.0), count(), batches(seed, 32, *digits())
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), dropout, nn.Linear(128, 10))

    def batch() -> Batch:
        dropout.p = (0.0, 0.6, 0.1)[min(3 * next(calls) // steps, 2)]
        return draw()

    return [Learner(model, torch.optim.Adam(model.parameters(), 2e-3), batch, classifier(model))]


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(64, 4)
        self.experts = nn.ModuleList(mlp(64, 32, 10) for _ in range(4))

    def forward(self, x: Tensor, dense: float, noise: Tensor) -> tuple[Tensor, Tensor]:
        chances = (self.route(x) + dense * noise).softmax(1)
        best = F.one_hot(chances.argmax(1), 4).float()
        gate = dense * chances + (1 - dense) * best * chances
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return (gate[..., None] * made).sum(1), 4 * (best.mean(0) * chances.mean(0)).sum()


def experts_warm_up(seed: int, steps: int) -> list[Learner]:
    """A mixture of four experts: all of them at first, with noise, and only the best one from a third of the run on."""
    generator, model, calls = torch.Generator().manual_seed(seed), _Experts(), count()
    draw = batches(seed, 32, *digits())

    def batch() -> Batch:
        return *draw(), torch.randn(32, 4, generator=generator)

    def loss(x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        found, balance = model(x, max(1 - 3 * next(calls) / steps, 0.0), noise)
        return F.cross_entropy(found, y) + 0.01 * balance

    return [Learner(model, torch.optim.Adam(model.parameters(), 2e-3), batch, loss)]


def gan_lazy_r1(seed: int, steps: int) -> list[Learner]:
    """A GAN on two moons with the R1 penalty on every 16th step of the discriminator, 16 times as heavy."""
    generator, maker, judge = torch.Generator().manual_seed(seed), mlp(4, 48, 48, 2), mlp(2, 48, 48, 1)
    calls = count(1)

    def latent() -> Batch:
        return (torch.randn(64, 4, generator=generator),)

    def both() -> Batch:
        return _moons(64, generator), *latent()

    def judged(real: Tensor, noise: Tensor) -> Tensor:
        real = real.requires_grad_()
        found = judge(real)
        plain = F.softplus(-found).mean() + F.softplus(judge(maker(noise).detach())).mean()
        if next(calls) % 16:
            return plain
        (slope,) = torch.autograd.grad(found.sum(), real, create_graph=True)
        return plain + 16 * 0.5 * slope.square().sum(1).mean()

    def made(noise: Tensor) -> Tensor:
        return F.softplus(-judge(maker(noise))).mean()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 1e-3, betas=(0.0, 0.99))

    return [
        Learner(judge, adam(judge), after_clearing(judge, both), judged),
        Learner(maker, adam(maker), latent, made),
    ]


def alternating_tasks(seed: int, steps: int) -> list[Learner]:
    """Classification of digits and, every fifth step, regression of their brightness in hundreds, with one body."""
    x, y = digits()
    model, calls = nn.ModuleDict({"body": mlp(64, 64, 32), "name": nn.Linear(32, 10), "sum": nn.Linear(32, 1)}), count()
    draw = batches(seed, 32, x, y)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        inner = model["body"](a).relu()
        if next(calls) % 5 == 4:
            return F.mse_loss(model["sum"](inner)[:, 0], 3 * a.sum(1))
        return F.cross_entropy(model["name"](inner), b)

    return [Learner(model, torch.optim.Adam(model.parameters(), 2e-3), draw, loss)]


def weight_normalised(seed: int, steps: int) -> list[Learner]:
    """Every layer reparametrised as direction and size, at a high rate."""
    layers = [weight_norm(nn.Linear(a, b)) for a, b in ((30, 64), (64, 64), (64, 2))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    return [Learner(model, optimizer, batches(seed, 16, *bundled("breast_cancer")), classifier(model))]


def population_exploits(seed: int, steps: int) -> list[Learner]:
    """Population based training: twice the run loads the weights of a member that was trained further, on purpose."""
    x, y = bundled("diabetes")
    y = ((y - y.float().mean()) / y.float().std()).float()
    model, calls, draw = mlp(10, 48, 1, act=nn.Tanh), count(1), batches(seed, 16, x, y)
    other = mlp(10, 48, 1, act=nn.Tanh)
    better, theirs = torch.optim.Adam(other.parameters(), 1e-2), batches(seed + 1, 64, x, y)

    def batch() -> Batch:
        a, b = theirs()
        better.zero_grad()
        F.mse_loss(other(a)[:, 0], b).backward()
        better.step()
        if next(calls) in (steps // 3, 2 * steps // 3):
            model.load_state_dict(other.state_dict())
        return draw()

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    return [Learner(model, optimizer, batch, lambda a, b: F.mse_loss(model(a)[:, 0], b))]


FIELDS: tuple[Run, ...] = (
    diffusion_weighted_steps,
    meta_learning,
    self_play,
    critic_head_reset,
    radiance_coarse_to_fine,
    physics_weights_change,
    momentum_contrast,
    continual_tasks,
    smoothing_then_mixup,
    progressive_resizing,
    cyclical_rate,
    averaged_weights_taken_over,
    pruned_while_training,
    gradual_unfreezing,
    dropout_schedule,
    experts_warm_up,
    gan_lazy_r1,
    alternating_tasks,
    weight_normalised,
    population_exploits,
)
