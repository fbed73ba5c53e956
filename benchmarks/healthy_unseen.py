"""Twelve more healthy trainings whose losses jump, are rare or have heavy tails, written apart from the rules."""

from __future__ import annotations

import copy
from itertools import count

import torch
import torch.nn.functional as F
from healthy_data import VAE, after_clearing, batches, bundled, classifier, digits, mlp
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from training_loops import Batch, Learner, Run


def policy_with_rare_reward(seed: int, steps: int) -> list[Learner]:
    """REINFORCE on a chain of nine that pays 10 at its end: the loss is exactly 0 until an episode gets there."""
    generator, policy = torch.Generator().manual_seed(seed), mlp(9, 32, 2, act=nn.Tanh)

    @torch.no_grad()
    def episode() -> Batch:
        at, seen, taken, paid = torch.zeros(8, dtype=torch.long), [], [], torch.zeros(8)
        for _ in range(14):
            state = F.one_hot(at, 9).float()
            action = torch.multinomial(policy(state).softmax(1), 1, generator=generator)[:, 0]
            at = (at + 2 * action - 1).clamp(0, 8)
            seen.append(state)
            taken.append(action)
            paid = torch.where(at == 8, 10.0, paid)
        return torch.stack(seen), torch.stack(taken), paid

    def loss(seen: Tensor, taken: Tensor, paid: Tensor) -> Tensor:
        chosen = policy(seen).log_softmax(2).gather(2, taken[..., None])[..., 0]
        return -(chosen.sum(0) * paid).mean()

    return [Learner(policy, torch.optim.Adam(policy.parameters(), 2e-3), episode, loss)]


def q_target_copied_rarely(seed: int, steps: int) -> list[Learner]:
    """Q-learning on a ring that pays 50 in one of 20 places; the target network is copied every 250 steps."""
    generator, net = torch.Generator().manual_seed(seed), mlp(20, 48, 2)
    target, calls = copy.deepcopy(net), count(1)

    @torch.no_grad()
    def batch() -> Batch:
        if next(calls) % 250 == 0:
            target.load_state_dict(net.state_dict())
        at, action = torch.randint(20, (16,), generator=generator), torch.randint(2, (16,), generator=generator)
        after = (at + 2 * action - 1) % 20
        goal = 50.0 * (after == 7) + 0.98 * target(F.one_hot(after, 20).float()).max(1).values
        return F.one_hot(at, 20).float(), action, goal

    def loss(state: Tensor, action: Tensor, goal: Tensor) -> Tensor:
        return F.mse_loss(net(state).gather(1, action[:, None])[:, 0], goal)

    return [Learner(net, torch.optim.Adam(net.parameters(), 1e-3), batch, loss)]


