"""The results of the preflight: one `Check` per question, all of them in an `Examination`.

A check has a status, the number it is based on, the expected value and a fix. `skipped` means that the question
does not apply or could not be answered, and the summary gives the reason; it never means that something is wrong.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, cast

from rich.markup import escape
from rich.table import Table

from surefoot.core.formats import EXAMINATION
from surefoot.core.notebook_html import heading, page, table, text
from surefoot.diagnose.catalogue import CATALOGUE

if TYPE_CHECKING:
    from rich.console import Console

    from surefoot.diagnose.findings import Finding

Status: TypeAlias = Literal["pass", "warn", "fail", "skipped"]

STEPS = {
    1: "shapes, labels, dtypes",
    2: "output and loss agree",
    3: "overfits a tiny batch",
    4: "statistics and wiring",
    5: "learning rate",
    6: "init and norm",
    7: "clipping",
    8: "precision",
    9: "kept graphs",
    10: "bad data",
}
"""The ten steps, ordered so that a fault in one explains faults in later ones."""

_WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "pass", "skipped")
_SHOWN_FIRST: tuple[Status, ...] = ("fail", "warn", "skipped", "pass")
"""The order in a notebook."""
_WIDTH = 72


@dataclass(frozen=True)
class Check:
    """The result of one check of a preflight."""

    step: int
    """The step that the check belongs to, from 1 to 10."""

    name: str
    """A short name, unique within an examination."""

    status: Status
    """`pass`, `warn`, `fail`, or `skipped` if the question does not apply or could not be answered."""

    summary: str
    """One sentence with the result, or the reason why the check was skipped."""

    number: float | None = None
    """The number that the status is based on."""

    expected: str = ""
    """What the number should be."""

    fix: str = ""
    """The first thing to change; empty if there is nothing to change."""

    cause: str | None = None
    """The code of the cause, if the check names one; see `surefoot explain CODE`."""

    def __post_init__(self) -> None:
        if self.cause is not None and self.cause not in CATALOGUE:
            raise ValueError(f"{self.cause!r} is not a code of the catalogue.")


def passed(step: int, name: str, summary: str, number: float | None = None, expected: str = "") -> Check:
    """A check with status `pass`."""
    return Check(step, name, "pass", summary, number, expected)


def skipped(step: int, name: str, why: str) -> Check:
    """A check with status `skipped`."""
    return Check(step, name, "skipped", why)


def warned(
    step: int, name: str, summary: str, number: float | None, expected: str, fix: str, cause: str | None = None
) -> Check:
    """A check with status `warn`: it may cause a problem."""
    return Check(step, name, "warn", summary, number, expected, fix, cause)


def failed(
    step: int, name: str, summary: str, number: float | None, expected: str, fix: str, cause: str | None = None
) -> Check:
    """A check with status `fail`: it will cause a problem."""
    return Check(step, name, "fail", summary, number, expected, fix, cause)


def from_finding(step: int, name: str, finding: Finding, expected: str) -> Check:
    """A check that presents the finding of a rule; its fix is the first one in the catalogue for this cause."""
    status: Status = "fail" if finding.severity == "error" else "warn"
    numbers = [float(value) for value in finding.evidence.values() if isinstance(value, (int, float))]
    number = numbers[0] if numbers else None
    fix = CATALOGUE[finding.cause].fixes[0]
    return Check(step, name, status, finding.summary, number, expected, fix, finding.cause)


class CheckJson(TypedDict):
    """The JSON of a `Check`; its fields are described there."""

    step: int
    name: str
    status: Status
    number: float | str | None
    expected: str
    summary: str
    fix: str
    cause: str | None


class ExaminationJson(TypedDict):
    """The JSON of an `Examination`."""

    schema: int
    status: Status
    """The worst status of all checks."""
    ok: bool
    """Whether nothing failed."""
    seconds: float
    """How long it took."""
    causes: list[str]
    """The codes of the causes, failures first."""
    notes: list[str]
    """Remarks about how the examination was done."""
    checks: list[CheckJson]


@dataclass(frozen=True, repr=False)
class Examination:
    """The results of all checks of a preflight, in the order in which they ran."""

    checks: tuple[Check, ...]

    seconds: float
    """How long it took."""

    notes: tuple[str, ...] = ()
    """Remarks about how the examination was done: batches taken from an iterator, a model unwrapped."""

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings do not count."""
        return all(check.status != "fail" for check in self.checks)

    @property
    def status(self) -> Status:
        """The worst status of all checks."""
        return min((check.status for check in self.checks), key=_WORST_FIRST.index, default="skipped")

    @property
    def causes(self) -> tuple[str, ...]:
        """The codes of the causes: failures first, then in the order of the steps."""
        ranked = sorted(self.checks, key=lambda check: _WORST_FIRST.index(check.status))
        return tuple(dict.fromkeys(check.cause for check in ranked if check.cause is not None))

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"there is no check named {name!r}; there are {', '.join(check.name for check in self.checks)}")

    def counts(self) -> dict[str, int]:
        """How many checks ended in each status."""
        return {status: sum(check.status == status for check in self.checks) for status in _WORST_FIRST}

    @property
    def verdict(self) -> str:
        """One line: the number of checks by status, and the duration."""
        counts = ", ".join(f"{count} {status}" for status, count in self.counts().items() if count)
        return f"{counts} · {self.seconds:.1f} s"

    def to_dict(self) -> ExaminationJson:
        """The examination as plain values for JSON; a non-finite number becomes a string."""
        return {
            "schema": EXAMINATION.version,
            "status": self.status,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "causes": list(self.causes),
            "notes": list(self.notes),
            "checks": [_as_json(check) for check in self.checks],
        }

    def __repr__(self) -> str:
        return f"Examination({self.verdict})"

    def _repr_html_(self) -> str:
        ranked = sorted(self.checks, key=lambda check: _SHOWN_FIRST.index(check.status))
        rows = [(each.status, f"{each.step} {each.name}", each.summary, _advice(each)) for each in ranked]
        return page(
            heading(self.status, self.verdict),
            table(("status", "check", "found", "what to change"), rows),
            *(text(note) for note in self.notes),
        )

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines: list[str] = []
        for check in self.checks:
            words = textwrap.wrap(check.summary, _WIDTH) or [""]
            if check.fix:
                cause = f"{check.cause}: " if check.cause else ""
                words += textwrap.wrap(f"-> {cause}{check.fix}", _WIDTH, subsequent_indent="   ")
            lines.append(f"{check.step:>2}  {check.name:<{width}}  {check.status:<7}  {words[0]}")
            lines += [f"{'':>2}  {'':<{width}}  {'':<7}  {more}" for more in words[1:]]
        return "\n".join([*lines, "", *self.notes, self.verdict])


