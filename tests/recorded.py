"""Facts of runs, small and made by hand after recorded ones: the parts a rule reads, and nothing else."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from surefoot.diagnose.run import RecordedRun
from surefoot.record.facts import Facts, RunFacts

if TYPE_CHECKING:
    from collections.abc import Callable

SITE = "train.py:30"


def optimizer(losses: list[float], number: int = 0, **more: Any) -> dict[str, Any]:
    """One optimizer that stepped once for each loss."""
    steps = list(range(len(losses)))
    series = {"step": steps, "loss": losses, "grad_norm": [1.0] * len(losses), "lr": [0.01] * len(losses)}
    held = {"number": number, "type": "Adam", "site": "train.py:20", "settings": [{"lr": 0.01}], "steps": len(losses)}
    return held | {"created_at_step": 0, "lines": [0], "series": series} | more


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


def facts_of(losses: list[float] | None = None, **facts: Any) -> RunFacts:
    """The facts of a run with one optimizer and one weight, and whatever else is given."""
    losses = falling() if losses is None else losses
    base: dict[str, Any] = {
        "steps": len(losses),
        "optimizers": [optimizer(losses)],
        "parameters": [parameter(0)],
        "sampled_steps": [],
        "events": [],
        "batches": [],
        "loaders": [],
        "evaluations": [],
        "permutations": [],
        "reseeds": {},
        "seeds": {"torch": [0]},
        "stream": {"notes": [], "rows": {}},
    }
    return RunFacts.from_json(completed(RunFacts, base | facts))


def run(losses: list[float] | None = None, **facts: Any) -> RecordedRun:
    """The same, as the rules see it."""
    return RecordedRun(facts_of(losses, **facts))


def run_with_losses(losses: Callable[[int], list[dict[str, Any]]]) -> RecordedRun:
    """A run whose loss does not fall, with the facts of the loss functions that were called at each look."""
    return run([3.7] * 100, sampled_steps=[look(step, notes={"losses": losses(step)}) for step in range(0, 80, 10)])


def class_scores(step: int, index: int, low: float, high: float, sum_error: float, **more: Any) -> dict[str, Any]:
    """The facts of a cross entropy whose scores lie between two numbers."""
    given = {"rows": 64, "classes": 64, "min": low, "max": high, "sum_error": sum_error, "log_sum_error": 4.0}
    base = {"step": step, "op": "cross_entropy", "index": index, "grad": True, "site": SITE, "reduction": "mean"}
    return base | {"distribution": given, "input": described(low, high), "accuracy": 0.9, "value": 3.6} | more


_NEUTRAL: dict[Any, Any] = {int: 0, float: 0.0, str: "", bool: False}


def completed(hint: Any, value: Any) -> Any:
    """JSON with every key that is required, so that a test gives only what its rule reads. A misspelt key fails."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is list and isinstance(value, list):
        return [completed(inside[0], each) for each in value]
    if origin is dict and isinstance(value, dict):
        return {key: completed(inside[1], each) for key, each in value.items()}
    if origin in (Union, types.UnionType):
        return _completed_member(inside, value)
    if not (isinstance(hint, type) and issubclass(hint, Facts) and isinstance(value, dict)):
        return value
    hints, made = get_type_hints(hint), dict(value)
    known = {hint.TAG[0]} if hint.TAG is not None else set()
    for field in dataclasses.fields(hint):
        key = field.metadata.get("key") or field.name
        if field.metadata.get("whole"):
            return value
        known.add(key)
        if field.metadata.get("unwritten"):  # it is taken from around it, whatever a test says
            continue
        if key in made:
            made[key] = completed(hints[field.name], made[key])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            made[key] = _neutral(hints[field.name])
    assert set(made) <= known, f"{hint.__name__} has no {sorted(set(made) - known)}"
    return made


def _completed_member(members: tuple[Any, ...], value: Any) -> Any:
    classes = [each for each in members if isinstance(each, type) and issubclass(each, Facts)]
    if isinstance(value, dict) and classes:
        tagged = [each for each in classes if each.TAG is not None and value.get(each.TAG[0]) == each.TAG[1]]
        return completed((tagged or classes)[0], value)
    others = [each for each in members if get_origin(each) in (list, dict)]
    return completed(others[0], value) if isinstance(value, (list, dict)) and others else value


def _neutral(hint: Any) -> Any:
    if hint in _NEUTRAL:
        return _NEUTRAL[hint]
    if get_origin(hint) is list:
        return []
    if get_origin(hint) is dict:
        return {}
    if isinstance(hint, type) and issubclass(hint, Facts):
        return completed(hint, {})
    return None


def described(low: float, high: float, **more: Any) -> dict[str, Any]:
    """The summary of a tensor whose values lie between two numbers."""
    spread = (high - low) / 4
    base = {"shape": [32, 4], "dtype": "float32", "grad": False, "nonfinite": 0, "min": low, "max": high}
    return base | {"mean": (low + high) / 2, "std": spread} | more
