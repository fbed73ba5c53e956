"""Facts of runs, small and made by hand after recorded ones: the parts a rule reads, and nothing else."""

from __future__ import annotations

from typing import Any

from surefoot.diagnose.run import RecordedRun

SITE = "train.py:30"


def optimizer(losses: list[float], number: int = 0, **more: Any) -> dict[str, Any]:
    """One optimizer that stepped once for each loss."""
    steps = list(range(len(losses)))
    series = {"step": steps, "loss": losses, "grad_norm": [1.0] * len(losses), "lr": [0.01] * len(losses)}
    held = {"number": number, "type": "Adam", "site": "train.py:20", "settings": [{"lr": 0.01}], "steps": len(losses)}
    return held | {"born_at": 0, "loaded_at": None, "loaded_age": None, "lines": [0], "series": series} | more


def falling(count: int = 100, start: float = 2.0, end: float = 0.2) -> list[float]:
    """A loss that goes down as it should."""
    return [end + (start - end) * 0.95**i for i in range(count)]


def parameter(number: int, model: str = "model", optimizers: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """One weight."""
    name = f"{model}.{number}.weight"
    held = {"id": number, "label": name, "name": name, "model": model, "shape": [8, 8]}
    return held | {
        "optimizers": list(optimizers),
        "trained_by": list(optimizers),
        "requires_grad": True,
        "loaded": False,
    }


def look(step: int, **parts: Any) -> dict[str, Any]:
    """One look; notes are given as `notes={...}`."""
    return {"step": step, "passes": [], "roots": [], "steps": [], "notes": {}} | parts


def moves(ratio: float = 0.01) -> list[dict[str, Any]]:
    """The updates of a look."""
    return [{"optimizer": 0, "rows": [{"id": 0, "grad": 1.0, "ratio": ratio}]}]


def run(losses: list[float] | None = None, **facts: Any) -> RecordedRun:
    """A run with one optimizer and one weight, and whatever else is given."""
    losses = falling() if losses is None else losses
    base: dict[str, Any] = {
        "steps": len(losses),
        "optimizers": [optimizer(losses)],
        "parameters": [parameter(0)],
        "looks": [],
        "events": [],
        "batches": [],
        "loaders": [],
        "evaluations": [],
        "permutations": [],
        "reseeds": {},
        "seeds": {"torch": [0]},
        "stream": {"notes": [], "rows": {}},
    }
    return RecordedRun(base | facts, {}, strict=True)
