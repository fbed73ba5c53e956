"""Do activations and gradients keep their scale through depth? One table: `init_for`, PyTorch's default, plain randn.

    python benchmarks/init_depth.py

For each network the root mean square of every layer's output is taken, and of the gradient that reaches it from a
random linear loss at the end. The figure is the largest of them over the smallest: 1 is perfect, 3 is fine, 1e18 is a
network that cannot learn. An LSTM is as deep as its sequence is long: its layers are the cell states of 50 steps, and
the loss looks at the output after them only. Worst of three seeds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from surefoot.build import init_for

DEPTH = 50
WIDTH = 256
TARGET = 3.0


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    layers: Callable[[nn.Module, Tensor], tuple[list[Tensor], Tensor]]
    calibrate: bool = False


def mlp(activation: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), activation())))


def cnn(channels: int) -> nn.Sequential:
    widths = [3, *[channels] * DEPTH]
    pairs = pairwise(widths)
    return nn.Sequential(*(part for a, b in pairs for part in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())))


class Transformer(nn.Module):
    def __init__(self, *, tied: bool = False, width: int = 128, blocks: int = 24, words: int = 100) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", norm_first=True, batch_first=True
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


def outputs_of(kind: type[nn.Module]) -> Callable[[nn.Module, Tensor], tuple[list[Tensor], Tensor]]:
    def run(model: nn.Module, example: Tensor) -> tuple[list[Tensor], Tensor]:
        seen: list[Tensor] = []
        parts = [part for part in model.modules() if isinstance(part, kind)]
        handles = [part.register_forward_hook(lambda _, __, output: seen.append(output)) for part in parts]
        result = model(example)
        for handle in handles:
            handle.remove()
        return seen, result

    return run


def cell_states(lstm: nn.LSTM, sequence: Tensor) -> tuple[list[Tensor], Tensor]:
    state, cells = None, []
    for step in sequence:
        output, state = lstm(step.unsqueeze(0), state)
        cells.append(state[1])
    return cells[:-1], output  # the last state and the output come out of one kernel


CASES = {
    **{
        f"{activation.__name__} MLP, {DEPTH} layers": Case(
            lambda activation=activation: mlp(activation), lambda: torch.randn(32, WIDTH), outputs_of(activation)
        )
        for activation in (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)
    },
    f"plain CNN, {DEPTH} layers of 256 channels": Case(
        lambda: cnn(256), lambda: torch.randn(4, 3, 8, 8), outputs_of(nn.ReLU), calibrate=True
    ),
    f"plain CNN, {DEPTH} layers of 64 channels": Case(
        lambda: cnn(64), lambda: torch.randn(4, 3, 8, 8), outputs_of(nn.ReLU), calibrate=True
    ),
    "pre-norm transformer, 24 blocks": Case(
        Transformer, lambda: torch.randint(0, 100, (4, 32)), outputs_of(nn.TransformerEncoderLayer)
    ),
    "the same, embedding tied to head": Case(
        lambda: Transformer(tied=True), lambda: torch.randint(0, 100, (4, 32)), outputs_of(nn.TransformerEncoderLayer)
    ),
    f"LSTM, {DEPTH} steps": Case(lambda: nn.LSTM(64, WIDTH), lambda: torch.randn(DEPTH + 1, 16, 64), cell_states),
}


def by_init_for(model: nn.Module, case: Case) -> None:
    init_for(model, case.example(), calibrate=case.calibrate)


def by_default(model: nn.Module, case: Case) -> None:
    pass


def by_randn(model: nn.Module, case: Case) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter)


INITS = {"init_for": by_init_for, "PyTorch default": by_default, "randn": by_randn}


def scales(case: Case, init: Callable[[nn.Module, Case], None], seed: int) -> tuple[list[float], list[float]]:
    """Give the scale of every layer's output, and of the gradient that reaches it, on data the init has not seen."""
    torch.manual_seed(seed)
    model = case.make()
    init(model, case)
    layers, result = case.layers(model, case.example())
    gradients = torch.autograd.grad((result * torch.randn_like(result)).sum(), layers)
    return [rms(layer) for layer in layers], [rms(gradient) for gradient in gradients]


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def spread(values: list[float]) -> float:
    """Give the largest over the smallest; infinite when something overflowed or vanished altogether."""
    worst = max(values) / min(values) if min(values) > 0.0 else float("inf")
    return worst if worst == worst else float("inf")


def worst_spread(case: Case, init: Callable[[nn.Module, Case], None], seeds: int) -> tuple[float, float]:
    pairs = [tuple(map(spread, scales(case, init, seed))) for seed in range(seeds)]
    return max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)


def rows(seeds: int = 3) -> Iterator[str]:
    yield "| network | " + " | ".join(f"{name}: activations, gradients" for name in INITS) + " |"
    yield "|---|" + "---|" * len(INITS)
    for name, case in CASES.items():
        cells = ["{:.3g}, {:.3g}".format(*worst_spread(case, init, seeds)) for init in INITS.values()]
        yield f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in rows():
        print(row, flush=True)
