"""A recorded run as the rules see it: the facts, and the few readings of them that many rules share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def number(value: Any) -> float | None:
    """A number of the facts; the words `nan`, `inf` and `-inf` are numbers too."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Curve:
    """What became of a loss."""

    values: list[float]
    """Finite and non-finite ones, in order."""
    steps: list[int]

    @cached_property
    def finite(self) -> list[float]:
        """The finite ones."""
        return [value for value in self.values if math.isfinite(value)]

    @cached_property
    def first_bad(self) -> int | None:
        """The first step whose loss is not finite."""
        return next((s for s, v in zip(self.steps, self.values, strict=True) if not math.isfinite(v)), None)

    @property
    def count(self) -> int:
        """Number of finite losses."""
        return len(self.finite)

    @cached_property
    def window(self) -> int:
        """How many losses make an end of the curve."""
        return max(1, min(50, self.count // 10))

    @cached_property
    def start(self) -> float:
        """Where it began: the first loss, or the median of the first few in a long run."""
        return median(self.finite[: max(1, min(5, self.count // 20))]) if self.finite else math.nan

    @cached_property
    def end(self) -> float:
        """Where it ended."""
        return median(self.finite[-self.window :]) if self.finite else math.nan

    @cached_property
    def best(self) -> float:
        """The lowest level it held for a while."""
        if not self.finite:
            return math.nan
        size = max(1, self.window // 2)
        return min(median(self.finite[i : i + size]) for i in range(0, max(1, self.count - size + 1), size))

    @cached_property
    def noise(self) -> float:
        """Typical step-to-step movement in the second half."""
        half = self.finite[self.count // 2 :]
        moves = [abs(b - a) for a, b in zip(half, half[1:], strict=False)]
        return median(moves) if moves else 0.0

    @property
    def drop(self) -> float:
        """Which part of the first loss is gone at the end; negative if it rose. Only for losses above zero."""
        return (self.start - self.end) / abs(self.start) if self.finite and self.start else 0.0

    @property
    def best_drop(self) -> float:
        """Which part of the first loss was gone at the best moment."""
        return (self.start - self.best) / abs(self.start) if self.finite and self.start else 0.0

    @property
    def rose(self) -> bool:
        """Whether it ended, or was for long, far above where it began."""
        if self.count < 5:
            return False
        return self.end > self.start + max(0.5 * abs(self.start), 3 * self.noise) and self.end > self.best * 1.2

    @property
    def peak(self) -> float:
        """The highest finite loss."""
        return max(self.finite) if self.finite else math.nan

    @property
    def flat(self) -> bool:
        """Whether it ended about where it began, and never was much lower."""
        if self.count < 8:
            return False
        move = abs(self.start - self.end)
        return move < max(0.05 * abs(self.start), 1.0 * self.noise) and self.best_drop < 0.1

    @property
    def learned(self) -> bool:
        """Whether it clearly fell, and stayed down."""
        if self.count < 5 or self.first_bad is not None:
            return False
        return self.start - self.end > max(0.15 * abs(self.start), 2 * self.noise)


class Run:
    """The facts of one run."""

    def __init__(self, facts: dict[str, Any], run_facts: dict[str, Any], strict: bool = False) -> None:
        self.facts, self.run_facts, self.strict = facts, run_facts, strict
        self.steps = int(facts.get("steps", 0))

    # Optimizers and their numbers

    @cached_property
    def optimizers(self) -> list[dict[str, Any]]:
        """Optimizers that stepped."""
        return [held for held in self.facts.get("optimizers", []) if held["steps"]]

    @cached_property
    def main(self) -> dict[str, Any] | None:
        """The optimizer that stepped most, the last made among equals."""
        return max(self.optimizers, key=lambda held: (held["steps"], held["number"]), default=None)

    def column(self, name: str, optimizer: dict[str, Any] | None = None) -> list[float | None]:
        """One column of an optimizer's series."""
        held = optimizer or self.main
        if held is None:
            return [number(v) for v in self.facts.get("backward_series", {}).get(name, [])]
        return [number(v) for v in held["series"].get(name, [])]

    def curve_of(self, optimizer: dict[str, Any] | None) -> Curve:
        """The loss of one optimizer's steps."""
        series = optimizer["series"] if optimizer is not None else self.facts.get("backward_series", {})
        pairs = [
            (int(step), value)
            for step, raw in zip(series.get("step", []), series.get("loss", []), strict=False)
            if (value := number(raw)) is not None
        ]
        return Curve([value for _, value in pairs], [step for step, _ in pairs])

    @cached_property
    def curve(self) -> Curve:
        """The loss of the run."""
        return self.curve_of(self.main)

    @property
    def adversarial(self) -> bool:
        """Several optimizers take turns, as in a GAN: one loss says little by itself."""
        active = [held for held in self.optimizers if held["steps"] >= max(5, 0.02 * self.steps)]
        overlapping = [h for h in active if h["born_at"] <= 0.5 * self.steps]
        return len(overlapping) > 1

    @cached_property
    def lr(self) -> list[float]:
        """The learning rate of each step."""
        return [value for value in self.column("lr") if value is not None]

    @cached_property
    def grad_norms(self) -> list[float]:
        """Finite gradient norms."""
        return [v for v in self.column("grad_norm") if v is not None and math.isfinite(v)]

    # Looks

    @cached_property
    def looks(self) -> list[dict[str, Any]]:
        """The deep looks, in order."""
        found: list[dict[str, Any]] = self.facts.get("looks", [])
        return found

    def notes(self, kind: str) -> Iterator[dict[str, Any]]:
        """All notes of a kind, with the step they were taken at."""
        for look in self.looks:
            for note in look.get("notes", {}).get(kind, []):
                yield {"step": look["step"], **note}

    def training_losses(self, *names: str) -> list[dict[str, Any]]:
        """Calls of loss functions whose result was trained on."""
        return [n for n in self.notes("losses") if n.get("grad") and (not names or n["op"] in names)]

    def roots(self) -> Iterator[dict[str, Any]]:
        """All calls of backward that were looked at."""
        for look in self.looks:
            yield from look.get("roots", [])

    def passes(self, grad: bool | None = None) -> Iterator[dict[str, Any]]:
        """Model calls that were looked at."""
        for look in self.looks:
            for note in look.get("passes", []):
                if grad is None or note["grad"] == grad:
                    yield note

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Model calls without gradients, between the steps."""
        yield from self.facts.get("evaluations", [])
        for note in self.passes(grad=False):
            if not note["grad_mode"]:
                yield note

    # Parameters

    @cached_property
    def parameters(self) -> dict[int, dict[str, Any]]:
        """Every parameter, by number."""
        return {p["id"]: p for p in self.facts.get("parameters", [])}

    def label(self, parameter: int) -> str:
        """The name of a parameter."""
        return str(self.parameters[parameter]["label"])

    def updates(self, weights_only: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
        """Step and row of every parameter update that was looked at."""
        for look in self.looks:
            for step in look.get("steps", []):
                for row in step["rows"]:
                    if weights_only and len(self.parameters[row["id"]]["shape"]) < 2:
                        continue
                    yield look["step"], row

    def update_ratios(self, before: int | None = None) -> list[float]:
        """Median update-to-weight ratio of the weights at each look."""
        found = []
        for look in self.looks:
            if before is not None and look["step"] >= before:
                continue
            ratios = [
                value
                for step in look.get("steps", [])
                for row in step["rows"]
                if len(self.parameters[row["id"]]["shape"]) >= 2
                and (value := number(row.get("ratio"))) is not None
                and row.get("grad")
            ]
            if ratios:
                found.append(median(ratios))
        return found

    # Events

    def events(self, name: str) -> list[dict[str, Any]]:
        """What happened, by name."""
        return [event for event in self.facts.get("events", []) if event["event"] == name]

    @property
    def crash(self) -> dict[str, Any] | None:
        """What the script died of."""
        return self.facts.get("crash")

    @cached_property
    def bad_value(self) -> dict[str, Any] | None:
        """The autopsy of the first non-finite loss."""
        found = self.events("nonfinite-loss")
        return found[0] if found else self.facts.get("bad_loss")

    @cached_property
    def nonfinite(self) -> bool:
        """Whether a loss or a gradient was ever not finite."""
        return self.curve.first_bad is not None or self.bad_value is not None or bool(self.events("nonfinite-gradient"))

    @property
    def failing(self) -> bool:
        """Whether the run does badly by any account: not finite, risen, or hardly moved."""
        return self.nonfinite or self.curve.rose or not self.curve.learned
