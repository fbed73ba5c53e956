"""The diagnosis as a few lines of text, for the end of a run."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from surefoot.core.wording import count_of

if TYPE_CHECKING:
    from surefoot.diagnose.findings import Diagnosis, Finding

SHOWN = 3
"""The number of findings at the end of a run; `surefoot diagnose` prints all."""


_COLOURS = {"healthy": 32, "unstable": 33, "broken": 31, "error": 31, "warning": 33}
"""The colours of verdicts and severities in a terminal: green, yellow, red."""


def as_text(diagnosis: Diagnosis, folder: str, colour: bool = False) -> str:
    """The verdict, the most important findings, and where the rest is."""
    serious = [finding for finding in diagnosis.findings if finding.severity != "info"]
    steps = count_of(diagnosis.steps, "step")
    lines = ["", f"surefoot: {_painted(diagnosis.verdict, colour)} · {steps} · {folder}"]
    if diagnosis.verdict in ("unknown", "healthy"):
        lines.extend(_wrapped("  ", diagnosis.summary))
    for finding in serious[:SHOWN]:
        lines.extend(_lines(finding, colour))
    if len(serious) > SHOWN:
        lines.append(f"  … and {len(serious) - SHOWN} more: surefoot diagnose {folder}")
    remarks = [finding for finding in diagnosis.findings if finding.severity == "info"]
    if not serious:
        for finding in remarks[:2]:
            lines.extend(_wrapped("  note: ", finding.summary))
    if diagnosis.verdict == "healthy":
        lines.append("  If the result is still poor: surefoot explain healthy")
    return "\n".join(lines)


def as_full_text(diagnosis: Diagnosis, folder: str = "", colour: bool = False) -> str:
    """The verdict and every finding, with its evidence and all its fixes."""
    steps = count_of(diagnosis.steps, "step")
    lines = [" · ".join(filter(None, (_painted(diagnosis.verdict, colour), steps, folder)))]
    if diagnosis.verdict in ("unknown", "healthy"):
        lines.extend(_wrapped("  ", diagnosis.summary))
    elif diagnosis.left_out:
        lines.extend(_wrapped("  ", diagnosis.left_out))
    for finding in diagnosis.findings:
        lines.append("")
        lines.extend(_head(finding, colour))
        evidence = {  # the source is shown below the place
            key: value for key, value in finding.evidence.items() if key != "source" and value not in (None, "")
        }
        if evidence:
            shown = "; ".join(f"{key.replace('_', ' ')} {_shown(value)}" for key, value in evidence.items())
            lines.extend(_wrapped("    Evidence: ", shown))
        for number, fix in enumerate(finding.fixes, 1):
            lines.extend(_wrapped(f"    Fix {number}: ", fix))
    return "\n".join(lines)


def printable(text: str) -> str:
    """Untrusted text without terminal control characters."""
    return "".join(each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in text)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(_shown(item) for item in value[:12])
        return f"{shown}, … ({len(value)} in total)" if len(value) > 12 else shown
    if isinstance(value, dict):
        return "; ".join(f"{key} {_shown(item)}" for key, item in list(value.items())[:12])
    return str(value)


def _painted(word: str, colour: bool) -> str:
    return f"\x1b[1;{_COLOURS[word]}m{word}\x1b[0m" if colour and word in _COLOURS else word


def _lines(finding: Finding, colour: bool) -> list[str]:
    return [*_head(finding, colour), *(_wrapped("    Fix: ", finding.fixes[0]) if finding.fixes else [])]


def _head(finding: Finding, colour: bool) -> list[str]:
    cause = f"\x1b[1m{finding.cause}\x1b[0m" if colour else finding.cause
    lines = [f"  {_painted(finding.severity, colour)} · {cause} · {finding.confidence:.2f}"]
    lines.extend(_wrapped("    ", finding.summary))
    at = [] if finding.step is None else [f"step {finding.step:,}"]
    shown = [*at, *finding.where[:4]]
    if shown:
        lines.extend(_wrapped("    At: ", ", ".join(shown)))
    return [*lines, *_source(finding)]


def _source(finding: Finding) -> list[str]:
    """The lines of the script that the finding names, each on one line of the terminal."""
    source = finding.evidence.get("source")
    if not isinstance(source, dict):
        return []
    named = [place for place in finding.where[:4] if place in source]
    lines = [f"      {place.rpartition(':')[2]} | {printable(str(source[place]).strip())}" for place in named]
    return [line if len(line) <= _width() else f"{line[: _width() - 1]}…" for line in lines]


def _width() -> int:
    return min(120, max(60, shutil.get_terminal_size((100, 24)).columns))


def _wrapped(start: str, words: str) -> list[str]:
    """Lines of readable length that fit the terminal."""
    return textwrap.wrap(
        printable(words.replace("\t", " ")),
        _width(),
        initial_indent=start,
        subsequent_indent="    " if start.strip() else start,
        break_long_words=False,
        break_on_hyphens=False,
    )
