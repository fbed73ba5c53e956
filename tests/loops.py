"""Models, optimizers and loops that the stabilizer's tests share: the bare loop, and the same loop guarded."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 8
CLASSES = 5


class TiedTransformer(nn.Module):
    """Token ids in, next-token logits out, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 7).long() % 16
        return self.head(self.body(self.embed(ids)).mean(1))[:, :CLASSES]


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unflatten(1, (4, 4)))[0][:, -1])


class CellByCell(nn.Module):
    """An LSTM written as a loop over its cell: the fused one has no low-precision form on every CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for part in x.unflatten(1, (4, 4)).unbind(1):
            state = self.cell(part, state)
        assert state is not None
        return self.head(state[0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn with batch norm": cnn,
    "lstm": LastStep,
    "lstm cell": CellByCell,
    "transformer with tied weights": TiedTransformer,
}


class SignDescent(torch.optim.Optimizer):
    """A third-party-style optimizer: its own `step`, its own state, no foreach, no fused kernel."""

    def __init__(self, parameters: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                    state["count"] = 0
                state["count"] += 1
                state["average"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(state["average"].sign(), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "fused sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "adam with amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "third-party style": SignDescent,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.02, max_iter=3, history_size=5),
}


def batches(steps: int, seed: int = 1, fixed: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels that can be learned; with `fixed` the same batch for ever, as L-BFGS is used."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(16, CLASSES, generator=generator)
    x = torch.randn(4 * BATCH if fixed else BATCH, 16, generator=generator)
    for _ in range(steps):
        yield x, (x @ teacher).argmax(1)
        if not fixed:
            x = torch.randn(BATCH, 16, generator=generator)


def built(model: str, optimizer: str, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = MODELS[model]()
    return net, OPTIMIZERS[optimizer](net.parameters())


def autocast(precision: str) -> Any:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast("cpu", dtype=kinds[precision]) if precision in kinds else nullcontext()


def train_bare(model: str, optimizer: str, precision: str, accumulate: int, steps: int) -> tuple[nn.Module, Any]:
    """The loop as people write it."""
    net, opt = built(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    stream = batches(steps * accumulate, fixed=optimizer == "lbfgs")
    for _ in range(steps):
        if optimizer == "lbfgs":
            x, y = next(stream)

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                with autocast(precision):
                    loss = F.cross_entropy(net(x), y)
                loss.backward()
                return loss

            opt.step(closure)
        else:
            opt.zero_grad()
            for _ in range(accumulate):
                x, y = next(stream)
                with autocast(precision):
                    loss = F.cross_entropy(net(x), y)
                scaler.scale(loss / accumulate).backward()
            scaler.step(opt)
            scaler.update()
        scheduler.step()
    return net, opt


def train_guarded(
    model: str, optimizer: str, precision: str, accumulate: int, steps: int, **settings: Any
) -> tuple[nn.Module, Any, sf.TrainingStabilizer]:
    """The same loop with the stabilizer in it."""
    net, opt = built(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    stabilizer = sf.TrainingStabilizer(
        net, opt, scheduler=scheduler, precision=precision, accumulate=accumulate, **settings
    )
    for x, y in batches(steps * accumulate, fixed=optimizer == "lbfgs"):
        if optimizer == "lbfgs":

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                with stabilizer.autocast():
                    loss = F.cross_entropy(net(x), y)
                stabilizer.backward(loss)
                return loss

            stabilizer.step(closure)
        else:
            with stabilizer.autocast():
                loss = F.cross_entropy(net(x), y)
            stabilizer.backward(loss)
            stabilizer.step()
    return net, opt, stabilizer


def everything(net: nn.Module, opt: Any) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state, copied, under one flat naming."""
    found = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    state = copy.deepcopy(opt.state_dict()["state"])
    for index, entry in state.items():
        for key, value in entry.items():
            for i, item in enumerate(value if isinstance(value, list) else [value]):
                if item is not None and not isinstance(item, list):
                    found[f"state.{index}.{key}.{i}"] = torch.as_tensor(item)
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what is not bit for bit the same."""
    missing = sorted(one.keys() ^ other.keys())
    return missing + [name for name in one if name in other and not torch.equal(one[name], other[name])]
