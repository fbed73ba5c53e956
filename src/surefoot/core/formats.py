"""Every format that surefoot writes, with its version, in one table.

Each format contains its version as a number, in the file or dictionary. The policy is the same for all:

- The current version is read directly.
- An older version is converted by its migrations, functions from version n to n + 1, applied in turn.
- Every other number is refused with one error that contains the version found, the versions that can be read, and the
  solution. A newer version is never guessed.

To change a format: raise its version, add the migration from the version before, and add golden files of the new
version (`tests/goldens/README.md`). The files of earlier versions stay there and must still be readable.

Formats that only other programs read have no migration; their version shows that something changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import UsageError

Migration = Callable[[Any], Any]
"""Converts a dictionary of version n to version n + 1; `Format.migrate` sets the number itself."""


@dataclass(frozen=True)
class Format:
    """One versioned format."""

    name: str
    version: int
    """The version that is written now."""
    place: str
    """The file, or the call that returns it."""
    written_by: str
    read_by: str
    """Empty if only other programs read it."""
    key: str = "schema"
    """The key of the version."""
    migrations: Mapping[int, Migration] = field(default_factory=dict)
    """The migrations, by the version that each converts."""

    @property
    def oldest(self) -> int:
        """The oldest version that can be converted."""
        first = self.version
        while first - 1 in self.migrations:
            first -= 1
        return first

    @property
    def readable(self) -> str:
        """The versions that can be read, as text."""
        return str(self.version) if self.oldest == self.version else f"{self.oldest} to {self.version}"

    def problem(self, found: Any) -> str:
        """The reason why the version `found` cannot be read, in one or two sentences; empty if it can."""
        known = type(found) is int  # not a bool
        if known and self.oldest <= found <= self.version:
            return ""
        if known and found > self.version:
            way_out = "It was written by a newer version of surefoot: use that version or a later one"
        elif known and found > 0:
            way_out = "It was written by an older version of surefoot: use that version"
        else:
            way_out = "This is not a version number: the file is damaged, or surefoot did not write it"
        return f"is of {self.key} {found!r:.20}; this surefoot reads {self.key} {self.readable}. {way_out}"

    def check(self, found: Any, what: str, error: type[Exception] = UsageError) -> None:
        """Raise `error`, which names `what`, unless the version `found` can be read."""
        if problem := self.problem(found):
            raise error(f"{what} {problem}.")

    def migrate(self, value: Any, found: int) -> Any:
        """The value, converted from the version `found`, which can be read."""
        for version in range(found, self.version):
            value = self.migrations[version](value)
            if isinstance(value, Mapping):  # a checkpoint has its number in another file
                value = {**value, self.key: version + 1}
        return value

    def read(self, value: Any, what: str, error: type[Exception] = UsageError, unmarked: int | None = None) -> Any:
        """A dictionary of this format, converted to the current version. Raises `error` if its version cannot be read.

        Args:
            value: the value that was read; only a dictionary has a version.
            what: its name in the error, such as the path of the file.
            error: the class of the error.
            unmarked: the version of a dictionary without one; `None` refuses it.
        """
        found: Any = value.get(self.key, unmarked) if isinstance(value, Mapping) else None
        self.check(found, what, error)
        return self.migrate(value, found)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A dictionary with other keys, in the same order. Any other value is returned unchanged."""
    return {names.get(key, key): each for key, each in value.items()} if isinstance(value, Mapping) else value


def _within(value: Any, key: str, change: Migration) -> Any:
    """A dictionary with one entry changed, if it exists; a list is changed entry by entry."""
    if not isinstance(value, Mapping) or key not in value:
        return value
    entry = value[key]
    return {**value, key: [change(each) for each in entry] if isinstance(entry, list) else change(entry)}


