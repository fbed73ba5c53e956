"""One POST to a secret address: error messages never contain the address.

Nothing raises: the result is `None` or a `PostFailure`, with whether and when to try again. A redirect is followed with
the same message, on the same scheme, host and port only.

The time limit covers the whole request, including redirects: before each operation on the socket, its timeout is set to
the remaining time. A server that sends its answer byte by byte does not extend it. Not covered: the resolver of host
names, which cannot be interrupted, and the answer of a proxy to CONNECT, whose single reads have the limit.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from surefoot.errors import UsageError

MOST_REDIRECTS = 3


@dataclass(frozen=True)
class PostFailure:
    """Why a message was not accepted."""

    words: str
    is_final: bool = False
    """Whether another attempt would be useless."""
    wait_seconds: float = 0.0
    """The time that the server asked to wait."""


class Address:
    """A checked address to post to."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_seconds: float) -> None:
        self._url = _checked(url)
        self.host = urlsplit(self._url).hostname or ""
        self._headers = dict(headers)
        self._timeout_seconds = timeout_seconds
        self._opener = urllib.request.build_opener(_NoRedirects, _TimedHTTPHandler, _TimedHTTPSHandler)

    def post(self, body: bytes) -> PostFailure | None:
        """Send a body; returns `None` if it was accepted, or else what went wrong. Does not raise."""
        url, deadline = self._url, time.monotonic() + self._timeout_seconds
        for _ in range(MOST_REDIRECTS + 1):
            request = urllib.request.Request(url, data=body, headers=self._headers, method="POST")
            try:
                with self._opener.open(request, timeout=_left(deadline)):
                    return None
            except urllib.error.HTTPError as error:
                with error:
                    target = _redirected(url, error)
                    if target is None:
                        return _refusal(error)
                    url = target
            except Exception as error:  # any network error; its text may contain the address, so it is not used
                return PostFailure(_words(error, self._timeout_seconds))
        return PostFailure(f"more than {MOST_REDIRECTS} redirects", is_final=True)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Does not redirect: urllib would follow with a GET that loses the message, and to any host."""

    def redirect_request(self, *args: Any, **settings: Any) -> None:
        return None


def _left(deadline: float) -> float:
    """Seconds until the deadline; raises `TimeoutError` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time limit of the request has passed")
    return left


class _TimedReader(io.RawIOBase):
    """Reads from a socket until the deadline."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = connected, deadline
        self._received = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(_left(self._deadline))
        return self._received.readinto(buffer)

    def close(self) -> None:
        self._received.close()
        super().close()


class _TimedSocket:
    """The part of a socket that `http.client` uses, with one deadline for everything."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = connected, deadline

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(_left(self._deadline))
        self._socket.sendall(data)  # its timeout covers all of the data

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._socket, self._deadline))

    def close(self) -> None:
        self._socket.close()


class _TimedHTTPConnection(http.client.HTTPConnection):
    """A connection whose timeout covers everything: connecting, sending and the answer."""

    def __init__(self, host: str, *, timeout: float = 5.0, **settings: Any) -> None:
        super().__init__(host, timeout=timeout, **settings)
        self.deadline = time.monotonic() + timeout
        self._create_connection = self._connected

    def _connected(self, address: tuple[str, int], _: float, source: Any = None) -> socket.socket:
        """`socket.create_connection`, with the deadline for all addresses of the host together."""
        failed: OSError | None = None
        for *_kind, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            try:
                connected = socket.create_connection((str(place[0]), address[1]), _left(self.deadline), source)
                connected.settimeout(_left(self.deadline))  # for the TLS handshake
                return connected
            except OSError as error:
                failed = error
        raise failed or OSError("the host has no address")

    def connect(self) -> None:
        super().connect()
        self.sock = _TimedSocket(self.sock, self.deadline)


class _TimedHTTPSConnection(_TimedHTTPConnection, http.client.HTTPSConnection):
    """The same over TLS; `http.client.HTTPSConnection.connect` runs before the socket is wrapped."""


class _TimedHTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_TimedHTTPConnection, request)


class _TimedHTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_TimedHTTPSConnection, request, context=self._context)  # type: ignore[attr-defined]


def _checked(url: str) -> str:
    """The checked address; raises a `UsageError` that does not contain it."""
    way_out = "A webhook needs an address like `https://hooks.example.com/services/…`"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises for one that is no number)
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"the webhook's address cannot be read. {way_out}.") from None
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"got an address with the scheme {parts.scheme!r}. {way_out}; http and https only.")
    if not parts.hostname:
        raise UsageError(f"got an address without a host. {way_out}.")
    if parts.username is not None:
        raise UsageError("got an address with a user name in it. Send credentials with `headers=` instead.")
    if not url.isascii() or any(character.isspace() or not character.isprintable() for character in url):
        raise UsageError(f"the webhook's address has blanks or characters that must be percent-encoded. {way_out}.")
    return url


def _redirected(url: str, error: urllib.error.HTTPError) -> str | None:
    """The target of a redirect on the same host and port; `None` otherwise."""
    location = error.headers.get("Location")
    if error.code not in (301, 302, 307, 308) or not location:
        return None
    try:
        target = _checked(urljoin(url, location))
    except (UsageError, ValueError):
        return None
    return target if _origin(urlsplit(target)) == _origin(urlsplit(url)) else None


def _origin(parts: SplitResult) -> tuple[str, str | None, int]:
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _refusal(error: urllib.error.HTTPError) -> PostFailure:
    if 300 <= error.code < 400:
        return PostFailure(f"HTTP {error.code}: a redirect that is not followed", is_final=True)
    again = error.code >= 500 or error.code in (408, 425, 429)
    return PostFailure(f"HTTP {error.code}", not again, wait_seconds(error.headers.get("Retry-After")))


def wait_seconds(retry_after: str | None) -> float:
    """The seconds in `Retry-After`, given as a number or a date; 0 if it cannot be read."""
    if retry_after is None:
        return 0.0
    try:
        if retry_after.strip().isdigit():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _words(error: Exception, timeout_seconds: float) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"no answer within {timeout_seconds:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason if isinstance(reason, Exception) else error).__name__
