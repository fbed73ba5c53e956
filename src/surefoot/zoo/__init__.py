"""Training scripts whose true cause is known, and healthy ones: the scoreboard, the tests and the demo use them.

`tuning/CODE/NAME.py` were looked at while the rules were written, `testing/CODE/NAME.py` were not. The name of the
folder is the truth: a code of the catalogue, or `healthy`. The scripts are as users write them and know nothing of
surefoot.

`ranks/CODE/NAME.py` train on several processes, as under `torchrun`. They are run when they are asked for
(`--half ranks`) and are no part of the other two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import UsageError

HALVES = ("tuning", "testing")
RANKS = "ranks"
"""The scripts that several processes run together."""
HEALTHY = "healthy"
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Specimen:
    """One script and what is true about it."""

    half: str
    truth: str
    path: Path

    @property
    def name(self) -> str:
        """`testing/lr.too-high/char_lstm`."""
        return f"{self.half}/{self.truth}/{self.path.stem}"


def specimens(half: str = "both", only: str = "", root: Path = _HERE) -> list[Specimen]:
    """The scripts of one half or both, or those for several ranks; of these the ones with `only` in their name."""
    found = [
        Specimen(part, path.parent.name, path)
        for part in (*HALVES, RANKS)
        if half == part or (half == "both" and part in HALVES)
        for path in sorted((root / part).glob("*/*.py"))
        if not path.name.startswith("_")
    ]
    return [specimen for specimen in found if only in specimen.name]


def find(name: str, root: Path = _HERE) -> Specimen:
    """The one script that a name, or a part of it, fits."""
    every = [*specimens(root=root), *specimens(RANKS, root=root)]
    wanted = name.removesuffix(".py")
    exact = [held for held in every if wanted in (held.name, held.path.stem)]
    fitting = exact or [held for held in every if wanted in held.name]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UsageError(f"no zoo script is called {name!r}; `surefoot zoo list` shows all {len(every)}.")
    names = ", ".join(held.name for held in fitting[:4])
    rest = f" and {len(fitting) - 4} more" if len(fitting) > 4 else ""
    raise UsageError(f"{name!r} fits {len(fitting)} zoo scripts: {names}{rest}. Give more of the name.")
