"""Alerts: a message to a webhook when something of a chosen severity happens.

The body is JSON with a `text` that Slack and compatible services (Mattermost, Discord's `/slack` address) show as it
is, and the same as fields for anything else. The first alert goes out at once; further ones are held back until
`every_seconds` have passed, then sent together, with how many they were. What is still held back at the end of the run
is sent then.

A server that is slow, down, answers 5xx or asks to wait (429 with `Retry-After`) is tried again a few times with longer
pauses each time, without sleeping: the next batch or tick of the run log makes the next try. An alert that cannot be
delivered is given up and counted, and the next message says so. A webhook's address is a secret: neither warnings nor
`repr` show more of it than the host, and a redirect is followed on the same host only.

Left out: anything but the standard library, and a deadline for a server that sends its answer byte by byte; it would
keep this sink busy, and nothing else.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from surefoot.errors import require
from surefoot.record.sinks.named_values import encodable
from surefoot.record.sinks.posting import Address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from surefoot.record.messages import Batch, Event
    from surefoot.record.sinks.posting import Trouble
    from surefoot.types import Severity

log = logging.getLogger("surefoot")

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
MOST_HELD = 100
MOST_LISTED = 10
LONGEST_SUMMARY = 500
LONGEST_PAUSE_SECONDS = 300.0
TRIES_AT_CLOSE = 2


class WebhookSink:
    """Posts alerts to a URL. A sink: `RunLog(folder, sinks=[WebhookSink(url)])`."""

    def __init__(
        self,
        url: str,
        severities: Sequence[Severity] = ("error",),
        every_seconds: float = 60.0,
        *,
        run: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 5.0,
        attempts: int = 4,
        pause_seconds: float = 1.0,
    ) -> None:
        """`run` is the name in the messages, by default the script's; `headers` may carry a token.

        `attempts` is how often one message is tried; the pause between tries begins at `pause_seconds` and doubles.
        """
        unknown = set(severities) - set(SEVERITIES)
        require(bool(severities) and not unknown, f"`severities` must be of {SEVERITIES}; got {tuple(severities)!r}.")
        require(every_seconds >= 0, f"`every_seconds` must not be negative; got {every_seconds}.")
        require(timeout_seconds > 0, f"`timeout_seconds` must be above 0; got {timeout_seconds}.")
        require(attempts >= 1, f"`attempts` must be at least 1; got {attempts}.")
        sent = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "surefoot", **(headers or {})}
        self._address = Address(url, sent, timeout_seconds)
        self._severities = frozenset(severities)
        self._every_seconds = every_seconds
        self._run = run if run is not None else Path(sys.argv[0] or "training").stem
        self._attempts = attempts
        self._pause_seconds = pause_seconds
        self._pending: list[Event] = []
        self._overflown = 0  # held back and no longer listed: there were too many
        self._held_back = 0
        self._lost = 0  # since the last message that arrived
        self._failures = 0  # of the message that is being tried
        self._not_before = -float("inf")
        self._warned = self._closed = False
        self.undelivered = 0
        """How many alerts could not be delivered, in all."""

    def __repr__(self) -> str:
        return f"WebhookSink(host={self._address.host!r}, severities={sorted(self._severities)!r})"

    def write(self, batch: Batch) -> None:
        """Take in the batch's alerts, and send what is due."""
        if self._closed:
            return
        due = time.monotonic() >= self._not_before
        for event in batch.events:
            if event.severity in self._severities:
                self._hold(event, waits=not due)
        self.tick()

    def tick(self) -> None:
        """Send what waits if its time has come."""
        if self._pending and not self._closed and time.monotonic() >= self._not_before:
            self._try()

    def close(self) -> None:
        """Send what is still held back, now or never."""
        for _ in range(TRIES_AT_CLOSE):
            if self._pending and not self._closed:
                self._try()
        if self._pending:
            self._give_up("the run is over")
        self._closed = True

    def _hold(self, event: Event, waits: bool) -> None:
        self._held_back += waits
        if len(self._pending) < MOST_HELD:
            self._pending.append(event)
        else:
            self._overflown += 1

    def _try(self) -> None:
        trouble = self._address.post(self._body())
        now = time.monotonic()
        if trouble is None:
            self._not_before = now + self._every_seconds
            self._pending.clear()
            self._overflown = self._held_back = self._lost = self._failures = 0
            self._warned = False
            return
        self._failures += 1
        self._warn(trouble)
        if trouble.is_final or self._failures >= self._attempts:
            self._give_up(trouble.words)
            self._not_before = now + self._every_seconds
        else:
            pause = self._pause_seconds * 2 ** (self._failures - 1)
            self._not_before = now + min(max(pause, trouble.wait_seconds), LONGEST_PAUSE_SECONDS)

    def _warn(self, trouble: Trouble) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "WebhookSink at %s: an alert was not delivered (%s); training continues.%s",
                self._address.host,
                trouble.words,
                "" if trouble.is_final else f" It is tried {self._attempts} times.",
            )

    def _give_up(self, why: str) -> None:
        count = len(self._pending) + self._overflown
        self._lost += count
        if self.undelivered == 0:
            log.warning(
                "WebhookSink at %s: %d alerts were not delivered (%s). The run log contains them.",
                self._address.host,
                count,
                why,
            )
        self.undelivered += count
        self._pending.clear()
        self._overflown = self._held_back = self._failures = 0

    def _body(self) -> bytes:
        alerts = [_fields(event) for event in self._pending]
        worst = max(self._pending, key=lambda event: SEVERITIES.index(event.severity))
        body = {
            "text": self._text(),
            "run": _clean(self._run),
            **_fields(worst),
            "alerts": alerts,
            "held_back": self._held_back,
            "undelivered": self._lost,
        }
        return json.dumps(body, ensure_ascii=True, default=str).encode()

    def _text(self) -> str:
        lines = [f"*surefoot: {_escaped(self._run)}*", *(_line(event) for event in self._pending[:MOST_LISTED])]
        unlisted = len(self._pending) - MOST_LISTED + self._overflown
        if unlisted > 0:
            lines.append(f"… and {unlisted} more.")
        if self._held_back:
            lines.append(f"({self._held_back} held back: one message per {self._every_seconds:g} s.)")
        if self._lost:
            lines.append(f"({self._lost} earlier alerts could not be delivered; the run log has them.)")
        return "\n".join(lines)


