"""The same transformer, data and learning rate, with and without warm-up: one diverges, one learns.

    python examples/warmup_transformer.py

A small pre-norm transformer learns to repeat a sequence of eight letters, trained by SGD with momentum at a rate that
works later but is too high at the start: in the first steps the loss surface is steep, and with momentum the updates
become so large that the loss diverges. `warmup_cosine` reaches the same rate 150 steps later, when the surface is
flatter.
Takes a few seconds on one core.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from surefoot.build import seed_everything, warmup_cosine
from surefoot.build.line_chart import Chart, ChartSeries, to_text

LETTERS, HALF, WIDTH, BLOCKS = 16, 8, 32, 6
STEPS, WARMUP_STEPS, PEAK_RATE = 300, 150, 0.25
CHANCE = math.log(LETTERS)


class Repeater(nn.Module):
    """Reads a sequence and predicts each next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(2 * HALF, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, norm_first=True, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LETTERS)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(2 * HALF))

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.letters(tokens) + self.places
        return self.head(self.blocks(stream, mask=self.causal, is_causal=True))


def train(warmup_steps: int, seed: int = 0) -> list[float]:
    """Train and return the loss of every step, up to the first that is not finite."""
    data = seed_everything(seed).generator()
    model = Repeater()
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=0.9)
    scheduler = warmup_cosine(optimizer, warmup_steps, STEPS)
    losses: list[float] = []
    while len(losses) < STEPS and all(map(math.isfinite, losses[-1:])):
        half = torch.randint(0, LETTERS, (16, HALF), generator=data)
        logits = model(half.repeat(1, 2))[:, HALF - 1 : -1]
        loss = cross_entropy(logits.flatten(0, 1), half.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    bare, warmed = train(warmup_steps=0), train(warmup_steps=WARMUP_STEPS)
    print(f"without warm-up: {bare[0]:.2f} at the start, not finite at step {len(bare) - 1} (chance is {CHANCE:.2f})")
    print(f"with warm-up:    {warmed[0]:.2f} at the start, {sum(warmed[-20:]) / 20:.2f} at the end\n")
    print(to_text(Chart("with warm-up", "step", "loss", (ChartSeries("loss", range(len(warmed)), warmed),))))


if __name__ == "__main__":
    main()
