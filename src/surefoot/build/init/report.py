"""What `init_for` did to which parameter and why, as data and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class InitRow:
    """What was done to one parameter."""

    name: str
    """Its name in the model; of a tied parameter, the first one."""

    shape: tuple[int, ...]
    """Its shape."""

    recipe: str
    """The recipe, or `left` when the parameter was not written."""

    std: float | None
    """The standard deviation asked for, where the recipe has one."""

    why: str
    """What was seen that led to it."""


@dataclass(frozen=True)
class InitReport:
    """What `init_for` did, or in a dry run would do; prints as a table."""

    rows: tuple[InitRow, ...]
    """One row per parameter, in the model's order."""

    @property
    def written(self) -> tuple[InitRow, ...]:
        """The parameters that got a value."""
        return tuple(row for row in self.rows if row.recipe != "left")

    @property
    def left(self) -> tuple[InitRow, ...]:
        """The parameters that kept theirs."""
        return tuple(row for row in self.rows if row.recipe == "left")

    def __getitem__(self, name: str) -> InitRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"No parameter is called {name!r}; the names are {[row.name for row in self.rows]}.")

    def __str__(self) -> str:
        cells = [
            (row.name, "×".join(map(str, row.shape)), row.recipe, "" if row.std is None else f"{row.std:.4g}", row.why)
            for row in self.rows
        ]
        summary = f"{len(self.written)} parameters initialised, {len(self.left)} left as they were"
        return text_table(("parameter", "shape", "recipe", "std", "why"), cells) + "\n" + summary


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out `rows` under `header`: columns padded to their widest cell, no trailing blanks, one line each."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
