"""From facts to a ranked list of findings.

Each rule is data: a code, the kind of evidence it rests on, a function that finds it, and the codes it explains. The
engine runs them all, ranks what they claim (a fact about the wiring outranks a value, a value outranks a curve; a cause
outranks its consequences), and gives the verdict. It reads nothing but the facts.

A run without a finding is `healthy` only if it could be judged; else it is `unknown`, with the reason (`unjudged`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surefoot.core.files import read_file
from surefoot.core.formats import FACTS, RUN
from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.findings import Diagnosis, Finding, Severity
from surefoot.diagnose.insufficient import why_unknown
from surefoot.diagnose.run import RecordedRun
from surefoot.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Kind = Literal["crash", "wiring", "value", "dynamics", "curve", "remark"]
_RANK: dict[str, int] = {"crash": 5, "wiring": 4, "value": 3, "dynamics": 2, "curve": 1, "remark": 0}


@dataclass(frozen=True)
class Claim:
    """What a rule found."""

    confidence: float
    summary: str
    step: int | None = None
    where: tuple[str, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)
    severity: Severity = "error"
    fixes: tuple[str, ...] = ()
    """What to do here in particular; the catalogue's fixes follow."""


@dataclass(frozen=True)
class Rule:
    """How one cause is recognised."""

    code: str
    kind: Kind
    find: Callable[[RecordedRun], Claim | None]
    """Looks for what the cause requires; `None` if something is missing or speaks against it."""
    explains: tuple[str, ...] = ()
    """Causes that are mere consequences of this one, if both are claimed. A trailing `*` covers a family."""
    dated: bool = False
    """The claim's step is when it happened, not when it was noticed: nothing that came later explains it."""


def diagnose(facts: dict[str, Any], run_facts: dict[str, Any] | None = None, strict: bool = False) -> Diagnosis:
    """Run every rule over the facts of a run and rank what they claim; if strict, a rule that fails is not forgiven."""
    from surefoot.diagnose.rules import RULES
    from surefoot.diagnose.rules.last_resort import LAST_RESORT, steps_left_out

    run = RecordedRun(facts, run_facts or {}, strict)
    found = _claims(run, RULES)
    left_out = steps_left_out(run)
    if all(claim.severity == "info" for _, claim in found):
        found += _claims(run, LAST_RESORT)[:1]
        left_out = ""  # that is what the last resort says
    diagnosis = Diagnosis(*_judge(run, found), left_out=left_out)
    if diagnosis.serious:
        return diagnosis
    if reason := why_unknown(run):
        return replace(diagnosis, verdict="unknown", reason=reason)
    limit = " The model is compiled: the operations inside it were not watched." if facts.get("compiled") else ""
    return replace(diagnosis, reason=f"No fault was found in {run.steps:,} steps.{limit}")


def diagnose_folder(folder: str | Path) -> Diagnosis:
    """Diagnose the run that was recorded in a folder: what `surefoot diagnose` prints, as an object.

    Raises `UsageError` for what is not the folder of a run.
    """
    return diagnose(*load(folder))


def _claims(run: RecordedRun, rules: Iterable[Rule]) -> list[tuple[Rule, Claim]]:
    found: list[tuple[Rule, Claim]] = []
    for rule in rules:
        try:
            claim = rule.find(run)
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError):
            if run.strict:
                raise
            continue  # facts that a rule cannot read are no reason to lose the others
        if claim is not None and claim.step is None and rule.kind == "crash":
            claim = replace(claim, step=run.steps)  # a crash ends the run: that is its step
        if claim is not None:
            found.append((rule, claim))
    return found


def load(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts and the description of a run, from its folder."""
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"no run folder at {path}: expected what `surefoot run --out DIR` wrote.")
    inner = path / "rank0"
    if not (path / "facts.json").exists() and (inner / "facts.json").exists():
        path = inner
    try:
        facts = json.loads(read_file(path / "facts.json"))
        run_facts = json.loads(read_file(path / "run.json"))
    except FileNotFoundError as error:
        if (path / "telemetry").is_dir():
            why = "is the run log of a stabilizer, which records no facts to judge a script by"
            if "exit_code" in _described(path):  # from the beginning, but only by `surefoot run`
                why = "was not recorded to its end (was the process killed, or is it still running?)"
            raise UsageError(
                f"{path} {why}: there is no diagnosis. `surefoot report {path}` shows what was recorded."
            ) from None
        raise UsageError(
            f"{path} has no {Path(error.filename).name}: either it is not a run folder, or the run was killed before "
            "it could write its facts."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}. Run the script again with `surefoot run`.") from None
    if not isinstance(facts, dict) or not isinstance(run_facts, dict):
        raise UsageError(f"{path} is damaged: facts.json and run.json must hold objects.")
    facts = FACTS.read(facts, str(path / "facts.json"), unmarked=1)
    return facts, RUN.read(run_facts, str(path / "run.json"), unmarked=1)


def _described(path: Path) -> dict[str, Any]:
    """What `run.json` says; nothing if it cannot be read."""
    try:
        found = json.loads(read_file(path / "run.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _judge(run: RecordedRun, found: list[tuple[Rule, Claim]]) -> tuple[Any, int, tuple[Finding, ...]]:
    codes = {rule.code for rule, claim in found if claim.severity != "info"}
    explained: dict[str, str] = {}
    for rule, claim in found:
        if claim.severity == "info":
            continue
        for other, claimed in found:
            covered = other.code != rule.code and _covers(rule.explains, other.code)
            covered = covered and not (other.dated and _before(claimed, claim))
            if covered and other.code not in explained and explained.get(rule.code) != other.code:
                explained[other.code] = rule.code
    ranked = []
    for rule, claim in found:
        severity, confidence = claim.severity, claim.confidence
        if rule.code in explained and explained[rule.code] in codes:
            severity, confidence = "info", confidence * 0.5
        rank = (severity != "info", severity == "error", _RANK[rule.kind], confidence)
        ranked.append((rank, _finding(rule.code, replace(claim, severity=severity, confidence=confidence))))
    ranked.sort(key=lambda item: item[0], reverse=True)
    findings = tuple(finding for _, finding in ranked)
    worst = {finding.severity for finding in findings}
    verdict = "broken" if "error" in worst else "unstable" if "warning" in worst else "healthy"
    return verdict, run.steps, findings


def _before(one: Claim, other: Claim) -> bool:
    return one.step is not None and other.step is not None and one.step < other.step


def _covers(patterns: tuple[str, ...], code: str) -> bool:
    return any(code == p or (p.endswith("*") and code.startswith(p[:-1])) for p in patterns)


def _finding(code: str, claim: Claim) -> Finding:
    return Finding(
        cause=code,
        severity=claim.severity,
        confidence=min(0.99, claim.confidence),
        summary=claim.summary,
        step=claim.step,
        where=tuple(dict.fromkeys(place for place in claim.where if place)),
        evidence=claim.evidence,
        fixes=(*claim.fixes, *CATALOGUE[code].fixes),
    )
