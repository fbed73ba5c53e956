"""A fault factory: operators that plant one known fault in a healthy training script.

An `Operator` changes one place of a script's text and knows the causes that are then true (`source.py` edits the text
by the positions of the syntax tree, `reading.py` finds the loop, the loss and the optimizer in it). `mutants` applies
every operator, at each of its strengths, to every parent. `runs.py` runs parents and mutants and records what the
diagnosis said; `figures.py` decides which mutants do worse than their parent, and counts; `printed.py` prints.

Rules may be tuned on the tuning half only. It has the tuning operators on the tuning scripts of the zoo; the testing
half has the testing operators on the testing scripts. An operator's half follows from a hash of its name. Pairs of a
tuning operator and a testing script, or the other way round, are in neither half.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from surefoot.zoo import HALVES, HEALTHY, Specimen, specimens
from surefoot.zoo.mutation.source import Edit, Script

Proof = Literal["by construction", "if harmful", "harmless"]
"""When a mutant is faulty: always; if it does worse than its parent; never (it tests for false alarms)."""


@dataclass(frozen=True)
class Operator:
    """One kind of change, and what is then true."""

    name: str
    """Such as `drop-zero-grad`."""
    summary: str
    """What it changes."""
    needs: str
    """What a script must have for it, in words."""
    causes: tuple[str, ...]
    """The codes that are true of the mutant, the most exact one first. Any of them counts as right."""
    edits: Callable[[Script, float], Iterable[Edit]]
    """The edits of a script at a strength; none if it has no place for them."""
    proof: Proof = "if harmful"
    strengths: tuple[float, ...] = field(default=())
    """Empty for a change that has no strength; `edits` is then given 0."""
    crashes: bool = False
    """Whether the mutant is meant to end with an error."""
    rescales_loss: bool = False
    """Whether the recorded loss is in other units than the parent's: each is then compared with its own start."""

    @property
    def half(self) -> str:
        """The half it belongs to, by a hash of its name."""
        return HALVES[hashlib.sha256(self.name.encode()).digest()[0] % 2]


@dataclass(frozen=True)
class Mutant:
    """A script with one planted fault; without an operator, the parent itself."""

    parent: Specimen
    operator: Operator | None
    strength: float | None
    text: str

    @property
    def label(self) -> str:
        """`raise-lr@100`, or `healthy` for the parent."""
        if self.operator is None:
            return HEALTHY
        return self.operator.name if self.strength is None else f"{self.operator.name}@{self.strength:g}"

    @property
    def digest(self) -> str:
        """Tells apart texts: a result counts for the text that was run."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


def mutate(parent: Specimen, script: Script, operator: Operator, strength: float | None = None) -> Mutant | None:
    """The mutant of one operator; `None` if the script has no place that it could change."""
    edits = list(dict.fromkeys(operator.edits(script, 0.0 if strength is None else strength)))
    changed = script.edited(edits)
    return Mutant(parent, operator, strength, changed) if changed != script.text else None


def mutants(half: str, operators: Iterable[Operator], parents: Iterable[Specimen]) -> tuple[list[Mutant], list[str]]:
    """The mutants of one half in an order that is always the same, and what had no place for a change.

    The first of each operator and strength, then the second of each, and so on, each with its parents in an arbitrary
    order: the first N are a sample in which all operators have about the same share.
    """
    found: list[Mutant] = []
    without: list[str] = []
    scripts = {parent: Script(parent.path.read_text(encoding="utf-8")) for parent in parents if parent.half == half}
    for operator in operators:
        for parent, script in scripts.items():
            if operator.half != half:
                continue
            made = [mutate(parent, script, operator, strength) for strength in operator.strengths or (None,)]
            found += [mutant for mutant in made if mutant is not None]
            if not any(made):
                without.append(f"{operator.name} on {parent.path.stem}: the script has no {operator.needs}")
    place: Counter[str] = Counter()
    turns = {}
    for mutant in sorted(found, key=_draw):
        turns[mutant] = place[mutant.label]
        place[mutant.label] += 1
    return sorted(turns, key=turns.__getitem__), without


def parent_scripts(half: str) -> list[Specimen]:
    """The healthy scripts of one half of the zoo."""
    return [specimen for specimen in specimens(half) if specimen.truth == HEALTHY]


def _draw(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.label} {mutant.parent.name}".encode()).hexdigest()
