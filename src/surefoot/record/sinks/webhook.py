"""Alerts: a message to a webhook when something of a chosen severity happens, at the end of the run, and heartbeats.

The body is JSON with a `text` that Slack and compatible services (Mattermost, Discord's `/slack` address) show
unchanged, and the same as fields for other programs. The first alert is sent immediately; further ones are held back
until `every_seconds` have passed, then sent together, with their number. At the end of the run, the remaining ones are
sent in the message about the end. Alarms about the progress of the run (`record/progress_alarms.py`) and the place of a
captured step are always sent.

A heartbeat reports at regular intervals that the run makes steps, so that its absence is an alarm for the receiver: a
process that was killed, or a machine that is down, sends no message. While a run is stalled, none is sent.

If a server is slow or down, answers 5xx or asks to wait (429 with `Retry-After`), a few further attempts are made with
increasing pauses, without sleeping: the next batch or tick of the run log makes the next attempt. An alert that cannot
be delivered is dropped and counted, and the next message reports this. A webhook's address is a secret: warnings and
`repr` show only its host, and a redirect is followed on the same host only.

Only the standard library is used.
"""

from __future__ import annotations

import base64
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from surefoot.core.settings import is_number, is_whole, shown
from surefoot.errors import require
from surefoot.record.progress_alarms import is_progress_alarm
from surefoot.record.sinks.message_facts import MessageFacts, SummaryFields
from surefoot.record.sinks.named_values import encodable
from surefoot.record.sinks.posting import Address, PostFailure

if TYPE_CHECKING:
    from surefoot.record.messages import Batch, Event
    from surefoot.types import Severity