def _added(value: Any, key: str, entry: Any, *, after: str) -> Any:
    """A dictionary with one more entry, after the one of another key."""
    if not isinstance(value, Mapping):
        return value
    parts = [[(name, each)] + ([(key, entry)] if name == after else []) for name, each in value.items()]
    return dict(pair for part in parts for pair in part)


def _rename_parts_of_stabilizer(state: Any) -> Any:
    """Version 4 names its parts by what they are."""
    state = _renamed(state, {"judge": "policy", "aftermath": "results"})
    history = {"unrest": "instability"}
    return _within(
        state,
        "results",
        lambda results: _within(
            _renamed(results, {"ledger": "history"}), "history", lambda each: _renamed(each, history)
        ),
    )


def _add_lost_progress(state: Any) -> Any:
    """Version 5 has a rule that compares mean losses, and counts its results; both start again."""

    def policy(each: Any) -> Any:
        each = _within(each, "settings", lambda parts: _added(parts, "lost_progress", "None", after="setback"))
        return _added(each, "lost_progress", [], after="setback")

    def history(each: Any) -> Any:
        return _within(
            each,
            "recovery",
            lambda packed: {**packed, "means": 0, "by_means": False} if isinstance(packed, Mapping) else packed,
        )

    state = _within(state, "policy", policy)
    return _within(state, "results", lambda results: _within(results, "history", history))


def _count_confirming_steps(state: Any) -> Any:
    """Version 6 stores how many healthy steps confirm a return, and not only what caused it."""

    def recovery(packed: Any) -> Any:
        if not isinstance(packed, Mapping):
            return packed
        return {key: each for key, each in packed.items() if key != "by_means"} | {
            "between": 0,
            "confirm": 12 if packed.get("by_means") else 1,
        }

    def results(each: Any) -> Any:
        return _within(each, "history", lambda history: _within(history, "recovery", recovery))

    return _within(state, "results", results)


def _count_tests(state: Any) -> Any:
    """Version 7 counts the repeats that only show whether a problem recurs, and stores `accumulate`."""

    def results(each: Any) -> Any:
        added = {"tests": 0, "is_test": False}
        return _within(each, "history", lambda history: _within(history, "repeat", lambda repeat: {**repeat, **added}))

    state = _within(state, "window", lambda window: {**window, "accumulate": None})
    return _within(state, "results", results)


def _store_recent_norms(state: Any) -> Any:
    """Version 8 stores the last gradient norms, which messages compare a refused one with."""

    def results(each: Any) -> Any:
        return _within(each, "history", lambda history: {**history, "recent_norms": []})

    return _within(state, "results", results)


def _store_rates(state: Any) -> Any:
    """Version 9 stores the learning rates so far, which a raised one is compared with; they start again."""
    rates = {"seen": 0, "highest": 0.0, "last": 0.0, "raised_at": -1, "usual": 0.0, "limit": 0.0}

    def results(each: Any) -> Any:
        return _within(each, "history", lambda history: _added(history, "rates", rates, after="recovery"))

    return _within(state, "results", results)


def _rename_facts(facts: Any) -> Any:
    """Version 2 has the names that the fields have in the code, in place of metaphors."""
    optimizer = {
        "born_at": "created_at_step",
        "loaded_at": "state_loaded_at_step",
        "loaded_age": "loaded_state_steps",
    }
    facts = _renamed(facts, {"looks": "sampled_steps"})
    facts = _within(facts, "parameters", lambda each: _renamed(each, {"looked": "sampled"}))
    facts = _within(facts, "optimizers", lambda each: _renamed(each, optimizer))
    return _within(facts, "guarded", lambda each: _renamed(each, {"left_out": "skipped"}))


