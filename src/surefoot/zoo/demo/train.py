"""A character transformer learns to write Python: a plain training script, which can be made to go wrong.

    python train.py                     the plain loop: AdamW, gradients clipped to norm 1
    python train.py --faults            the same, and four things go wrong on the way
    python train.py --faults --guard    the same four, with surefoot's two calls in the loop

`surefoot demo` puts a copy of this file into its folder and runs it from there, three times side by side. The text is
the source of Python's standard library, so nothing is downloaded; it differs a little between versions of Python, and
the losses with it. Left out: a tokenizer, dropout, sampling, and whatever else is not needed to go wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from surefoot import TrainingStabilizer

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
TEXT_LENGTH, CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 1_500_000, 64, 24, 96, 4, 3
PEAK_RATE, WARMUP_STEPS, VALIDATION_BATCHES = 3e-3, 20, 20


# ---- the text --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Characters as numbers."""

    training: Tensor
    validation: Tensor
    """The last tenth: other modules than those that are learned from."""


def read_text() -> Text:
    """The modules of the standard library, one after the other."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))
    number = {character: i for i, character in enumerate(CHARACTERS)}
    numbers = torch.tensor([number[character] for character in text[:TEXT_LENGTH] if character in number])
    if len(numbers) < 100 * CONTEXT:
        raise SystemExit(f"{folder} holds {len(numbers):,} characters of source; the demo learns from at least 6,400.")
    cut = len(numbers) * 9 // 10
    return Text(numbers[:cut], numbers[cut:])


class Batches(IterableDataset[tuple[int, Tensor, Tensor]]):
    """The batch of every step, with the number of the step: whoever is handed a batch again knows which step it is."""

    def __init__(self, text: Tensor, steps: int, seed: int, faults: Faults) -> None:
        self.text, self.steps, self.seed, self.faults = text, steps, seed, faults

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """From the beginning."""
        generator = torch.Generator().manual_seed(self.seed)
        for step in range(self.steps):
            yield step, *self.faults.batch(step, *draw_batch(self.text, generator))


def draw_batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the same windows one character on."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


# ---- the model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what came before, then a small network at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Both, each added to what comes in."""
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class CharTransformer(nn.Module):
    """A GPT of 0.36 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character, at each place."""
        hidden = self.characters(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))  # type: ignore[no-any-return]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """Four accidents that happen to real runs, at the same steps in every run. -1 and an empty range: never."""

    corrupt_batch: int = -1
    wrong_rate: range = range(0)
    overflow: int = -1
    nan_gradient: int = -1

    @classmethod
    def spread_over(cls, steps: int) -> Faults:
        """All four, once the run has learned something."""
        typo = steps * 55 // 100
        return cls(steps * 40 // 100, range(typo, typo + 10), steps * 75 // 100, steps * 90 // 100)

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """A damaged shard: one byte, over and over, where text should be."""
        if step == self.corrupt_batch:
            x = y = torch.full_like(x, CHARACTERS.index("$"))
        return x, y

    def rate(self, step: int, rate: float) -> float:
        """A typo in the schedule: a hundred times the rate that was meant, for ten steps."""
        return 100 * rate if step in self.wrong_rate else rate

    def logits(self, step: int, logits: Tensor) -> Tensor:
        """A detour through half precision, where nothing is larger than 65,504: what is becomes infinite."""
        return (logits * 1e5).half().float() if step == self.overflow else logits

    def loss(self, step: int, loss: Tensor, logits: Tensor) -> Tensor:
        """A distance of zero under a square root: the loss is as it was, its gradient is 0/0."""
        if step == self.nan_gradient:
            loss = loss + (logits - logits.detach()).square().mean().sqrt()
        return loss


# ---- the loop --------------------------------------------------------------------------------------------------------


def learning_rate(step: int, steps: int) -> float:
    """Up in a line, then down a cosine to a tenth."""
    done = max(step - WARMUP_STEPS, 0) / max(steps - WARMUP_STEPS, 1)
    return PEAK_RATE * min((step + 1) / WARMUP_STEPS, 0.55 + 0.45 * math.cos(math.pi * done))


class Training:
    """A model on its way: the plain loop, or the same loop with a stabilizer."""

    def __init__(
        self, text: Text, steps: int, seed: int, faults: Faults, guard: bool = False, log: str | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.text, self.steps, self.faults = text, steps, faults
        self.loader = DataLoader(Batches(text.training, steps, seed, faults), batch_size=None)
        self.model = CharTransformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_RATE, fused=True)
        self.stabilizer: TrainingStabilizer | None = None
        if guard:
            import surefoot as sf

            self.stabilizer = sf.TrainingStabilizer(
                self.model, self.optimizer, clip=sf.ClipByNorm(1.0), recovery=sf.TrainingRecovery(), log=log
            )

    def step(self, step: int, x: Tensor, y: Tensor) -> float:
        """One step; returns its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.faults.rate(step, learning_rate(step, self.steps))
        logits = self.faults.logits(step, self.model(x))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss = self.faults.loss(step, loss, logits)
        if self.stabilizer is not None:
            self.stabilizer.backward(loss)
            self.stabilizer.step()
        else:
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return loss.item()

    def close(self) -> None:
        """Let the run log, if there is one, come to its end."""
        if self.stabilizer is not None and self.stabilizer.log is not None:
            self.stabilizer.log.close()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on text that was not trained on, the same windows for every run."""
        generator = torch.Generator().manual_seed(0)
        total = 0.0
        for _ in range(VALIDATION_BATCHES):
            x, y = draw_batch(self.text.validation, generator)
            total += F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()).item()
        return total / VALIDATION_BATCHES


def main() -> None:
    """Train, print the loss of every step, and write down what came of it."""
    parser = argparse.ArgumentParser(description="Train a character transformer on the standard library's source.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="let four things go wrong")
    parser.add_argument("--guard", action="store_true", help="with surefoot in the loop")
    parser.add_argument("--log", help="folder of surefoot's run log; only with --guard")
    parser.add_argument("--results", type=Path, help="a JSON file for the losses and what the guard saw")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the model is small: a second thread would mostly wait for the first
    faults = Faults.spread_over(options.steps) if options.faults else Faults()
    training = Training(read_text(), options.steps, options.seed, faults, options.guard, options.log)
    losses = []
    for step, x, y in training.loader:
        losses.append(training.step(step, x, y))
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    validation = training.validate()
    print(f"validation loss {validation:.4f}")
    training.close()
    if options.results is not None:
        incidents = training.stabilizer.incidents if training.stabilizer is not None else []
        seen = [{"step": i.step, "kind": i.kind, "action": i.action, "text": str(i)} for i in incidents]
        options.results.write_text(json.dumps({"losses": losses, "validation": validation, "incidents": seen}))


if __name__ == "__main__":
    main()