log = logging.getLogger("surefoot")

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
_SEVERITY_OF: dict[object, Severity] = {"broken": "error", "unstable": "warning"}
"""The severity of an end with this verdict."""
MOST_HELD = 100
MOST_LISTED = 10
LONGEST_SUMMARY = 500
LONGEST_PAUSE_SECONDS = 300.0
TRIES_AT_CLOSE = 2
SHORTEST_HEARTBEAT_SECONDS = 1.0
HEARTBEAT_RETRY_SECONDS = 10.0
ALERT = "an alert"


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
        heartbeat_seconds: float | None = None,
    ) -> None:
        """`run` is the name in the messages, by default the script's; `headers` may contain a token.

        `timeout_seconds` covers a whole request. `attempts` is the number of attempts per message; the pause between
        them begins at `pause_seconds` and doubles. A heartbeat is sent every `heartbeat_seconds`. With empty
        `severities`, no alerts are sent.
        """
        _check_severities(severities, heartbeat_seconds)
        _check_times(every_seconds, timeout_seconds, pause_seconds, attempts)
        require(
            headers is None or isinstance(headers, Mapping),
            f"`headers` must be a dictionary of strings; got {shown(headers)}.",
        )
        sent = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "surefoot", **(headers or {})}
        self._address = Address(url, sent, timeout_seconds)
        self._severities = frozenset(severities)
        self._every_seconds = every_seconds
        self._run = run if run is not None else Path(sys.argv[0] or "training").stem
        self._attempts = attempts
        self._pause_seconds = pause_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._beat_at = -float("inf")
        self._summary = MessageFacts()
        self._ending: Event | None = None
        """How the run ended, once the sink is closed."""
        self._pending: list[Event] = []
        self._overflown = 0  # held back and no longer listed individually
        self._held_back = 0
        self._lost = 0  # since the last delivered message
        self._failures = 0  # of the current message
        self._not_before = -float("inf")
        self._warned = self._closed = False
        self.undelivered = 0
        """The number of alerts that could not be delivered."""

    def __repr__(self) -> str:
        return f"WebhookSink(host={self._address.host!r}, severities={sorted(self._severities)!r})"

    def opened(self, folder: Path) -> None:
        """The folder of the run: the message at the end contains the command that shows it."""
        self._summary.folder = folder

    def write(self, batch: Batch) -> None:
        """Add the batch's alerts, and send what is due."""
        if self._closed:
            return
        self._summary.add(batch)
        due = time.monotonic() >= self._not_before
        for event in batch.events:
            if event.event != "end" and self._is_alert(event):
                self._hold(event, waits=not due)
        if not self._is_over:  # `close` follows, and sends everything in one message
            self.tick()

    def tick(self) -> None:
        """Send what is due, and the heartbeat."""
        if self._closed:
            return
        if self._pending and time.monotonic() >= self._not_before:
            self._try()
        if self._heartbeat_seconds is not None and time.monotonic() >= self._beat_at and not self._summary.stalled:
            self._beat(self._heartbeat_seconds)

    def close(self) -> None:
        """Send how the run ended, with everything held back, in a single attempt."""
        self._ending = self._summary.ended
        for _ in range(TRIES_AT_CLOSE):
            if not self._closed and (self._pending or self._ending is not None):
                self._closed = self._try()
        if self._pending:
            self._give_up("the run is over")
        self._closed = True

    @property
    def _is_over(self) -> bool:
        return self._summary.ended is not None and self._summary.ended.event == "end"

    def _is_alert(self, event: Event) -> bool:
        """Whether an event is sent: one of the chosen severities, an alarm about the progress, or a captured step."""
        is_always_sent = is_progress_alarm(event) or event.cause == "incident"
        return event.severity in self._severities or (bool(self._severities) and is_always_sent)

    def _hold(self, event: Event, waits: bool) -> None:
        self._held_back += waits
        if len(self._pending) < MOST_HELD:
            self._pending.append(event)
        else:
            self._overflown += 1

    def _beat(self, every_seconds: float) -> None:
        """Send a heartbeat. A failed one is tried again soon, because the receiver expects it."""
        text = f"*surefoot: {_escaped(self._run)}* is running: {_escaped(self._summary.sentence())}"
        fields = {"event": "heartbeat", "next_seconds": every_seconds, "time": time.time(), **self._summary.fields()}
        trouble = self._address.post(_encoded({"text": text, "run": _clean(self._run), **fields}))
        soon = min(every_seconds, max(HEARTBEAT_RETRY_SECONDS, trouble.wait_seconds)) if trouble else every_seconds
        self._beat_at = time.monotonic() + soon
        if trouble is not None:
            self._warn(trouble, "a heartbeat")

    def _try(self) -> bool:
        """Send what waits; returns whether no further attempt is needed: it was accepted, or refused permanently."""
        trouble = self._address.post(self._body())
        now = time.monotonic()
        if trouble is None:
            self._not_before = now + self._every_seconds
            self._pending.clear()
            self._overflown = self._held_back = self._lost = self._failures = 0
            self._warned = False
            return True
        self._failures += 1
        self._warn(trouble, ALERT)
        if trouble.is_final or self._failures >= self._attempts:
            self._give_up(trouble.words)
            self._not_before = now + self._every_seconds
        else:
            pause = self._pause_seconds * 2 ** (self._failures - 1)
            self._not_before = now + min(max(pause, trouble.wait_seconds), LONGEST_PAUSE_SECONDS)
        return trouble.is_final

    def _warn(self, trouble: PostFailure, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "WebhookSink at %s: %s was not delivered (%s); training continues.%s",
                self._address.host,
                what,
                trouble.words,
                "" if trouble.is_final or what != ALERT else f" It is tried {self._attempts} times.",
            )

    def _give_up(self, why: str) -> None:
        count = len(self._pending) + self._overflown
        self._lost += count
        if self.undelivered == 0 and count:
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
        kept = next((event for event in self._pending if _incident(event) is not None), None)
        body = {
            "text": self._text(),
            "run": _clean(self._run),
            **(_place(kept) if kept is not None else {}),
            **(
                _end_fields(self._ending, self._pending, self._summary)
                if self._ending is not None
                else _fields(_worst(self._pending))
            ),
            "alerts": [_fields(event) for event in self._pending],
            "held_back": self._held_back,
            "undelivered": self._lost if self._ending is None else self.undelivered,
        }
        return _encoded(body)

    def _text(self) -> str:
        lines = [f"*surefoot: {_escaped(self._run)}*"]
        lines += _end_lines(self._ending, self._summary) if self._ending is not None else []
        lines += [_line(event) for event in self._pending[:MOST_LISTED]]
        unlisted = len(self._pending) - MOST_LISTED + self._overflown
        if unlisted > 0:
            lines.append(f"… and {unlisted} more.")
        if self._held_back:
            lines.append(f"({self._held_back} held back: one message per {self._every_seconds:g} s.)")
        if self._lost:
            lines.append(f"({self._lost} earlier alerts could not be delivered; the run log has them.)")
        return "\n".join(lines)


