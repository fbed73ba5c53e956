"""`surefoot serve`: the report page, live, with the standard library's server.

There are two addresses, `/` and `/data`; no file is looked up by the path of a request. The server is meant for the
user of this machine, whose browser also runs pages of others, so a request is answered only if

- its `Host` is this server (a name that points to this machine by DNS rebinding is not),
- it does not come from another origin (`Origin`, `Sec-Fetch-Site`), except when the user follows a link to the page,
- it is a GET.

No response may be framed, cached, sniffed or read by another origin.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from surefoot.errors import UsageError
from surefoot.report.page.html import page, policy
from surefoot.report.page.live import LiveRun

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_PORT = 8765
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


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