CHECKPOINT = Format(
    "checkpoint",
    2,
    "`checkpoints/step-*/manifest.json`",
    "`CheckpointManager`",
    "`CheckpointManager.load`, `stabilizer.resume` and `restore`, `surefoot checkpoints` and `replay`",
    # Version 2 stores which part of the whole tensor a shard is. Shards of version 1 go back to their own ranks.
    migrations={1: lambda contents: contents},
)
STABILIZER_STATE = Format(
    "stabilizer state",
    9,  # 1 and 2 were never released
    "`stabilizer.state_dict()`, also in every checkpoint",
    "`TrainingStabilizer`",
    "`stabilizer.load_state_dict`, `resume` and `restore`",
    migrations={
        3: _rename_parts_of_stabilizer,
        4: _add_lost_progress,
        5: _count_confirming_steps,
        6: _count_tests,
        7: _store_recent_norms,
        8: _store_rates,
    },
)
DATA_POSITION = Format(
    "data position",
    1,
    "in every checkpoint",
    "`stabilizer.resume(loader)`",
    "`stabilizer.resume` and `restore`",
)
RUN_LOG = Format(
    "run log",
    1,
    "`telemetry/session-*.jsonl`, for the tables and `events.jsonl`",
    "`RunLog`, `surefoot run`",
    "`load_run`, `surefoot report`, `watch` and `serve`",
)
RUN = Format(
    "run description",
    1,
    "`run.json`",
    "`surefoot run`, `TrainingStabilizer(log=...)`",
    "`load_run`, `surefoot diagnose`, `report` and `serve`",
)
FACTS = Format(
    "facts",
    2,
    "`facts.json`",
    "`surefoot run`",
    "`surefoot diagnose`, `report` and `serve`",
    migrations={1: _rename_facts},
)
FINDINGS = Format(
    "findings",
    1,
    "`findings.json`, `surefoot diagnose --json`",
    "`surefoot run`, `surefoot bisect`",
    "`load_run`, `surefoot report`, `watch` and `serve`",
)
RANK = Format(
    "rank",
    1,
    "`rank*/rank.jsonl`",
    "`surefoot run` with several ranks",
    "`surefoot diagnose`, `report` and `watch`",
)
HEARTBEAT = Format(
    "heartbeat",
    1,
    "`rank*/alive.json`, `ended.json`",
    "`surefoot run` and `TrainingStabilizer(log=...)` with several ranks",
    "the other ranks, `surefoot diagnose` and `report`",
)
HANG = Format(
    "hang",
    1,
    "`hang.json`",
    "`surefoot run` and `TrainingStabilizer(log=...)` with several ranks",
    "the other ranks, `surefoot diagnose` and `report`",
)
INCIDENT = Format(
    "incident",
    1,
    "`incidents/*/incident.json`",
    "`IncidentKeeper`, `surefoot run`",
    "`surefoot replay`",
)
EXPERIMENTS = Format(
    "experiments", 1, "`bisect.json`, `surefoot bisect --json`", "`surefoot bisect`", "`surefoot report` and `serve`"
)
STANDARDIZER = Format(
    "standardizer", 1, "the file of `Standardizer.save`", "`Standardizer.save`", "`Standardizer.load`", key="version"
)
EXAMINATION = Format("examination", 1, "`surefoot doctor --json`", "`surefoot doctor`", "")
REPLAY = Format("replay", 1, "`surefoot replay --json`", "`surefoot replay`", "")
SCORES = Format("scores", 1, "`surefoot zoo score --json FILE`", "`surefoot zoo score`", "")
MUTANTS = Format(
    "mutant runs", 1, "`surefoot zoo mutate --json FILE`, every line", "`surefoot zoo mutate`", "`surefoot zoo mutate`"
)

FORMATS: tuple[Format, ...] = (
    *(CHECKPOINT, STABILIZER_STATE, DATA_POSITION, RUN_LOG, RUN, FACTS, FINDINGS, RANK, HEARTBEAT, HANG),
    *(INCIDENT, EXPERIMENTS, STANDARDIZER, EXAMINATION, REPLAY, SCORES, MUTANTS),
)
"""All formats. `docs/formats.md` shows this table."""