class _AlertOptions(TypedDict, total=False):
    incident: str
    """The folder that the step is kept in, or the checkpoint that the event is about."""
    replay: str
    """The command that runs the step again."""


class AlertFields(_AlertOptions):
    """An alert for programs: plain text, nothing escaped."""

    event: str
    severity: str
    step: int | None
    summary: str
    cause: str
    action: str
    part: str
    time: float


def _fields(event: Event) -> AlertFields:
    fields: AlertFields = {
        "event": event.event,
        "severity": event.severity,
        "step": event.step,
        "summary": _clean(event.summary),
        "cause": _clean(event.cause),
        "action": _clean(event.action),
        "part": _clean(event.part),
        "time": event.time,
    }
    path = _incident(event)
    if path is not None:
        fields["incident"] = path
    if (command := _replay(event)) is not None:
        fields["replay"] = command
    return fields


def _line(event: Event) -> str:
    """An alert for people, in Slack's markup."""
    at = "" if event.step is None else f" at step {event.step}"
    part = f" of {_escaped(event.part)}" if event.part else ""
    path = _incident(event)
    extras = [
        ("cause", event.cause),
        ("action", event.action),
        ("incident", path or ""),
        ("replay", _replay(event) or ""),
    ]
    more = "; ".join(f"{name}: {_escaped(text)}" for name, text in extras if text)
    return f"[{event.severity}] {event.event}{at}{part}: {_escaped(event.summary)}" + (f" ({more})" if more else "")


def _incident(event: Event) -> str | None:
    path = event.evidence.get("incident") or event.evidence.get("checkpoint")
    return None if path is None else _clean(path)


def _replay(event: Event) -> str | None:
    command = event.evidence.get("replay")
    return None if command is None else _clean(command)


def _escaped(text: object) -> str:
    """Text that Slack shows as it is: without this `<!channel>` would call everyone."""
    return _clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clean(text: object) -> str:
    """Text of bearable length, without what no encoding has."""
    plain = encodable(str(text))
    return plain if len(plain) <= LONGEST_SUMMARY else f"{plain[: LONGEST_SUMMARY - 1]}…"
