"""Data of the live page: what has changed since the page's last request.

Only new rows are read. The sections that depend on them are built again, and a section whose text has changed gets the
next number. A page that has received number 17 is sent the sections with higher numbers. An empty folder also has a
page, which shows that the run has not begun.
"""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.record.follow import News, RunFollower
from surefoot.record.rank_file import rank_folders
from surefoot.report.page.encode import as_text
from surefoot.report.page.payload import sections
from surefoot.report.page.source import RunFolder, describe_rank, merged_findings, read_json

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.record.messages import Event
    from surefoot.report.page.sections import RankRow

_TABLES = ("scalars", "layers", "histograms", "device")
_SETTLE_SECONDS = 0.5
"""Several pages that ask within this time share one reading of the folder."""
_MOST_ROWS = 8_000_000
"""Rows held in memory before the folder, in which older rows are thinned, is read again from the start."""


class LiveRun:
    """One run folder, read whenever a page asks. Thread-safe."""

    def __init__(self, folder: str | Path) -> None:
        self.top = Path(folder)
        self._lock = threading.Lock()
        self._boot = secrets.token_hex(4)  # numbers of another server are not comparable
        self._number = 0
        self._texts: dict[str, tuple[int, str]] = {}
        self._looked = -_SETTLE_SECONDS
        self._forget(self.top)

    def _forget(self, folder: Path) -> None:
        self.folder = folder
        self._follower = RunFollower(folder)
        self._tables: dict[str, pa.Table] = {}
        self._events: list[Event] = []
        self._stamps: dict[str, int] = {}
        self._run: dict[str, Any] = {}
        self._findings: dict[str, Any] | None = None
        self._merged: dict[str, Any] | None = None

    def page_data(self) -> dict[str, object]:
        """All sections, for the page itself."""
        import json

        with self._lock:
            self._look()
            return {name: json.loads(text) for name, (_, text) in self._texts.items()} | {"cursor": self._cursor()}

    def news(self, since: str) -> str:
        """JSON: the sections that changed after the cursor a page was given, and the next cursor."""
        with self._lock:
            self._look()
            boot, _, number = since.partition("-")
            seen = int(number) if boot == self._boot and number.isdecimal() else -1
            changed = [f'"{name}":{text}' for name, (at, text) in self._texts.items() if at > seen]
            return f'{{"cursor":"{self._cursor()}","sections":{{{",".join(changed)}}}}}'

    def _cursor(self) -> str:
        return f"{self._boot}-{self._number}"

    def _look(self) -> None:
        """Update the sections."""
        if time.monotonic() - self._looked < _SETTLE_SECONDS:
            return
        ranks = rank_folders(self.top)
        folder = ranks[0] if ranks else self.top
        if folder != self.folder:
            self._forget(folder)
        changed = self._read()
        if ranks and self._rank_findings_touched(ranks):
            self._merged = merged_findings(ranks)
            changed |= {"findings"}
        if changed or not self._texts:
            source = self._source(tuple(describe_rank(rank) for rank in ranks))
            self._number += 1
            for name, value in sections(source, changed if self._texts else None).items():
                text = as_text(value)
                if text != self._texts.get(name, (0, ""))[1]:
                    self._texts[name] = (self._number, text)
        self._looked = time.monotonic()

    def _read(self) -> set[str]:
        """Read what is new; returns the fields of the source that changed."""
        changed = {field for field in ("run", "findings") if self._touched(f"{field}.json")}
        if "run" in changed:
            self._run = read_json(self.folder / "run.json") or {}
        if "findings" in changed:
            self._findings = read_json(self.folder / "findings.json")
        if sum(table.num_rows for table in self._tables.values()) > _MOST_ROWS:
            self._follower = RunFollower(self.folder)
        return changed | self._take(self._follower.poll())

    def _take(self, news: News) -> set[str]:
        import pyarrow as pa

        changed = set()
        if news.restarted:
            self._events, self._tables = [], {}
            changed = {*_TABLES, "events"}
        for name in _TABLES:
            table = getattr(news, name)
            if name not in self._tables:
                self._tables[name] = table
            elif table.num_rows:
                self._tables[name] = pa.concat_tables([self._tables[name], table], promote_options="default")
            changed |= {name} if table.num_rows else set()
        if news.events:
            self._events = [*self._events, *news.events]
            changed.add("events")
        return changed

    def _touched(self, name: str, path: Path | None = None) -> bool:
        """Whether a file has changed since the last reading."""
        try:
            stamp = (path or self.folder / name).stat().st_mtime_ns
        except OSError:
            stamp = 0
        before, self._stamps[name] = self._stamps.get(name, 0), stamp
        return stamp != before

    def _rank_findings_touched(self, ranks: list[Path]) -> bool:
        """Whether a rank has written its diagnosis since the last reading."""
        touched = [self._touched(f"findings.json of {rank.name}", rank / "findings.json") for rank in ranks]
        return any(touched)

    def _source(self, ranks: tuple[RankRow, ...]) -> RunFolder:
        dropped = sum(count for event in self._events if isinstance(count := event.evidence.get("dropped", 0), int))
        findings = self._merged if ranks and self._merged is not None else self._findings
        return RunFolder(self.folder, self._run, self._events, findings, **self._tables, dropped=dropped, ranks=ranks)
