"""A recorded run as the rules see it: the facts, and the few readings of them that many rules share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FEWEST_LOSSES = 5
"""With fewer finite losses no rule can judge a curve."""


def number(value: Any) -> float | None:
    """A number of the facts; the words `nan`, `inf` and `-inf` are numbers too."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def weighs_by_reward(note: dict[str, Any]) -> bool:
    """Whether a product is a log-probability times something of both signs: an advantage, never a target."""
    other = note["other"]
    mixed = other.get("min", 0.0) < 0 < other.get("max", 0.0)
    logs = {"log_prob", "log_softmax", "logsumexp"} & set(note["history"])
    return not note["other_binary"] and ("log_prob" in note["history"] or (mixed and bool(logs)))


def _with_numbers(value: Any) -> Any:
    """JSON has no NaN: the words that stand for it become numbers again."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else value
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return value


def _entropy(losses: list[dict[str, Any]]) -> float | None:
    """Entropy of all labels seen, in nats."""
    counts: dict[str, int] = {}
    for note in losses:
        if not note.get("labels"):
            return None
        for label, count in note["labels"].items():
            counts[label] = counts.get(label, 0) + count
    total = sum(counts.values())
    if len(losses) < 3 or total < 64:
        return None
    return -sum(c / total * math.log(c / total) for c in counts.values() if c)


@dataclass(frozen=True)
class LossCurve:
    """What became of a loss."""

    values: list[float]
    """Finite and non-finite ones, in order."""
    steps: list[int]
    continued: bool = False
    """The parameters had been trained or loaded before: it need not fall any more."""
    blind: bool = False
    """Its level says nothing about progress, as in policy gradients and bootstrapped targets."""
    chance: float | None = None
    """The loss of the best constant answer, where it is known."""

    @cached_property
    def finite(self) -> list[float]:
        """The finite ones."""
        return [value for value in self.values if math.isfinite(value)]

    @cached_property
    def first_bad(self) -> int | None:
        """The first step whose loss is not finite."""
        return next((s for s, v in zip(self.steps, self.values, strict=True) if not math.isfinite(v)), None)

    @cached_property
    def before_bad(self) -> LossCurve:
        """The part before the first step whose loss is not finite: what became of the loss until then."""
        if self.first_bad is None:
            return self
        until = self.steps.index(self.first_bad)
        return LossCurve(self.values[:until], self.steps[:until], self.continued, self.blind, self.chance)

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
        if not self.finite:
            return math.nan
        # A blow-up in the first few steps must not pass for the beginning.
        return min(self.finite[0], median(self.finite[: max(1, min(5, self.count // 20))]))

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
        moves = [abs(b - a) for a, b in pairwise(half)]
        return median(moves) if moves else 0.0

    @cached_property
    def around_zero(self) -> bool:
        """Whether it hovers about zero within its own noise: then its level says nothing."""
        return self.count > 20 and max(abs(self.start), abs(self.end)) < 2 * self.noise and min(self.finite) < 0

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
        if self.count < FEWEST_LOSSES or self.blind or self.around_zero:
            return False
        above = self.end > self.start + max(0.5 * abs(self.start), 3 * self.noise)
        # Never lower than at the end: either the first loss was a fluke, or it was thrown up and never came back.
        thrown = self.blew_up and self.end > 5 * self.start > 0
        return above and (self.end > self.best * 1.2 or thrown)

    @property
    def peak(self) -> float:
        """The highest finite loss."""
        return max(self.finite) if self.finite else math.nan

    @property
    def blew_up(self) -> bool:
        """Whether it was ever far beyond where it began, even if it came back."""
        return self.count >= FEWEST_LOSSES and not self.blind and self.peak > 20 * abs(self.start) + 20 * self.noise

    @property
    def flat(self) -> bool:
        """Whether it ended about where it began, and never was much lower."""
        if self.count < 8 or self.blind or self.continued:
            return False
        move = abs(self.start - self.end)
        return move < max(0.05 * abs(self.start), 1.0 * self.noise) and self.best_drop < 0.1

    @property
    def learned(self) -> bool:
        """Whether it clearly fell, and stayed down."""
        if self.first_bad is not None:
            return False
        if self.blind or self.around_zero or (self.continued and not self.rose):
            return True
        if self.count < FEWEST_LOSSES or (self.chance is not None and self.end > 0.97 * self.chance + 1e-6):
            return False
        return self.start - self.end > max(0.15 * abs(self.start), 2 * self.noise)

    @property
    def fell_through_noise(self) -> bool:
        """Whether the end lies below the beginning by more than the middle of so many noisy losses can err."""
        if self.rose or (self.chance is not None and self.end > 0.97 * self.chance):
            return False
        return self.start - self.end > max(0.15 * abs(self.start), 3 * self.noise / math.sqrt(self.window))


class RecordedRun:
    """The facts of one run."""

    def __init__(self, facts: dict[str, Any], run_facts: dict[str, Any], strict: bool = False) -> None:
        self.facts, self.run_facts, self.strict = _with_numbers(facts), run_facts, strict
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

    def curve_of(self, optimizer: dict[str, Any] | None) -> LossCurve:
        """The loss of one optimizer's steps."""
        series = optimizer["series"] if optimizer is not None else self.facts.get("backward_series", {})
        pairs = [
            (int(step), value)
            for step, raw in zip(series.get("step", []), series.get("loss", []), strict=False)
            if (value := number(raw)) is not None
        ]
        sign = -1.0 if optimizer is not None and optimizer["settings"][0].get("maximize") else 1.0
        return LossCurve(
            [sign * value for _, value in pairs],
            [step for step, _ in pairs],
            continued=optimizer is not None and self._continues(optimizer),
            blind=self.blind,
            chance=self.chance,
        )

    @cached_property
    def curve(self) -> LossCurve:
        """The loss of the run."""
        return self.curve_of(self.main)

    def _continues(self, optimizer: dict[str, Any]) -> bool:
        mine = [p for p in self.parameters.values() if optimizer["number"] in p["optimizers"] and p["requires_grad"]]
        before = [p for p in mine if p["loaded"] or any(n < optimizer["number"] for n in p["trained_by"])]
        return optimizer["born_at"] > 0 and len(before) > 0.5 * len(mine) > 0

    @cached_property
    def blind(self) -> bool:
        """Whether the loss says nothing about progress: rewards weigh it, or its targets come from a model."""
        if self.facts.get("policy"):
            return True
        losses = self.training_losses()
        if losses and sum(bool(n.get("target_from_model")) for n in losses) > 0.5 * len(losses):
            return True
        return any(weighs_by_reward(n) for n in self.notes("products"))

    @cached_property
    def chance(self) -> float | None:
        """The loss of the best constant answer, if the run minimises one plain loss function."""
        names = {(root.get("sign") or {}).get("function") for root in self.roots()}
        factors = {root.get("factor") for root in self.roots()}
        if len(names) != 1 or names == {None} or factors != {1.0}:
            return None
        losses = self.training_losses(*(name for name in names if name))
        if not losses or any(n["reduction"] != "mean" or n.get("weighted") or n.get("smoothing") for n in losses):
            return None
        if losses[0]["op"] in ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"):
            return _entropy(losses)
        if losses[0]["op"] == "mse_loss":
            spreads = [n["target_variance"] for n in losses if n.get("target_variance") is not None]
            return median(spreads) if len(spreads) >= 3 else None
        return None

    @property
    def adversarial(self) -> bool:
        """Several optimizers take turns, as in a GAN: one loss says little by itself. Phases do not."""
        active = [held for held in self.optimizers if held["steps"] >= max(5, 0.02 * self.steps)]
        spans = [self._span(held) for held in active if held["born_at"] <= 0.5 * self.steps]
        pairs = [(a, b) for i, a in enumerate(spans) for b in spans[:i]]
        return any(min(a[1], b[1]) - max(a[0], b[0]) > 0.1 * min(a[1] - a[0], b[1] - b[0]) for a, b in pairs)

    def _span(self, optimizer: dict[str, Any]) -> tuple[float, float]:
        """The first and the last step of the run at which an optimizer stepped."""
        when = [value for value in self.column("at", optimizer) if value is not None]
        return (when[0], when[-1]) if when else (optimizer["born_at"], optimizer["born_at"] + optimizer["steps"])

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
                and math.isfinite(value)
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
        found: dict[str, Any] | None = self.facts.get("crash")
        return found

    @property
    def died_of_nonfinite(self) -> bool:
        """Whether the call that raised had been given something non-finite, as BCE refuses a NaN."""
        return bool(((self.crash or {}).get("arguments") or {}).get("input", {}).get("nonfinite"))

    @cached_property
    def bad_value(self) -> dict[str, Any] | None:
        """The autopsy of the first non-finite loss."""
        found = self.events("nonfinite-loss")
        last: dict[str, Any] | None = self.facts.get("bad_loss")
        return found[0] if found else last

    @cached_property
    def nonfinite(self) -> bool:
        """Whether a loss or a gradient was ever not finite."""
        seen = self.curve.first_bad is not None or self.bad_value is not None or self.died_of_nonfinite
        return seen or bool(self.events("nonfinite-gradient"))

    @cached_property
    def first_nonfinite(self) -> int | None:
        """The first step at which a loss or a gradient was seen not to be finite."""
        steps = [self.curve.first_bad, *(event["step"] for event in self.events("nonfinite-gradient"))]
        return min((step for step in steps if step is not None), default=None)

    @property
    def failing(self) -> bool:
        """Whether the run does badly by any account: not finite, risen, or hardly moved."""
        return self.nonfinite or self.curve.rose or not self.curve.learned