def curriculum_of_ranges(seed: int, steps: int) -> list[Learner]:
    """A curriculum: the products of two numbers, first up to 1, then up to 5, then up to 20, squared error."""
    generator, model, calls = torch.Generator().manual_seed(seed), mlp(2, 64, 64, 1), count()

    def batch() -> Batch:
        reach = (1.0, 5.0, 20.0)[min(3 * next(calls) // steps, 2)]
        x = reach * (2 * torch.rand(32, 2, generator=generator) - 1)
        return x, x.prod(1, keepdim=True)

    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    return [Learner(model, optimizer, batch, lambda x, y: F.mse_loss(model(x), y))]


def vae_beta_switches(seed: int, steps: int) -> list[Learner]:
    """The weight of a VAE's divergence changes between 0.05 and 4 every sixth of the run."""
    model, generator, calls = VAE(), torch.Generator().manual_seed(seed), count()
    draw = batches(seed, 64, digits()[0])

    def batch() -> Batch:
        return *draw(), torch.randn(64, 8, generator=generator)

    def loss(x: Tensor, noise: Tensor) -> Tensor:
        return model(x, noise, 4.0 if 6 * next(calls) // steps % 2 else 0.05)

    return [Learner(model, torch.optim.Adam(model.parameters(), 1e-3), batch, loss)]


def student_t_targets(seed: int, steps: int) -> list[Learner]:
    """Targets with Student-t noise of 1.5 degrees of freedom and the squared error, eight rows to a batch, clipped."""
    generator = torch.Generator().manual_seed(seed)
    truth, model = torch.randn(6, 1, generator=generator), mlp(6, 32, 1)
    noise = torch.distributions.StudentT(1.5)

    def batch() -> Batch:
        x = torch.randn(8, 6, generator=generator)
        return x, x @ truth + 0.3 * noise.sample((8, 1))

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return [Learner(model, optimizer, batch, lambda x, y: F.mse_loss(model(x), y), max_norm=5.0)]


def one_or_two_rows(seed: int, steps: int) -> list[Learner]:
    """Diabetes, one or two rows at a time, squared error of standardised targets."""
    x, y = bundled("diabetes")
    y = ((y - y.float().mean()) / y.float().std()).float()
    generator, model = torch.Generator().manual_seed(seed), mlp(10, 32, 1, act=nn.Tanh)

    def batch() -> Batch:
        size = int(torch.randint(1, 3, (), generator=generator))
        rows = torch.randint(len(y), (size,), generator=generator)
        return x[rows], y[rows]

    optimizer = torch.optim.SGD(model.parameters(), 5e-3, momentum=0.9)
    return [Learner(model, optimizer, batch, lambda a, b: F.mse_loss(model(a)[:, 0], b))]


def wasserstein_gan(seed: int, steps: int) -> list[Learner]:
    """A Wasserstein GAN with a gradient penalty on two moons; its losses cross zero."""
    generator = torch.Generator().manual_seed(seed)
    maker, judge = mlp(4, 48, 2), mlp(2, 48, 1)

    def latent() -> Batch:
        return (torch.randn(32, 4, generator=generator),)

    def both() -> Batch:
        angle = 3.14 * torch.rand(32, generator=generator)
        upper = (torch.rand(32, generator=generator) < 0.5).float()
        moons = torch.stack([angle.cos() + upper, (2 * upper - 1) * angle.sin()], 1)
        return moons, *latent(), torch.rand(32, 1, generator=generator)

    def judge_loss(real: Tensor, noise: Tensor, share: Tensor) -> Tensor:
        made = maker(noise).detach()
        between = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        return judge(made).mean() - judge(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    def maker_loss(noise: Tensor) -> Tensor:
        return -judge(maker(noise)).mean()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 1e-3, betas=(0.5, 0.9))

    return [
        Learner(judge, adam(judge), after_clearing(judge, both), judge_loss),
        Learner(maker, adam(maker), latent, maker_loss),
    ]


def restarts_with_momentum(seed: int, steps: int) -> list[Learner]:
    """SGD with momentum whose rate falls to a thousandth and starts again, five times; weight decay."""
    model = mlp(64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    period = max(steps // 5, 1)
    scheduler = LambdaLR(optimizer, lambda i: 0.001 ** (i % period / period))
    return [Learner(model, optimizer, batches(seed, 32, *digits()), classifier(model), scheduler)]


def another_data_set(seed: int, steps: int) -> list[Learner]:
    """Digits for half of the run, then wines with inputs three times as large and the same output layer."""
    x, y = bundled("wine")
    wines, calls = batches(seed, 32, 3 * F.pad(x, (0, 51)), y), count()
    draw, model = batches(seed, 32, *digits()), mlp(64, 64, 10)

    def batch() -> Batch:
        return draw() if next(calls) < steps // 2 else wines()

    return [Learner(model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), batch, classifier(model))]


def unfrozen_from_the_top(seed: int, steps: int) -> list[Learner]:
    """Four layers of which only the last one learns at first; one more is unfrozen every fifth of the run."""
    layers = [mlp(64, 48), mlp(48, 48), mlp(48, 48), nn.Linear(48, 10)]
    model, calls = nn.Sequential(*[part for each in layers for part in (each, nn.Tanh())][:-1]), count()
    optimizer = torch.optim.Adam([{"params": each.parameters(), "lr": 2e-3 * 0.7**i} for i, each in enumerate(layers)])
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    draw = batches(seed, 32, *digits())

    def batch() -> Batch:
        free = 1 + 5 * next(calls) // steps
        for layer in layers[-free:]:
            layer.requires_grad_(True)
        return draw()

    return [Learner(model, optimizer, batch, classifier(model))]


def tasks_far_apart(seed: int, steps: int) -> list[Learner]:
    """Each step is one of three tasks; their losses are about 0.001, 1 and 1,000, the last one rare."""
    generator, body = torch.Generator().manual_seed(seed), mlp(16, 64, 32)
    heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(3))
    model, truth = nn.ModuleList([body, heads]), torch.randn(16, 3, generator=generator)
    sizes, chances = (0.03, 1.0, 30.0), torch.tensor([0.6, 0.37, 0.03])

    def batch() -> Batch:
        task = torch.multinomial(chances, 1, generator=generator)[0]
        x = torch.randn(16, 16, generator=generator)
        return x, sizes[int(task)] * (x @ truth[:, task]).tanh(), task

    def loss(x: Tensor, y: Tensor, task: Tensor) -> Tensor:
        return F.mse_loss(heads[int(task)](body(x).relu())[:, 0], y)

    return [Learner(model, torch.optim.Adam(model.parameters(), 1e-3), batch, loss)]


def contrastive_with_queue(seed: int, steps: int) -> list[Learner]:
    """MoCo: a slow copy makes the keys, and a queue of 256 earlier keys, empty at first, holds the negatives."""
    model, generator = mlp(64, 64, 16), torch.Generator().manual_seed(seed)
    slow, queue, draw = copy.deepcopy(model), list[Tensor](), batches(seed, 16, digits()[0])

    @torch.no_grad()
    def batch() -> Batch:
        (x,) = draw()
        views = x + 0.3 * torch.randn(2, 16, 64, generator=generator)
        for kept, weight in zip(slow.parameters(), model.parameters(), strict=True):
            kept.lerp_(weight, 0.05)
        keys, others = F.normalize(slow(views[1])), torch.cat(queue) if queue else torch.zeros(0, 16)
        queue.append(keys)
        del queue[:-16]
        return views[0], keys, others

    def loss(view: Tensor, keys: Tensor, others: Tensor) -> Tensor:
        found = F.normalize(model(view))
        near, far = (found * keys).sum(1, keepdim=True), found @ others.T
        return F.cross_entropy(torch.cat([near, far], 1) / 0.1, torch.zeros(len(view), dtype=torch.long))

    return [Learner(model, torch.optim.Adam(model.parameters(), 1e-3), batch, loss)]


UNSEEN: tuple[Run, ...] = (
    policy_with_rare_reward,
    q_target_copied_rarely,
    curriculum_of_ranges,
    vae_beta_switches,
    student_t_targets,
    one_or_two_rows,
    wasserstein_gan,
    restarts_with_momentum,
    another_data_set,
    unfrozen_from_the_top,
    tasks_far_apart,
    contrastive_with_queue,
)
