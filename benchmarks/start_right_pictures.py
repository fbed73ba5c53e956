"""Draw every picture of docs/start-right from real runs of the code it shows.

    python benchmarks/start_right_pictures.py

Each function makes one chart; its name is the file's. Under a minute on one core.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from init_depth import CASES, INITS, scales
from torch import Tensor, nn

from surefoot.build import (
    Standardizer,
    clip_advice,
    decay_groups,
    find_lr,
    masked_softmax,
    seed_everything,
    warmup_constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_stable_decay,
    warmup_step,
)
from surefoot.build.line_chart import Chart, ChartSeries, to_svg

FOLDER = Path(__file__).parents[1] / "docs" / "start-right"


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        rows = torch.randint(0, len(x), (32,))
        loss = (model(x[rows]) - y[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def seeding() -> Chart:
    def run(seed: int) -> list[float]:
        seed_everything(seed)
        x = torch.randn(256, 8)
        model = small_model()
        return losses_of(model, torch.optim.SGD(model.parameters(), lr=0.05), x, x.sum(1, keepdim=True), 60)

    first, again, other = run(1), run(1), run(2)
    assert first == again
    lines = (ChartSeries("seed 1, twice: one line", range(60), first), ChartSeries("seed 2", range(60), other))
    return Chart("The same seed draws the same run", "step", "loss", lines)


def initialisation() -> Chart:
    case = CASES["GELU MLP, 50 layers"]
    lines = tuple(
        ChartSeries(name, range(1, 51), scales(case, INITS[name], seed=0)[1])
        for name in ("init_for", "PyTorch default")
    )
    return Chart("Gradient that reaches each of 50 GELU layers", "layer", "root mean square", lines, log_y=True)


def blocks() -> Chart:
    def disagreement(norm: nn.Module, batch_size: int) -> float:
        torch.manual_seed(0)
        norm.train()
        for _ in range(300):
            norm(2.0 + 3.0 * torch.randn(batch_size, 32))
        batch = 2.0 + 3.0 * torch.randn(batch_size, 32)
        training = norm(batch)
        return float((training - norm.eval()(batch)).detach().square().mean().sqrt())

    sizes = [2, 4, 8, 16, 32, 64, 128, 256]
    lines = (
        ChartSeries("BatchNorm", sizes, [disagreement(nn.BatchNorm1d(32), size) for size in sizes]),
        ChartSeries("GroupNorm", sizes, [disagreement(nn.GroupNorm(8, 32), size) for size in sizes]),
    )
    return Chart("Training and evaluation outputs disagree", "batch size", "difference (rms)", lines, log_x=True)


def schedules() -> Chart:
    makers: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
        "constant": lambda o: warmup_constant(o, 50),
        "linear": lambda o: warmup_linear(o, 50, 500),
        "cosine, 1 restart, floor 0.1": lambda o: warmup_cosine(o, 50, 500, floor=0.1, restarts=1),
        "step": lambda o: warmup_step(o, 50, [250, 400], gamma=0.3),
        "inverse square root": lambda o: warmup_inverse_sqrt(o, 50),
        "warm-up, stable, decay": lambda o: warmup_stable_decay(o, 50, 500, 100),
    }

    def curve(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = make(optimizer)
        rates = []
        for _ in range(500):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return rates

    lines = tuple(ChartSeries(name, range(500), curve(make)) for name, make in makers.items())
    return Chart("Warm-up, then …", "step", "learning rate / peak", lines)


def learning_rate() -> Chart:
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = x.sum(1, keepdim=True) + x[:, :1] * x[:, 1:2]
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = list(zip(x.split(32), y.split(32), strict=True))
    return find_lr(model, optimizer, batches, lambda m, b: (m(b[0]) - b[1]).square().mean(), show=False).chart()


def weight_decay() -> Chart:
    def unused_rows(make: Callable[[nn.Module], list[dict[str, object]]]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 16), nn.Flatten(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(make(model), lr=1e-2, weight_decay=0.5)
        sizes = []
        for _ in range(300):
            tokens = torch.randint(0, 50, (32, 4))  # the upper half of the vocabulary never comes
            loss = (model(tokens) - tokens.float().mean(1, keepdim=True) / 50).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sizes.append(float(model[0].weight[50:].detach().square().mean().sqrt()))
        return sizes

    lines = (
        ChartSeries("decay_groups", range(300), unused_rows(lambda model: decay_groups(model, 0.5))),
        ChartSeries("decay on everything", range(300), unused_rows(lambda model: [{"params": model.parameters()}])),
    )
    return Chart("Embeddings of words that no batch contains", "step", "root mean square", lines)


def data_scale() -> Chart:
    torch.manual_seed(0)
    x = torch.randn(512, 8) * torch.logspace(-3, 3, 8) + torch.logspace(3, -3, 8)
    y = Standardizer.fit(x)(x).sum(1, keepdim=True)

    def run(inputs: Tensor) -> list[float]:
        torch.manual_seed(1)
        model = small_model()
        return losses_of(model, torch.optim.Adam(model.parameters(), lr=1e-2), inputs, y, 200)

    lines = (
        ChartSeries("standardised", range(200), run(Standardizer.fit(x)(x))),
        ChartSeries("raw", range(200), run(x)),
    )
    return Chart("Features from 0.001 to 1000, same model and rate", "step", "loss", lines, log_y=True)


def masks() -> Chart:
    def gradient(weights: Callable[[Tensor, Tensor], Tensor], masked: int) -> float:
        torch.manual_seed(0)
        scores = torch.randn(8, requires_grad=True)
        (weights(scores, torch.arange(8) >= masked) * torch.randn(8)).sum().backward()
        return float(scores.grad.norm())

    def naive(scores: Tensor, keep: Tensor) -> Tensor:
        return (scores + torch.zeros(8).masked_fill(~keep, float("-inf"))).softmax(-1)

    counts = range(9)
    lines = (
        ChartSeries("masked_softmax: 0 at 8 of 8", counts, [gradient(masked_softmax, count) for count in counts]),
        ChartSeries("additive -inf: NaN at 8 of 8", counts, [gradient(naive, count) for count in counts]),
    )
    return Chart("Gradient through attention, by keys masked", "masked keys of 8", "gradient norm", lines)


def clipping() -> Chart:
    torch.manual_seed(0)
    norms = (0.5 * torch.randn(400)).exp().tolist()
    advice = clip_advice(norms, max_norm=0.5)
    suggested = advice.suggested_max_norm
    lines = (
        ChartSeries("gradient norm", range(400), norms),
        ChartSeries(f"limit in use: clips {advice.clipped_share:.0%}", [0, 399], [0.5, 0.5]),
        ChartSeries(f"suggested: {suggested:.2g}", [0, 399], [suggested, suggested]),
    )
    return Chart("A limit that sets the size of most updates", "step", "norm", lines, log_y=True)


PICTURES = {
    "seeding": seeding,
    "initialisation": initialisation,
    "blocks": blocks,
    "schedules": schedules,
    "learning-rate": learning_rate,
    "weight-decay": weight_decay,
    "data-scale": data_scale,
    "masks": masks,
    "clipping": clipping,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, make in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(to_svg(make()), encoding="utf-8")
        print(f"{name}.svg", flush=True)
