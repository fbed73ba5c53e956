import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from surefoot.build import find_lr, warmup_cosine


def problem(seed=0):
    torch.manual_seed(seed)
    x = torch.randn(256, 8)
    y = x @ torch.randn(8, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(5))
    return model, loader


def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def flatten(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: flatten(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [flatten(entry) for entry in value]
    return value


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def everything(model, optimizer, loader):
    return flatten(
        {
            "model": dict(model.state_dict()),
            "gradients": [p.grad for p in model.parameters()],
            "modes": [module.training for module in model.modules()],
            "optimizer": optimizer.state_dict(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),
            "torch": torch.get_rng_state(),
            "loader": loader.generator.get_state(),
        }
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_the_range_test_leaves_model_optimizer_loader_and_streams_bitwise_untouched(make, steps_before):
    model, loader = problem()
    optimizer = make(model.parameters())
    for batch, _ in zip(loader, range(steps_before), strict=False):
        optimizer.zero_grad()
        squared_error(model, batch).backward()
        optimizer.step()
    model[1].eval()
    moments = [id(value) for state in optimizer.state.values() for value in state.values()]
    before = everything(model, optimizer, loader)
    result = find_lr(model, optimizer, loader, squared_error, steps=30, show=False)
    assert len(result.rates) >= 10
    assert equal(before, everything(model, optimizer, loader))
    assert moments == [id(value) for state in optimizer.state.values() for value in state.values()]


def test_everything_is_put_back_when_the_loss_raises():
    model, loader = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = everything(model, optimizer, loader)
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("no more data")
        return squared_error(model, batch)

    with pytest.raises(RuntimeError, match="no more data"):
        find_lr(model, optimizer, loader, failing, show=False)
    assert equal(before, everything(model, optimizer, loader))


def test_a_scheduler_on_the_optimizer_continues_as_if_nothing_had_happened():
    model, loader = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = warmup_cosine(optimizer, 5, 50)
    before = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
    find_lr(model, optimizer, loader, squared_error, show=False)
    assert (scheduler.state_dict(), optimizer.param_groups[0]["lr"]) == before
    optimizer.step()
    scheduler.step()


def test_the_suggested_rate_trains_and_the_rate_it_blew_up_at_does_not():
    model, loader = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = find_lr(model, optimizer, loader, squared_error, highest=1e3, show=False)
    assert result.suggested is not None
    assert result.diverged_at is not None
    assert result.suggested < result.diverged_at / 3

    def loss_after(rate):
        model, loader = problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        losses = []
        for _ in range(5):
            for batch in loader:
                optimizer.zero_grad()
                loss = squared_error(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses[0], sum(losses[-5:]) / 5

    first, last = loss_after(result.suggested)
    assert last < 0.5 * first
    first, last = loss_after(result.diverged_at)
    assert not last < 0.5 * first


def scaled_features(scales):
    torch.manual_seed(0)
    x = torch.randn(512, 8) * scales
    y = (x / scales) @ torch.randn(8, 1) + 5
    return nn.Linear(8, 1), list(zip(x.split(32), y.split(32), strict=True))


def loss_after_training(scales, rate, steps=200):
    model, batches = scaled_features(scales)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = squared_error(model, batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-16:]) / 16


@pytest.mark.parametrize("steps", [50, 100, 300])
@pytest.mark.parametrize("scales", [torch.ones(8), torch.logspace(0, 1.5, 8)], ids=["even", "badly scaled"])
def test_the_suggestion_is_not_timid_however_long_the_test_takes(scales, steps):
    model, batches = scaled_features(scales)
    found = find_lr(model, torch.optim.SGD(model.parameters(), 0.1), batches, squared_error, steps=steps, show=False)
    rates = [10 ** (power / 2) for power in range(-12, 1)]
    best = min(rates, key=lambda rate: np.nan_to_num(loss_after_training(scales, rate), nan=np.inf))
    assert best / 10 < found.suggested < 3 * best


def test_it_shows_a_plot_in_the_terminal_and_as_a_file(tmp_path, capsys):
    model, loader = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    find_lr(model, optimizer, loader, squared_error, picture=tmp_path / "range.svg")
    printed = capsys.readouterr().out
    assert "•" in printed
    assert "Suggested learning rate" in printed
    drawn = (tmp_path / "range.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<svg")
    assert "<polyline" in drawn


def test_param_groups_keep_the_ratio_of_their_rates():
    model, loader = problem()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[4].parameters(), "lr": 0.1}]
    )
    seen = []

    def watching(model, batch):
        seen.append([group["lr"] for group in optimizer.param_groups])
        return squared_error(model, batch)

    result = find_lr(model, optimizer, loader, watching, steps=10, show=False)
    assert [pair[1] for pair in seen][: len(result.rates)] == pytest.approx(list(result.rates))
    assert all(low == pytest.approx(high / 10) for low, high in seen)


def test_a_loss_that_never_falls_gets_no_suggestion():
    model, loader = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = find_lr(model, optimizer, loader, lambda m, b: 0 * squared_error(m, b) + 1.0, show=False)
    assert result.suggested is None
    assert "never fell" in str(result)


def test_a_negative_loss_is_not_taken_for_divergence():
    model, loader = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shifted = find_lr(model, optimizer, loader, lambda m, b: squared_error(m, b) - 20.0, highest=0.1, show=False)
    assert shifted.diverged_at is None
    assert shifted.suggested is not None


def test_an_iterator_that_ends_and_impossible_bounds_are_refused():
    model, loader = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="loader or a list"):
        find_lr(model, optimizer, iter(loader), squared_error, show=False)
    with pytest.raises(ValueError, match="lowest"):
        find_lr(model, optimizer, loader, squared_error, lowest=1.0, highest=0.1)


def test_range_test_puts_back_a_parameter_that_only_the_optimizer_knows():
    model, loader = problem()
    temperature = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    find_lr(model, optimizer, loader, lambda net, batch: squared_error(net, batch) * temperature.exp(), show=False)
    assert temperature.item() == 1.0
    assert temperature.grad is None


def test_range_test_takes_a_model_with_an_expanded_buffer():
    model, loader = problem()
    model.register_buffer("places", torch.arange(4.0).expand(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    find_lr(model, optimizer, loader, squared_error, show=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_range_test_says_so_when_the_first_loss_is_already_nan(tmp_path, capsys):
    model, loader = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "range.svg"
    found = find_lr(model, optimizer, loader, lambda net, batch: squared_error(net, batch) * float("nan"), picture=path)
    assert found.suggested is None
    assert found.losses == ()
    assert "first loss is not finite" in capsys.readouterr().out
    assert not path.exists()
