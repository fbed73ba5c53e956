"""Finds the measured claims of a documentation page, and what the page does not say about each of them.

A claim is a figure with a unit, a ratio, a percentage or a count ("12 of 15") in prose, or a decimal number that fills
a cell of a table. These are not claims: code, numbers in backticks, the first column of a table, conditions ("if a step
takes 30 seconds"), and limits and intervals ("at least 30 seconds", "every 5 s") unless a verb says that they are a
result ("takes less than 1%").

A claim needs a script that prints it, a date and a machine. They are in its own block (a paragraph, an item of a list,
a table), in an earlier block of the same section, or in the paragraph after a table; the machine may be in the
introduction of the page. A link from the block to a section that has all three is enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_WORDS = "two|three|four|five|six|seven|eight|nine|ten"
_UNIT = r"(?:ms|µs|s|[KMG]i?B|kB|bytes|hours?|minutes?|seconds?|milliseconds?|microseconds?)"
_FIGURE = re.compile(
    rf"(?<![\w.@#-]){_NUMBER} ?(?:%|×|(?<!\b0 )x(?= )|times\b(?! too)|{_UNIT}\b)"
    rf"|(?:×|\bx|\bfactors? of) {_NUMBER}"
    rf"|\b(?:{_NUMBER}|one|none|{_WORDS}) of (?:the |these |its |all )?(?:{_NUMBER}|(?:{_WORDS})\b(?!-))"
    rf"|\b(?:1|one) in {_NUMBER}"
    rf"|\b{_NUMBER} (?:kills|mutants|seeds|false alarms?|cases)\b"
    r"|\b[Ii]n \d[\d,]*,\d{3} (?:recorded )?steps\b"
    r"|\b(?:a|half a|hundred) (?:milli|micro)seconds?\b"
)
_SETTING = re.compile(
    r"(?:(?:more|less|fewer|further|longer|larger|smaller|higher|lower) than|at least|at most|up to|above|below|under"
    r"|over|within|every|each|after|for|exceeds?|beyond|until|default|from|first|last|by|limit:|target:|limited to"
    r"|`\s?\()\s?(?:about |the |a |another |all )*$",
    re.IGNORECASE,
)
_CONDITION = re.compile(r"\b(?:if|when|while|should)\b", re.IGNORECASE)
_RESULT = re.compile(r"\b(?:takes?|took|costs?|adds?|needs|was|were|had|gave|right|true)\b[^,]*$", re.IGNORECASE)
_SETTING_COLUMNS = {"default", "limit", "strengths"}
_SCRIPT = re.compile(
    r"\b((?:benchmarks|examples|tests)/[\w/]+(?:\.py)?)\b|`[^`]*\bsurefoot\s+(zoo\s+(?:score|mutate))\b"
)
_DATE = re.compile(r"\b20\d\d-[01]\d-[0-3]\d\b")
_MACHINE = re.compile(
    r"\bH200\b|\b(?:two|one|\d+)(?: of \d+)?[\s-](?:busy |idle |slow )?(?:CPU\s)?cores?\b", re.IGNORECASE
)
_LINK = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")


@dataclass(frozen=True)
class Claim:
    """A figure, the sentence or the row that has it, and what the page does not say about it."""

    figure: str
    sentence: str
    lacks: tuple[str, ...]


def claims(page: Path) -> list[Claim]:
    """All measured claims of a page, those that lack nothing included."""
    found = []
    introduction, *rest = _sections(page.read_text())
    for section in (introduction, *rest):
        blocks = _blocks(section)
        for i, block in enumerate(blocks):
            after = blocks[i + 1 : i + 2] if block.startswith("|") else []
            lacks = _missing("\n".join([*blocks[: i + 1], *after]), introduction)
            if lacks and any(_is_sourced(page, *link) for link in _LINK.findall(block)):
                lacks = ()
            found += [Claim(figure, sentence, lacks) for figure, sentence in _figures(block)]
    return found


def _sections(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.split(r"^(?=#)", text, flags=re.M)[1:]


def _blocks(section: str) -> list[str]:
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", section)]
    return [block for block in blocks if block.strip() and not block.startswith(("    ", "#", "!["))]


def _figures(block: str) -> list[tuple[str, str]]:
    """Every figure of a block that is a claim, with its sentence or its row."""
    if block.startswith("|"):
        header, _, *rows = (row.strip("|").split("|") for row in block.splitlines())
        return [(figure, "|".join(row)) for row in rows for figure in _figures_of_row(header, row)]
    sentences = re.split(r"(?<=[.;:])\s+", re.sub(r"\s+", " ", block))
    return [(figure, sentence) for sentence in sentences for figure in _figures_of(sentence)]


def _figures_of_row(header: list[str], row: list[str]) -> list[str]:
    """Those of all cells but the first, which is a name. A cell of plain decimals is a result."""
    named = [(title.strip(), cell.strip()) for title, cell in zip(header, row, strict=False)][1:]
    decimals = re.compile(r"(?:\**[\d,]+\.\d+(?:e[+-]?\d+)?\**(?: \(\S+\))?(?:, |$))+")
    numbers = [cell for title, cell in named if title not in _SETTING_COLUMNS and decimals.fullmatch(cell)]
    return [*numbers, *(figure for title, cell in named for figure in _figures_of(f"{title}: {cell}"))]


def _figures_of(sentence: str) -> list[str]:
    plain = re.sub(r"`[^`]*`", "`", sentence).replace("*", "")
    return [match[0] for match in _FIGURE.finditer(plain) if not _is_setting(plain[: match.start()], plain)]


def _is_setting(before: str, sentence: str) -> bool:
    if _CONDITION.search(before) or " should " in sentence:
        return True
    return bool(_SETTING.search(before)) and not _RESULT.search(before)


def _missing(text: str, introduction: str) -> tuple[str, ...]:
    scripts = [path or command for path, command in _SCRIPT.findall(text)]
    lacks = [f"{script} does not exist" for script in scripts if "/" in script and not (ROOT / script).exists()]
    if not scripts:
        lacks.append("no script")
    if not _DATE.search(text):
        lacks.append("no date")
    if not _MACHINE.search(text + introduction):
        lacks.append("no machine")
    return tuple(lacks)


def _is_sourced(page: Path, target: str, anchor: str) -> bool:
    path = (page.parent / target) if target else page
    for section in _sections(path.read_text()) if path.suffix == ".md" and path.is_file() else ():
        title = section.splitlines()[0].lstrip("# ").lower()
        if re.sub(r"[^\w -]", "", title).strip().replace(" ", "-") == anchor:
            return not _missing(section, _sections(path.read_text())[0])
    return False
