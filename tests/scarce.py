"""A layer that has memory for so many rows and no more, and a small net around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf


class _OnlySoMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Scarce) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.use(gradient, "backward")
        return gradient, None


class Scarce(nn.Module):
    """Hands its input on; raises as the allocator does when it has more rows than fit."""

    def __init__(self, fits: int, when: str = "backward", error: Exception | None = None) -> None:
        super().__init__()
        self.fits, self.when = fits, when
        self.error = error
        self.tried: list[int] = []
        """Rows of every forward, failed ones included."""
        self.done: list[int] = []
        """Rows of every pass that came through."""

    def use(self, x: Tensor, where: str) -> None:
        if len(x) > self.fits and where == self.when:
            raise self.error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        if where == "backward":
            self.done.append(len(x))

    def forward(self, x: Tensor) -> Tensor:
        self.tried.append(len(x))
        self.use(x, "forward")
        return _OnlySoMany.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


def net(
    fits: int = 10_000, when: str = "backward", error: Exception | None = None, dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), Scarce(fits, when, error), nn.Linear(7, 3)).to(dtype)


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(count, 5, generator=generator).to(dtype),
        "y": torch.randint(0, 3, (count,), generator=generator),
        "name": "a batch",
        "scale": torch.tensor(2.0),
    }


def loss_of(model: nn.Module) -> Any:
    return lambda part: nn.functional.cross_entropy(model(part["x"]), part["y"]) * part["scale"]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def stabilized(model: nn.Module, **settings: Any) -> sf.TrainingStabilizer:
    return sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=1.0), **settings)


def whole_gradients(*batches: Any) -> list[Tensor | None]:
    model = net()
    for batch in batches:
        (loss_of(model)(batch) / len(batches)).backward()
    return gradients(model)


def assert_close(found: Any, expected: Any, rtol: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol, check_dtype=False)


def assert_equal(found: Any, expected: Any) -> None:
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True))
