"""One diagnosis for a run of several ranks.

Each rank has its own diagnosis, and a comparison of the ranks shows what no rank can show alone (`rank_rules`). The
merged diagnosis has each cause once, as stated by the rank that had it first. A problem of one rank reaches the others
through the averaged gradients at most one step later. So if only some ranks have a cause, it is compared with the first
one by its step: a cause at the same step or later on other ranks is a consequence, with severity info.

With many ranks the findings are read as each rank wrote them; with a few, or if there are none, the facts are judged
again. Only findings are kept of a rank.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from surefoot.core.files import read_file
from surefoot.core.formats import FINDINGS
from surefoot.diagnose.engine import EVIDENCE_RANK, covers, diagnose, finding_from, load_one
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.diagnose.rank_comparison import RankComparison
from surefoot.diagnose.rank_hangs import hang_claims
from surefoot.diagnose.rank_rules import rank_claims
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from surefoot.diagnose.findings import Outlook

JUDGED_AGAIN = 8
"""Up to this many ranks, the facts are judged again, as for a single process."""
_LESS_CERTAIN = 0.2
"""A rank whose confidence in a cause is that much lower has it from another one."""
_LEFT_BEHIND = "dist.collective-failed"
"""The causes with which other ranks end when one of them has ended."""


@dataclass(frozen=True)
class RankDiagnosis:
    """The diagnosis of one rank."""

    rank: int
    diagnosis: Diagnosis


@dataclass(frozen=True)
class _Located:
    """A finding, and the ranks that have it."""

    finding: Finding
    ranks: tuple[int, ...]
    """The first one had it first."""
    kind: int
    """The rank of its kind of evidence."""


def diagnose_ranks(folders: Sequence[Path]) -> Diagnosis:
    """The diagnosis of a run whose ranks wrote these folders, in the order of their numbers."""
    comparison = RankComparison(folders)
    judged = [_diagnosis_of(folder, len(folders) <= JUDGED_AGAIN) for folder in folders]
    found = [each for each in judged if each is not None]
    hangs = hang_claims(folders, {each.rank: each.diagnosis for each in found}, _kinds())
    if not found and not hangs:
        raise UsageError(f"{folders[0].parent} holds {len(folders)} ranks, and none of them has been recorded yet.")
    claims = [*hangs, *rank_claims(comparison)]
    return merge(found, claims, comparison.world_size, _source_lines(folders) if claims else {})


def merge(
    ranks: Sequence[RankDiagnosis],
    claims: Sequence[Any],
    count: int,
    source_lines: Mapping[str, str] = MappingProxyType({}),
) -> Diagnosis:
    """One diagnosis from those of the ranks, and from the claims of their comparison."""
    located = _with_consequences(_by_cause(ranks), ranks)
    explained = {code for rule, claim in claims if claim.severity != "info" for code in rule.explains}
    located = [_as_remark(each) if each.finding.cause in explained else each for each in located]
    compared = _compared(claims, source_lines)
    serious = {finding.cause for finding in compared if finding.severity != "info"}
    if serious & _BREAKS_RANKS:  # then the findings of single ranks are about models that do not belong together
        located = [_as_remark(each) if each.kind <= EVIDENCE_RANK["dynamics"] else each for each in located]
    every = [*compared, *(each.finding for each in located)]
    findings = tuple(sorted(every, key=lambda each: (each.severity == "info", each.severity != "error")))
    worst = {finding.severity for finding in findings}
    verdict: Outlook = "broken" if "error" in worst else "unstable" if "warning" in worst else "healthy"
    # The facts of a rank that was killed may be older than its last report of where it is.
    steps = max([0, *(each.diagnosis.steps for each in ranks), *(claim.step or 0 for _, claim in claims)])
    merged = Diagnosis(verdict, steps, findings)
    if merged.serious:
        return merged
    unknown = next((each for each in ranks if each.diagnosis.verdict == "unknown"), None)
    if unknown is not None:
        return replace(merged, verdict="unknown", reason=f"Rank {unknown.rank}: {unknown.diagnosis.reason}")
    if len(ranks) < count:
        return replace(merged, verdict="unknown", reason=f"Only {len(ranks)} of {count} ranks have been recorded.")
    return replace(merged, reason=f"No fault was found in {steps:,} steps on each of {count} ranks.")


_BREAKS_RANKS = {"dist.gradients-not-averaged", "dist.replicas-diverged", "dist.scale-disagrees"}


def _diagnosis_of(folder: Path, again: bool) -> RankDiagnosis | None:
    rank = int(folder.name.removeprefix("rank"))
    written = None if again and (folder / "facts.json").is_file() else _written(folder)
    if written is not None:
        return RankDiagnosis(rank, written)
    try:
        facts, description = load_one(folder)
    except UsageError:
        return None
    return RankDiagnosis(rank, diagnose(facts, description))


def _source_lines(folders: Sequence[Path]) -> Mapping[str, str]:
    """The recorded lines of the script, from the first rank that has any: all ranks run the same one."""
    for folder in folders:
        with suppress(UsageError):
            if lines := load_one(folder)[0].source_lines:
                return lines
    return {}


def _written(folder: Path) -> Diagnosis | None:
    """The diagnosis that a rank wrote, if it ended normally."""
    try:
        held = FINDINGS.read(json.loads(read_file(folder / "findings.json")), str(folder), ValueError, unmarked=1)
        findings = tuple(map(finding_of, held["findings"]))
        return Diagnosis(held["verdict"], int(held["steps"]), findings, reason=str(held.get("summary", "")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def finding_of(value: Mapping[str, Any]) -> Finding:
    """A finding from its JSON form. Raises `KeyError` without cause, severity or summary."""
    return Finding(
        cause=value["cause"],
        severity=value["severity"],
        confidence=value.get("confidence") or 0.0,
        summary=value["summary"],
        step=value.get("step"),
        where=tuple(value.get("where") or ()),
        evidence=value.get("evidence") or {},
        fixes=tuple(value.get("fixes") or ()),
    )


def _by_cause(ranks: Sequence[RankDiagnosis]) -> list[_Located]:
    """Every cause once, as stated by the rank that had it first; at the same step, by the one that is most certain."""
    held: dict[str, list[tuple[float, float, int, Finding]]] = {}
    for each in ranks:
        for finding in each.diagnosis.findings:
            at = math.inf if finding.step is None else float(finding.step)
            held.setdefault(finding.cause, []).append((at, -finding.confidence, each.rank, finding))
    kinds = _kinds()
    located = []
    for cause, found in held.items():
        serious = [item for item in found if item[3].severity != "info"] or found
        *_, first, finding = min(serious, key=lambda item: item[:3])
        kind = kinds.get(cause, 0)
        # Gradients are averaged: the others have the NaN of one rank in the same step, and know less about it.
        is_seen = finding.step is not None and kind > EVIDENCE_RANK["dynamics"]
        others = sorted(
            rank
            for _, _, rank, other in serious
            if rank != first and not (is_seen and finding.confidence - other.confidence > _LESS_CERTAIN)
        )
        located.append(_Located(finding, (first, *others), kind))
    return sorted(
        located, key=lambda each: (each.finding.severity == "error", each.kind, each.finding.confidence), reverse=True
    )


def _with_consequences(located: list[_Located], ranks: Sequence[RankDiagnosis]) -> list[_Located]:
    """The causes, with those that another rank's cause explains as info; each names its ranks."""
    every = {each.rank for each in ranks}
    partial = [each for each in located if each.finding.severity != "info" and set(each.ranks) != every]
    first = _first_of(partial)
    named = []
    for each in located:
        if first is not None and each is not first and each in partial and _follows(each, first):
            each = _as_remark(each, first)
        elif set(each.ranks) != every and len(every) > 1:
            each = replace(each, finding=_on_ranks(each.finding, each.ranks, len(every)))
        named.append(each)
    return named