def _as_json(check: Check) -> CheckJson:
    values = {name: getattr(check, name) for name in CheckJson.__annotations__}
    number = check.number
    if number is not None and not math.isfinite(number):
        values["number"] = str(number)
    return cast("CheckJson", values)


def _advice(check: Check) -> str:
    return f"{check.cause}: {check.fix}" if check.cause and check.fix else check.fix


_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def show(examination: Examination, console: Console) -> None:
    """Print every check below its step, then the notes and a summary line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "status", "number", "result and fix"):
        table.add_column(column, no_wrap=column != "result and fix", overflow="fold")
    last = 0
    for check in examination.checks:
        if check.step != last:
            table.add_row(f"[bold]{check.step} {STEPS[check.step]}[/bold]")
            last = check.step
        table.add_row(f"  {check.name}", f"[{_COLOURS[check.status]}]{check.status}[/]", _number(check), _text(check))
    console.print(table)
    console.print()
    for note in examination.notes:
        console.print(note, markup=False, highlight=False)
    console.print(examination.verdict, highlight=False)
    if examination.causes:
        console.print(f"Details: surefoot explain {examination.causes[0]}", highlight=False)


def _number(check: Check) -> str:
    return "" if check.number is None else f"{check.number:.4g}"


def _text(check: Check) -> str:
    text = escape(check.summary)
    if check.fix:
        cause = f"[bold]{check.cause}[/bold]: " if check.cause else ""
        text += f"\n→ {cause}{escape(check.fix)}"
    return text
