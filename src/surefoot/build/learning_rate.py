"""Where to start with the learning rate, by optimizer and task.

The table is what published recipes use, not a measurement of this model: a range to start in, and `find_lr` or a short
sweep inside it to settle. Rates for SGD are for a batch of 256 and scale in proportion to it (Goyal et al. 2017,
arXiv:1706.02677); for Adam-like optimizers scale with the square root of the batch, if at all.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from torch.optim import Optimizer

Task = Literal["vision", "language", "fine-tuning", "tabular", "rnn", "gan", "rl"]


@dataclass(frozen=True)
class LRSuggestion:
    """A range to start in."""

    low: float
    """Below this rate, training is slow."""

    start: float
    """The first value to try."""

    high: float
    """Above this rate, training may be unstable."""

    source: str
    """The recipe the numbers come from."""

    def __str__(self) -> str:
        return f"start at {self.start:g} (from {self.low:g} to {self.high:g}): {self.source}"


_TABLE: dict[tuple[str, Task], LRSuggestion] = {
    ("sgd", "vision"): LRSuggestion(0.01, 0.1, 0.5, "ResNet on ImageNet, momentum 0.9, batch 256 (arXiv:1706.02677)"),
    ("sgd", "language"): LRSuggestion(1.0, 20.0, 30.0, "LSTM, plain SGD, clipped: AWD-LSTM uses 30 (arXiv:1708.02182)"),
    ("sgd", "fine-tuning"): LRSuggestion(1e-4, 3e-3, 0.03, "BiT transfer, momentum 0.9 (arXiv:1912.11370)"),
    ("sgd", "tabular"): LRSuggestion(1e-4, 1e-3, 0.1, "scikit-learn's MLP, momentum 0.9, standardised inputs"),
    ("sgd", "rnn"): LRSuggestion(1.0, 20.0, 30.0, "LSTM, plain SGD, norm clipped at 0.25 (arXiv:1708.02182)"),
    ("adam", "vision"): LRSuggestion(3e-4, 1e-3, 3e-3, "ViT with AdamW, batch 4096, warm-up (arXiv:2010.11929)"),
    ("adam", "language"): LRSuggestion(6e-5, 3e-4, 6e-4, "GPT-3: 6e-4 at 125M down to 6e-5 at 175B (arXiv:2005.14165)"),
    ("adam", "fine-tuning"): LRSuggestion(1e-5, 3e-5, 1e-4, "BERT: 2e-5 to 5e-5, warm-up (arXiv:1810.04805)"),
    ("adam", "tabular"): LRSuggestion(1e-5, 1e-3, 1e-2, "the sweep for tabular networks of arXiv:2106.11959"),
    ("adam", "rnn"): LRSuggestion(3e-4, 1e-3, 3e-3, "Adam's own default (arXiv:1412.6980), gradient norm clipped"),
    ("adam", "gan"): LRSuggestion(1e-5, 2e-4, 4e-4, "DCGAN: 2e-4 with beta1 0.5 (arXiv:1511.06434)"),
    ("adam", "rl"): LRSuggestion(3e-5, 3e-4, 1e-3, "PPO on continuous control, 3e-4 (arXiv:1707.06347)"),
}
_FAMILY = {
    "sgd": "sgd",
    "adam": "adam",
    "adamw": "adam",
    "nadam": "adam",
    "radam": "adam",
    "adamax": "adam",
}


def suggest_lr(optimizer: Optimizer | type[Optimizer] | str, task: Task) -> LRSuggestion:
    """Give the documented starting range for an optimizer (an instance, a class or a name) on a kind of task."""
    if isinstance(optimizer, str):
        name = optimizer
    else:
        name = (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__
    if task not in get_args(Task):
        raise ValueError(f"`task` must be one of {', '.join(get_args(Task))}; got {task!r}.")
    family = _FAMILY.get(name.lower())
    if family is None:
        raise ValueError(
            f"No documented range for {name!r}; known are {', '.join(_FAMILY)}. Use `find_lr` to measure one."
        )
    try:
        return _TABLE[family, task]
    except KeyError:
        raise ValueError(f"No documented range for {name} on {task!r}: such recipes use Adam. Pass 'adam'.") from None
