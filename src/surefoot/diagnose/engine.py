"""Derives a ranked list of findings from the facts.

Each rule is data: a code, the kind of evidence it uses, a function that finds it, and the codes it explains. The engine
runs all rules, ranks their claims (a fact about the wiring outranks a value, a value outranks a curve; a cause outranks
its consequences), and determines the verdict. It reads only the facts.

A rule that raises is a defect of surefoot. It does not affect other rules: it is logged, and a run without a finding is
then `unknown`. With `strict`, or with the environment variable `SUREFOOT_STRICT`, it raises; every test runs so.

A run without a finding is `healthy` only if it could be judged; else it is `unknown`, with the reason (`insufficient`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.core.files import read_file
from surefoot.core.formats import FACTS, RUN
from surefoot.core.user_code import LINES_AROUND
from surefoot.diagnose.calibration import calibrated
from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.data_summary import chance
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.diagnose.insufficient import why_unknown, why_unknown_by_steps
from surefoot.diagnose.run import RecordedRun
from surefoot.diagnose.trainer_fixes import trainer_fixes
from surefoot.errors import UsageError
from surefoot.record.facts import STEPS_ONLY, TRAINING, RunDescription, RunFacts
from surefoot.record.rank_file import rank_folders

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from surefoot.diagnose.findings import Outlook
    from surefoot.diagnose.rule import Claim, Rule

log = logging.getLogger("surefoot")
_SINGLE_STEPS = frozenset(
    (
        "data.bad-batch",
        "data.nonfinite-input",
        "loss.no-valid-targets",
        "loss.undefined-op",
        "mask.fully-masked-row",
        "precision.fp16-overflow",
    )
)
"""Causes of non-finite values in single steps. A run is not broken by steps that the guard skipped."""
_SETTINGS = frozenset(
    (
        "clip.saturated",
        "data.unscaled-input",
        "data.unscaled-target",
        "init.symmetric",
        "init.too-large",
        "init.too-small",
        "loss.sum-reduction",
        "lr.no-warmup",
        "lr.schedule-broken",
        "lr.too-high",
        "lr.too-low",
        "model.dead-units",
        "model.saturated-units",
        "model.vanishing-gradient",
        "optim.epsilon",
        "optim.weight-decay",
    )
)
"""Causes that do harm only if the loss ends higher than it could. They are `info` where it ended near its lowest."""
_LITTLE = 0.1
"""The share of what there was to learn up to which a loss ended near its lowest."""
SURE = 0.85
"""The confidence from which on an observed fault explains that a run learned nothing."""
STRICT = "SUREFOOT_STRICT"
"""The environment variable that makes a failing rule raise."""
EVIDENCE_RANK: dict[str, int] = {"crash": 5, "wiring": 4, "value": 3, "dynamics": 2, "curve": 1, "remark": 0}
"""How strong each kind of evidence is."""


class Claims:
    """What the rules claim about a run, and which of them failed."""

    def __init__(self, run: RecordedRun, strict: bool) -> None:
        self._run, self._strict = run, strict or bool(os.environ.get(STRICT))
        self.failed: dict[str, str] = {}
        """The codes of rules that raised, with their exceptions."""

    def of(self, rules: Iterable[Rule]) -> list[tuple[Rule, Claim]]:
        """Run some rules."""
        found: list[tuple[Rule, Claim]] = []
        for rule in rules:
            claim = self._claim(rule)
            if claim is not None and claim.step is None and rule.kind == "crash":
                claim = _of_crash(claim, self._run)
            if claim is not None:
                found.append((rule, claim))
        return found

    def _claim(self, rule: Rule) -> Claim | None:
        try:
            return rule.find(self._run)
        except Exception as error:
            if self._strict:
                raise
            if rule.code not in self.failed:
                log.warning("the rule for %s failed (%s: %s)", rule.code, type(error).__name__, error)
            self.failed[rule.code] = f"{type(error).__name__}: {error}"
            return None


def diagnose(facts: RunFacts, description: RunDescription | None = None, strict: bool = False) -> Diagnosis:
    """Run every rule over the facts of a run and rank the claims; if strict, a rule that fails raises."""
    from surefoot.diagnose.rules import RULES
    from surefoot.diagnose.rules.last_resort import BESIDE_WARNINGS, LAST_RESORT, steps_left_out

    run = RecordedRun(facts, description)
    claims = Claims(run, strict)
    if facts.scope == STEPS_ONLY:
        return _judged_by_steps(run, claims)
    found = claims.of(RULES)
    left_out = steps_left_out(run)
    if all(claim.severity == "info" for _, claim in found):
        found += claims.of(LAST_RESORT)[:1]
        left_out = ""  # the last resort reports this
    elif not any(claim.severity == "error" or _is_sure(rule, claim) for rule, claim in found):
        found += claims.of(BESIDE_WARNINGS)
    diagnosis = Diagnosis(*_judge(run, found), left_out=left_out)
    if diagnosis.serious:
        return diagnosis
    if reason := why_unknown(run, claims.failed):
        return replace(diagnosis, verdict="unknown", reason=reason)
    return replace(diagnosis, reason=f"No fault was found in {run.steps:,} steps{_course(run)}.{_limit(facts)}")


def _course(run: RecordedRun) -> str:
    """What the loss did, if it shows progress."""
    curve = run.curve
    if run.blind or run.adversarial or len(curve.finite) < 2:
        return ""
    went = f"went from {curve.start:.3g} to {curve.end:.3g}"
    if run.trials:
        return f". The loss of the best of {len(run.trials)} trainings {went}"
    return f", in which the loss {went}"


def _limit(facts: RunFacts) -> str:
    """What was not observed although everything works: the inside of compiled models, and what happened before."""
    if facts.scope == TRAINING:
        return " Only the training itself was observed, not what the script did before it."
    eager = sum(each.eager for each in facts.sampled_steps)
    if not facts.compiled:
        return ""
    if not eager:
        return " The model is compiled: the operations inside it were not watched."
    steps = "1 step, which" if eager == 1 else f"{eager} steps, which"
    return f" The model is compiled: the operations inside it were watched at {steps} ran eagerly."


def _judged_by_steps(run: RecordedRun, claims: Claims) -> Diagnosis:
    """The diagnosis of a run of which only the steps are known: what they prove, or else what is missing."""
    from surefoot.diagnose.rules import RULES

    diagnosis = Diagnosis(*_judge(run, claims.of(rule for rule in RULES if rule.from_steps)))
    if diagnosis.serious:
        return diagnosis
    if reason := why_unknown_by_steps(run, claims.failed):
        return replace(diagnosis, verdict="unknown", reason=reason)
    words = f"No fault was found in {run.steps:,} steps. Only the steps were recorded: data and operations were not."
    return replace(diagnosis, reason=words)


def claims_of(facts: RunFacts, codes: Container[str]) -> dict[str, Finding]:
    """The claims of the rules for some causes in part of a run, by code, without consequences of one another."""
    from surefoot.diagnose.rules import RULES

    run = RecordedRun(facts)
    claims = Claims(run, strict=False).of(rule for rule in RULES if rule.code in codes)
    findings = _judge(run, claims)[2]
    return {finding.cause: finding for finding in reversed(findings) if finding.severity != "info"}


def diagnose_folder(folder: str | Path) -> Diagnosis:
    """Diagnose the run that was recorded in a folder. Returns the result of `surefoot diagnose` as an object.

    The ranks of a run are judged together. Raises `UsageError` if it is not the folder of a run.
    """
    return judge_folder(folder)[0]


def judge_folder(folder: str | Path) -> tuple[Diagnosis, RunDescription]:
    """The diagnosis and the description of a recorded run.

    With several ranks, the description is that of the first one, or of one that has not ended.
    """
    from surefoot.diagnose.merged import diagnose_ranks

    ranks = rank_folders(Path(folder))
    if ranks:
        return diagnose_ranks(ranks), _description_of(ranks)
    if _is_unfinished(Path(folder)):
        from surefoot.diagnose.unfinished import judge_unfinished

        description = _description(Path(folder), _json(Path(folder) / "run.json"))
        return judge_unfinished(Path(folder), description), description
    facts, description = load(folder)
    return diagnose(facts, description), description


def _description_of(ranks: list[Path]) -> RunDescription:
    described = [_description(path, _json(path / "run.json")) for path in ranks if (path / "run.json").is_file()]
    return min(described, key=lambda each: each.exit_code is not None, default=RunDescription())


def load(folder: str | Path) -> tuple[RunFacts, RunDescription]:
    """The facts and the description of a run, from its folder; with several ranks, of the first that left facts."""
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"no run folder at {path}: expected what `surefoot run --out DIR` or a stabilizer wrote.")
    ranks = rank_folders(path)
    left = [rank for rank in ranks if (rank / "facts.json").exists()]  # one that was aborted leaves only its log
    logged = [rank for rank in ranks if (rank / "telemetry").is_dir()]
    return load_one(next(iter(left or logged), path))


def load_one(path: Path) -> tuple[RunFacts, RunDescription]:
    """The facts and the description of one process.

    The folder of a stabilizer has no `facts.json`: its facts are read from the run log.
    """
    try:
        if not (path / "facts.json").exists() and (path / "telemetry").is_dir():
            return _load_log(path)
        held = _json(path / "facts.json"), _json(path / "run.json")
        facts = RunFacts.from_json(FACTS.read(held[0], str(path / "facts.json"), unmarked=1))
        return _with_guard(facts, path), _description(path, held[1])
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} has no {Path(error.filename).name}: either it is not a run folder, or the run was killed before "
            "it could write its facts."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}. Run the script again with `surefoot run`.") from None


def _with_guard(facts: RunFacts, path: Path) -> RunFacts:
    """The facts of a training that was observed from inside, completed with those of the guard in its run log."""
    if facts.scope != TRAINING or not (path / "telemetry").is_dir():
        return facts
    from surefoot.record.facts.of_log import with_log
    from surefoot.record.reading import load_run

    return with_log(facts, load_run(path))


def _load_log(path: Path) -> tuple[RunFacts, RunDescription]:
    """The facts in the run log of a stabilizer."""
    if _is_of_run(path):
        raise UsageError(
            f"{path} was not recorded to its end (was the process killed, or is it still running?): there is no "
            f"diagnosis. `surefoot report {path}` shows what was recorded."
        )
    from surefoot.record.facts.of_log import facts_of_log
    from surefoot.record.reading import load_run

    description = _description(path, _json(path / "run.json") if (path / "run.json").exists() else {})
    return facts_of_log(load_run(path), description), description


def _json(path: Path) -> object:
    return json.loads(read_file(path))


def _description(path: Path, value: object) -> RunDescription:
    return RunDescription.from_json(RUN.read(value, str(path / "run.json"), unmarked=1), "run.json")


def _is_of_run(path: Path) -> bool:
    """Whether `surefoot run` wrote the folder: its `run.json` has an exit code from the beginning, perhaps null."""
    try:
        return "exit_code" in json.loads(read_file(path / "run.json"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _is_unfinished(path: Path) -> bool:
    """Whether `surefoot run` wrote the folder, and has not written the end of the run."""
    if not (path / "telemetry").is_dir() or not _is_of_run(path):
        return False
    return json.loads(read_file(path / "run.json"))["exit_code"] is None


def _did_all(run: RecordedRun) -> bool:
    """Whether no setting can have cost much: the loss ended at a small part of the best constant answer's.

    If the script evaluates, its last evaluation has to as well.
    """
    curve, known = run.curve, chance(run)
    level = curve.chance if known is None else known.level  # the latter counts the labels of all batches
    if level is None or run.facts.preflight is not None or curve.blind or curve.continued or not curve.learned:
        return False
    evaluated = run.facts.evaluation_passes[-1:]
    last = max([curve.end, *(math.inf if each.loss is None else each.loss for each in evaluated)])
    return last < _LITTLE * min(curve.start, level)


def _judge(run: RecordedRun, found: list[tuple[Rule, Claim]]) -> tuple[Outlook, int, tuple[Finding, ...]]:
    if _did_all(run):
        found = [(rule, replace(claim, severity="info") if rule.code in _SETTINGS else claim) for rule, claim in found]
    codes = {rule.code for rule, claim in found if claim.severity != "info"}
    explained: dict[str, str] = {}
    for rule, claim in found:
        if claim.severity == "info":
            continue
        for other, claimed in found:
            covered = other.code != rule.code and covers(rule.explains, other.code)
            covered = covered and not (other.dated and _before(claimed, claim))
            if covered and other.code not in explained and explained.get(rule.code) != other.code:
                explained[other.code] = rule.code
    ranked = []
    for rule, claim in found:
        severity, confidence = claim.severity, claim.confidence
        if rule.code in explained and explained[rule.code] in codes:
            severity, confidence = "info", confidence * 0.5
        elif severity == "error" and rule.code in _SINGLE_STEPS and _was_skipped(run, claim):
            severity = "warning"
        rank = (severity != "info", severity == "error", EVIDENCE_RANK[rule.kind], confidence)
        fixes = (*trainer_fixes(run, rule.code), *claim.fixes)
        judged = replace(claim, severity=severity, confidence=confidence, fixes=fixes)
        ranked.append((rank, rule, finding_from(rule.code, judged, run.facts.source_lines)))
    ranked.sort(key=lambda item: item[0], reverse=True)
    findings = tuple(
        finding
        if finding.severity == "info"
        else replace(finding, confidence=calibrated(rule.code, rule.kind, finding.confidence, place == 0))
        for place, (_, rule, finding) in enumerate(ranked)
    )
    worst = {finding.severity for finding in findings}
    verdict: Outlook = "broken" if "error" in worst else "unstable" if "warning" in worst else "healthy"
    return verdict, run.steps, findings


def _was_skipped(run: RecordedRun, claim: Claim) -> bool:
    """Whether the guard skipped the step of a claim and few others, and the script ran on to a finite loss."""
    guard = run.facts.guard
    if guard is None or claim.step is None or claim.step not in (guard.first, guard.last):
        return False
    values = run.curve.values
    ended_well = run.facts.crash is None and bool(values) and math.isfinite(values[-1])
    return ended_well and guard.skipped <= 0.5 * guard.checked


def _of_crash(claim: Claim, run: RecordedRun) -> Claim:
    """The step of a crash, which ends the run. A device reports one later: the call is known from earlier records."""
    crash = run.facts.crash
    if crash is None or crash.step is None:
        return replace(claim, step=run.steps)
    named = " in ".join(f"`{name}`" for name in (crash.indices, crash.table) if name)
    told = f", and was reported at {crash.reported_at}" if crash.reported_at else ""
    return replace(
        claim,
        step=crash.step,
        summary=f"{claim.summary} It failed on the device at step {crash.step}{f' ({named})' if named else ''}{told}.",
        where=(*claim.where, crash.table or ""),
    )


def _before(one: Claim, other: Claim) -> bool:
    return one.step is not None and other.step is not None and one.step < other.step


def covers(patterns: tuple[str, ...], code: str) -> bool:
    """Whether a code is among those that a rule explains."""
    return any(code == p or (p.endswith("*") and code.startswith(p[:-1])) for p in patterns)


def finding_from(code: str, claim: Claim, source_lines: Mapping[str, str]) -> Finding:
    """The finding of a claim, with the lines of the script at its places, and the fixes of its cause after its own."""
    source = _lines_around(claim.where, source_lines)
    return Finding(
        cause=code,
        severity=claim.severity,
        confidence=min(0.99, claim.confidence),
        summary=claim.summary,
        step=claim.step,
        where=tuple(dict.fromkeys(place for place in claim.where if place)),
        evidence={**claim.evidence, "source": source} if source else claim.evidence,
        fixes=_without_repeats((*claim.fixes, *CATALOGUE[code].fixes)),
    )


def _is_sure(rule: Rule, claim: Claim) -> bool:
    """Whether a warning explains that a run learned nothing: a fault that was observed itself, not its effects."""
    return claim.severity == "warning" and rule.kind in ("wiring", "value") and claim.confidence >= SURE


def _without_repeats(fixes: tuple[str, ...]) -> tuple[str, ...]:
    """The fixes without those whose first clause an earlier one has, perhaps with the numbers of this run."""
    found: dict[str, str] = {}
    for fix in fixes:
        clause = re.split(r"[:;.](?:\s|$)", fix, maxsplit=1)[0]
        found.setdefault(re.sub(r"\d[\d,.]*", "", clause), fix)
    return tuple(found.values())


def _lines_around(places: tuple[str, ...], source_lines: Mapping[str, str]) -> dict[str, str]:
    """The recorded lines of the script at the named places and around them, by file and line."""
    found: dict[str, str] = {}
    for place in places:
        file, _, line = place.rpartition(":")
        if place not in source_lines or not line.isdecimal():
            continue
        for number in range(int(line) - LINES_AROUND, int(line) + LINES_AROUND + 1):
            if (key := f"{file}:{number}") in source_lines:
                found[key] = source_lines[key]
    return found