def _first_of(partial: list[_Located]) -> _Located | None:
    """The cause of the others: the first, or one of the same step that explains it.

    A NaN that begins on one rank reaches the averaged gradients of all ranks in the same step.
    """
    first = min(partial, key=_order, default=None)
    if first is None:
        return None
    together = [each for each in partial if each.finding.step == first.finding.step]
    explaining = _explained()
    return next(
        (each for each in together if covers(explaining.get(each.finding.cause, ()), first.finding.cause)), first
    )


def _order(each: _Located) -> tuple[bool, float, int, int]:
    """The order of causes: the end of a rank because of another one comes last, then by step, then by evidence."""
    step = math.inf if each.finding.step is None else float(each.finding.step)
    return each.finding.cause == _LEFT_BEHIND, step, -each.kind, each.ranks[0]


def _follows(each: _Located, first: _Located) -> bool:
    """Whether a cause on other ranks is the consequence of the first one."""
    if set(each.ranks) & set(first.ranks) and each.finding.cause != _LEFT_BEHIND:
        return False  # findings of the same rank were ranked by its own diagnosis
    if each.finding.cause == _LEFT_BEHIND:
        return True
    step = each.finding.step
    return step is None or first.finding.step is None or step >= first.finding.step


def _as_remark(each: _Located, of: _Located | None = None) -> _Located:
    finding = each.finding
    if finding.severity == "info":
        return each
    words = (
        finding.summary if of is None else f"{finding.summary} This followed {of.finding.cause} on rank {of.ranks[0]}."
    )
    evidence = {**finding.evidence, "rank": each.ranks[0]}
    changed = replace(finding, severity="info", confidence=finding.confidence * 0.5, summary=words, evidence=evidence)
    return replace(each, finding=changed)


def _on_ranks(finding: Finding, ranks: tuple[int, ...], count: int) -> Finding:
    """A finding that not all ranks have, with the rank that had it first."""
    where = (f"rank {ranks[0]}", *(place for place in finding.where if place != f"rank {ranks[0]}"))
    evidence = {**finding.evidence, "rank": ranks[0], "ranks": list(ranks[:64])}
    said = f"On rank {ranks[0]}" if len(ranks) == 1 else f"On {len(ranks)} of {count} ranks, first on rank {ranks[0]}"
    return replace(finding, summary=f"{said}: {finding.summary}", where=where, evidence=evidence)


def _compared(claims: Sequence[Any], source_lines: Mapping[str, str]) -> list[Finding]:
    """Findings from the claims of a comparison; a cause that another one explains is an info."""
    explained = {code for rule, claim in claims if claim.severity != "info" for code in rule.explains}
    found = [finding_from(rule.code, claim, source_lines) for rule, claim in claims]
    return [
        replace(each, severity="info", confidence=each.confidence * 0.5) if each.cause in explained else each
        for each in found
    ]


def _explained() -> dict[str, tuple[str, ...]]:
    """The causes that each cause explains."""
    from surefoot.diagnose.rules import RULES

    return {rule.code: rule.explains for rule in RULES}


def _kinds() -> dict[str, int]:
    """The strength of the evidence of each cause."""
    from surefoot.diagnose.rules import RULES

    return {rule.code: EVIDENCE_RANK[rule.kind] for rule in reversed(RULES)}
