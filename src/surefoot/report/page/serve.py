"""`surefoot serve`: the report page, live, with the standard library's server.

There are two addresses, `/` and `/data`; no file is looked up by the path of a request. The server is meant for the
user of this machine, whose browser also runs pages of others, so a request is answered only if

- its `Host` is this server (a name that points to this machine by DNS rebinding is not),
- it does not come from another origin (`Origin`, `Sec-Fetch-Site`), except when the user follows a link to the page,
- it is a GET.

No response may be framed, cached, sniffed or read by another origin.

A page requests what has changed since its last request. Only new rows are read. The sections that depend on them are
built again, and a section whose text has changed gets the next number. A page that has received number 17 is sent the
sections with higher numbers. An empty folder also has a page, which shows that the run has not begun.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from surefoot.errors import UsageError
from surefoot.record.follow import News, RunFollower
from surefoot.record.rank_file import rank_folders
from surefoot.report.page.encode import as_text
from surefoot.report.page.html import page, policy
from surefoot.report.page.payload import sections
from surefoot.report.page.source import RunFolder, describe_rank, merged_findings, read_json

if TYPE_CHECKING:
    import pyarrow as pa

    from surefoot.record.messages import Event
    from surefoot.report.page.sections import RankRow


DEFAULT_PORT = 8765
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


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


class LiveServer(ThreadingHTTPServer):
    """Serves the page of one folder."""

    daemon_threads = True

    def __init__(self, folder: str | Path, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> None:
        self.run = LiveRun(folder)
        self.host = host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            text = error.strerror or str(error)
            way_out = "Set another port with --port; 0 selects a free one."
            raise UsageError(f"cannot serve on {host}, port {port}: {text}. {way_out}") from None

    def server_bind(self) -> None:
        """Bind without a reverse DNS lookup, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page."""
        host = "127.0.0.1" if self.host in ("", "0.0.0.0") else "::1" if self.host == "::" else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        address = _address(str(self.server_address[0]))
        return address is not None and address.is_loopback

    def is_us(self, authority: str) -> bool:
        """Whether a `Host` header, or the host of an `Origin`, is this server."""
        try:
            parts = urlsplit(f"//{authority}")
            name, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            return False
        if parts.username is not None or (80 if port is None else port) != self.port:
            return False
        if name in ("localhost", self.host.lower()):
            return True
        address = _address(name)
        if address is None:
            # If bound to all addresses, the machine's own name is accepted too; no other name is known to be this
            # server.
            return not self.is_loopback and name == socket.gethostname().lower()
        return address.is_loopback or not self.is_loopback  # an IP address cannot be rebound

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection."""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "surefoot", ""
    timeout = 30  # seconds for a request to arrive: a half-open one does not hold a thread indefinitely

    def do_GET(self) -> None:
        refusal = self._refusal()
        if refusal:
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", refusal)
        path, _, query = self.path.partition("?")
        answer: Callable[[str], None] | None = {"/": self._page, "/data": self._data}.get(path)
        if answer is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "Only / and /data exist.")
        try:
            return answer(query)
        except UsageError as error:  # files of a newer version that were written after the server started
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error))

    def _only_get(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "Only GET is supported.", {"Allow": "GET"})

    def __getattr__(self, name: str) -> Any:
        """Give the same response to every other method, such as `do_POST` or `do_PURGE`."""
        if name.startswith("do_"):
            return self._only_get
        raise AttributeError(name)

    def _refusal(self) -> str:
        """Why a request is refused; empty if it is answered."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.is_us(hosts[0]):
            return f"This server is {self.server.url}; the request was for another host."
        origin = self.headers.get("Origin")
        if origin is not None and not (origin.startswith("http://") and self.server.is_us(origin[7:])):
            return "Requests from other origins are refused."
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not self._followed_link():
            return "Requests from other sites are refused."
        return ""

    def _followed_link(self) -> bool:
        """Whether the user followed a link to the page; the linking page cannot read the response."""
        mode, destination = self.headers.get("Sec-Fetch-Mode"), self.headers.get("Sec-Fetch-Dest")
        return self.path == "/" and mode == "navigate" and destination == "document"

    def _page(self, _: str) -> None:
        text = page(self.server.run.page_data(), live=True)
        frames = f"{policy(live=True)}; frame-ancestors 'none'"
        self._send(HTTPStatus.OK, "text/html", text, {"Content-Security-Policy": frames})

    def _data(self, query: str) -> None:
        since = parse_qs(query).get("since", [""])[0]
        self._send(HTTPStatus.OK, "application/json", self.server.run.news(since))

    def _send(self, status: HTTPStatus, kind: str, text: str, extra: dict[str, str] | None = None) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", **(extra or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def serve(folder: str | Path, host: str = "127.0.0.1", port: int = DEFAULT_PORT, show: Any = print) -> None:
    """Serve the page of a run folder until Ctrl-C. The folder may still be empty."""
    with LiveServer(folder, host, port) as server:
        waiting = "" if os.path.isdir(folder) else "; there is no run yet, and the page waits for it"
        show(f"surefoot: serving {folder} at {server.url} (Ctrl-C to stop){waiting}")
        if not server.is_loopback:
            show(f"surefoot: warning: everyone who can reach {host} can read this run; the default is 127.0.0.1.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            show("")
