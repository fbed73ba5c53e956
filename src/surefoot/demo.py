"""The demo: one real training job, three ways, with the same faults.

A small convolutional net learns scikit-learn's handwritten digits. Three things go wrong on the way, as they do:
a gradient ten thousand times too large, a batch with NaN pixels, and a batch with a bit flipped. The same seed and the
same faults hit a bare loop and a guarded one; a clean run shows what was to be had.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.act.clip import ClipByNorm
from surefoot.errors import UsageError
from surefoot.stabilizer import TrainingStabilizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surefoot.types import Incident

BATCH = 64


@dataclass(frozen=True)
class Digits:
    """Train and test split, pixels scaled to [0, 1]."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def batches(self, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches of the training rows, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            rows = torch.randint(len(self.train_x), (BATCH,), generator=generator)
            yield self.train_x[rows], self.train_y[rows]


@dataclass
class Result:
    """What became of one run."""

    name: str
    loss: float
    accuracy: float
    seconds: float
    losses: list[float]
    """Training loss of each step."""
    incidents: list[Incident] = field(default_factory=list)


def load_digits_split() -> Digits:
    """Scikit-learn's bundled digits, shuffled once, a fifth kept for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the demo's data comes with scikit-learn: pip install 'surefoot[demo]'") from error
    bundle = load_digits()
    order = torch.randperm(len(bundle.target), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(bundle.images).float()[order].unsqueeze(1) / 16
    y = torch.from_numpy(bundle.target).long()[order]
    cut = len(y) * 4 // 5
    return Digits(x[:cut], y[:cut], x[cut:], y[cut:])


def build_net() -> nn.Sequential:
    """A small convolutional net."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Faults:
    """What goes wrong, and when: the same in every run."""

    def __init__(self, steps: int) -> None:
        self.exploding, self.nan_batch, self.flipped_bit = steps * 3 // 10, steps * 5 // 10, steps * 7 // 10

    def spoil_batch(self, step: int, x: Tensor) -> Tensor:
        """A dead sensor writes NaN; a flipped bit in a float's exponent makes it huge."""
        if step in (self.nan_batch, self.flipped_bit):
            x = x.clone()
            x[3, 0, 2:5, 2:5] = torch.nan if step == self.nan_batch else 1e20
        return x

    def spoil_logits(self, step: int, logits: Tensor) -> Tensor:
        """A gradient ten thousand times too large; the loss does not show it."""
        if step == self.exploding:
            logits.register_hook(lambda gradient: gradient * 1e4)  # type: ignore[no-untyped-call]
        return logits


def train(name: str, data: Digits, steps: int, seed: int, faults: Faults | None, guard: bool) -> Result:
    """One run: the bare loop, or the same loop with the stabilizer's two calls in it."""
    torch.manual_seed(seed)
    net = build_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
    stabilizer = TrainingStabilizer(net, optimizer, clip=ClipByNorm(5.0)) if guard else None
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step, (x, y) in enumerate(data.batches(steps, seed)):
        logits = net(faults.spoil_batch(step, x) if faults else x)
        loss = F.cross_entropy(faults.spoil_logits(step, logits) if faults else logits, y)
        losses.append(loss.detach())
        if stabilizer is not None:
            stabilizer.backward(loss)
            stabilizer.step()
        else:
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        logits = net(data.test_x)
        test_loss = F.cross_entropy(logits, data.test_y).item()
        accuracy = (logits.argmax(1) == data.test_y).float().mean().item()
    incidents = stabilizer.incidents if stabilizer else []
    return Result(name, test_loss, accuracy, seconds, torch.stack(losses).tolist(), incidents)


def run_demo(steps: int, seed: int) -> None:
    """Train three ways and print what came of it."""
    import logging

    from rich.console import Console
    from rich.table import Table

    console = Console()
    logging.getLogger("surefoot").setLevel(logging.ERROR)  # the incidents are shown below, in one place
    data, faults = load_digits_split(), Faults(steps)
    console.print(
        f"A convolutional net on {len(data.train_x):,} handwritten digits, {steps} steps. Injected: a gradient "
        f"x 10,000 at step {faults.exploding}, NaN pixels at step {faults.nan_batch}, pixels of 1e20 at step "
        f"{faults.flipped_bit}.\n"
    )
    train("warm-up", data, 20, seed, None, guard=True)
    results = []
    for name, injected, guard in [("clean", None, False), ("bare", faults, False), ("guarded", faults, True)]:
        with console.status(f"training: {name}"):
            results.append(train(name, data, steps, seed, injected, guard))
    table = Table("run", "faults", "test loss", "test accuracy", "steps left out", "time")
    for result, hit_by in zip(results, ["none", "three", "three"], strict=True):
        left_out = sum(incident.action == "skip" for incident in result.incidents)
        table.add_row(
            result.name,
            hit_by,
            f"{result.loss:.4f}",
            f"{result.accuracy:.1%}",
            str(left_out) if result.name == "guarded" else "-",
            f"{result.seconds:.1f} s",
        )
    console.print(table)
    console.print("\nWhat the guard saw:")
    for incident in results[-1].incidents:
        console.print(f"  {incident}", highlight=False, soft_wrap=True)