def _check_severities(severities: Sequence[Severity], heartbeat_seconds: float | None) -> None:
    unknown = set(severities) - set(SEVERITIES)
    require(
        (bool(severities) or heartbeat_seconds is not None) and not unknown,
        f"`severities` must be of {SEVERITIES}; got {tuple(severities)!r}.",
    )
    require(
        heartbeat_seconds is None or (is_number(heartbeat_seconds) and heartbeat_seconds >= SHORTEST_HEARTBEAT_SECONDS),
        f"`heartbeat_seconds` must be at least {SHORTEST_HEARTBEAT_SECONDS:g}, or None; got {heartbeat_seconds}.",
    )


def _check_times(every_seconds: float, timeout_seconds: float, pause_seconds: float, attempts: int) -> None:
    for name, seconds in (("every_seconds", every_seconds), ("pause_seconds", pause_seconds)):
        require(
            is_number(seconds) and seconds >= 0, f"`{name}` must be a number, and not negative; got {shown(seconds)}."
        )
    require(
        is_number(timeout_seconds) and timeout_seconds > 0,
        f"`timeout_seconds` must be a number above 0; got {shown(timeout_seconds)}.",
    )
    require(
        is_whole(attempts) and attempts >= 1,
        f"`attempts` must be a whole number of at least 1; got {shown(attempts)}.",
    )


def _encoded(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, ensure_ascii=True, default=str).encode()


class Picture(TypedDict):
    """An image inside a message."""

    type: str
    base64: str


class EndFields(SummaryFields):
    """How a run ended, for programs."""

    event: str
    """`end` or `halt`."""
    severity: str
    """The highest among the end, its verdict and the alerts that come with it."""
    summary: str
    """A description of the end."""
    verdict: str
    """The verdict of the diagnosis under `surefoot run`; empty elsewhere."""
    cause: str
    """The cause that the diagnosis names first, or that of the halt; empty if there is none."""
    why: str
    """The first finding in one sentence, or the reason for no verdict; empty without a diagnosis."""
    command: str
    """The command that shows more."""
    picture: Picture | None
    """The loss as a PNG image."""


def _worst(events: Sequence[Event]) -> Event:
    return max(events, key=lambda event: SEVERITIES.index(event.severity))


def _end_severity(ended: Event) -> Severity:
    return max(ended.severity, _SEVERITY_OF.get(ended.evidence.get("verdict"), "info"), key=SEVERITIES.index)


def _end_fields(ended: Event, alerts: Sequence[Event], summary: MessageFacts) -> EndFields:
    image = summary.picture()
    picture: Picture | None = None
    if image is not None:
        picture = {"type": "image/png", "base64": base64.b64encode(image).decode()}
    return {
        **summary.fields(),
        "event": ended.event,
        "severity": max([_end_severity(ended), *(each.severity for each in alerts)], key=SEVERITIES.index),
        "summary": _clean(ended.summary),
        "verdict": _clean(ended.evidence.get("verdict") or ""),
        "cause": _clean(ended.evidence.get("cause") or ended.cause),
        "why": _clean(ended.evidence.get("why") or ""),
        "command": _clean(summary.command),
        "picture": picture,
    }


def _end_lines(ended: Event, summary: MessageFacts) -> list[str]:
    """How the run ended, for people."""
    cause = ended.evidence.get("cause") or ended.cause
    named = f" (cause: {_escaped(cause)})" if cause else ""
    lines = [f"[{_end_severity(ended)}] {ended.event}: {_escaped(ended.summary)}{named}"]
    if why := ended.evidence.get("why"):
        lines.append(_escaped(why))
    lines.append(_escaped(summary.sentence()))
    if curve := summary.curve():
        lines.append(f"`{curve}`")
    if summary.command:
        lines.append(f"Details: `{_escaped(summary.command)}`")
    return lines


class AlertOptions(TypedDict, total=False):
    """Where the step of an alert is kept."""

    incident: str
    """The folder of the captured step, or the checkpoint that the event is about."""
    replay: str
    """The command that replays the step."""


class AlertFields(AlertOptions):
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
    return {**fields, **_place(event)}


def _place(event: Event) -> AlertOptions:
    """Where the step of an event is kept, as far as it is."""
    fields: AlertOptions = {}
    if (path := _incident(event)) is not None:
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
    """Escaped text: without this, Slack would notify everyone for `<!channel>`."""
    return _clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clean(text: object) -> str:
    """Text of limited length, without characters that cannot be encoded."""
    plain = encodable(str(text))
    return plain if len(plain) <= LONGEST_SUMMARY else f"{plain[: LONGEST_SUMMARY - 1]}…"
