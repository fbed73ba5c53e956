"""A training loop whose steps are refused on demand, shared by the tests of incidents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.core.random_state import read_streams

CLASSES = 5
ROWS = 6


@dataclass(frozen=True)
class RefuseAt:
    """A step rule that refuses the given steps, whatever they are like: their gradients are as good as any."""

    steps: Any
    name: str = "refused-here"

    def init(self) -> tuple[()]:
        return ()

    def update(self, state: tuple[()], signals: Any) -> tuple[tuple[()], Any]:
        wanted = self.steps if isinstance(self.steps, tuple) else (self.steps,)
        anomalous: Any = signals.step in wanted
        if signals.device is not None:
            anomalous = torch.full((), anomalous, device=signals.device)
        return state, sf.Verdict(self.name, anomalous, "error")


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed((x.abs() * 7).long() % 16)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 12, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unflatten(1, (4, 4)))[0][:, -1])


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, CLASSES)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(96, CLASSES),
    ),
    "lstm": Recurrent,
    "transformer": Transformer,
}


def loader(steps: int, accumulate: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * steps * accumulate
    x = torch.randn(rows, 16, generator=generator)
    y = torch.randint(0, CLASSES, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=ROWS, shuffle=True)


def capture(
    incidents: Any,
    model: str,
    precision: str = "fp32",
    accumulate: int = 1,
    step: Any = 2,
    steps: int = 6,
    each: Any = None,
    fused: bool = False,
    **settings: Any,
) -> tuple[nn.Module, sf.TrainingStabilizer]:
    """Train for a few steps, some of which are refused. `each` is told of every batch, before its forward."""
    torch.manual_seed(0)
    net = MODELS[model]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=fused)
    stabilizer = sf.TrainingStabilizer(
        net,
        optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        precision=precision,
        accumulate=accumulate,
        checker=sf.StabilityChecker(nonfinite=RefuseAt(step), explosion=None, spike=None),
        incidents=incidents,
        **settings,
    )
    for x, y in stabilizer.resume(loader(steps, accumulate)):
        if each is not None:
            each(stabilizer, net, optimizer, (x, y))
        with stabilizer.autocast():
            loss = F.cross_entropy(net(x), y)
        stabilizer.backward(loss)
        stabilizer.step()
    return net, stabilizer


def state_before(model: str, precision: str, accumulate: int, step: int) -> dict[str, Any]:
    """The state before a step, copied while the same run goes by unwatched."""
    found: dict[str, Any] = {}

    def look(stabilizer: Any, net: Any, optimizer: Any, batch: Any) -> None:
        if stabilizer.steps == step and not found:
            found.update(
                model={name: value.clone() for name, value in net.state_dict().items()},
                optimizer=copied(optimizer.state_dict()),
                scheduler=copied(stabilizer.scheduler.state_dict()),
                streams=read_streams(),
                batch=batch,
                parameters=list(net.parameters()),
            )

    capture(None, model, precision, accumulate, step=step, each=look)
    return found


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return value


def incidents_in(folder: Path) -> list[Path]:
    found = Path(folder) / "incidents"
    return sorted(path for path in found.iterdir() if path.is_dir()) if found.is_dir() else []
