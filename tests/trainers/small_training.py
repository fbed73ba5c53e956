"""What the tests of all frameworks train: a small classifier on data that may hold a fault, and its state."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

WIDTH, CLASSES = 12, 4
LR = 3e-3


class Classifier(nn.Module):
    """Returns the loss and the logits, as a `transformers.Trainer` wants them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Linear(nn.Module):
    """Without a norm, so that large inputs make large gradients."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.second(torch.tanh(self.first(x)) + 0.01 * self.first(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Overflowing(Classifier):
    """Its gradients overflow in fp16 until the loss scale is low."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, labels)
        return out | {"loss": 1e3 * out["loss"]}


def use_fp16_on_cpu(accelerator: Any) -> None:
    """Make an `Accelerator` of a CPU one for fp16 with a loss scaler, which its constructor refuses."""
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows whose class is their largest entry. A fault multiplies some of them: by NaN, or by a large number."""

    def __init__(self, count: int, faults: dict[int, float] | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.labels = self.x[:, :CLASSES].argmax(1)
        for row, factor in (faults or {}).items():
            self.x[row] *= factor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class AfterSteps:
    """Copies weights and moments after every optimizer step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.states: list[dict[str, Any]] = []

    def __call__(self, optimizer: Any, *_: Any) -> None:
        moments = [copy.deepcopy(optimizer.state.get(p)) for group in optimizer.param_groups for p in group["params"]]
        self.states.append({"weights": copy.deepcopy(self._model.state_dict()), "moments": moments})


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal, bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
