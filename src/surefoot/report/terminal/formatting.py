"""Numbers, times and arbitrary strings as short text for a terminal."""

from __future__ import annotations

import math
import time
import unicodedata

_ASCII = str.maketrans({"…": "~", "·": "|", "×": "x", "↑": "^", "↓": "v", "—": "-", "–": "-", "─": "-"})


def number(value: float | None, digits: int = 4) -> str:
    """A measured value with few digits: `2.314`, `1.2e-05`, `nan`, `inf`; a dash for `None`."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if value == int(value) and size < 1e7:
        return f"{value:.0f}"  # counts and powers of two, such as a loss scale, are exact
    if value == 0 or 1e-3 <= size < 10**digits:
        return f"{value:.{digits}g}" if size < 10 ** (digits - 1) else f"{value:.0f}"
    return f"{value:.{max(1, digits - 2)}e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def rate(value: float | None) -> str:
    """Learning rates as people write them: `0.0003`, `3e-05`."""
    return "–" if value is None else f"{value:.3g}"


def pace(steps_per_second: float) -> str:
    """`41.3 steps/s`, or for slow steps `1:20 per step`."""
    if steps_per_second >= 0.5:
        return f"{number(steps_per_second, 3)} steps/s"
    return f"{duration(1 / steps_per_second)} per step" if steps_per_second > 0 else "0 steps/s"


def duration(seconds: float | None) -> str:
    """`4s`, `3:07`, `1:02:33`, `2d 3h`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = max(0, int(seconds))
    minutes, seconds_left = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    if whole < 60:
        return f"{whole}s"
    if hours == 0:
        return f"{minutes}:{seconds_left:02}"
    if hours < 48:
        return f"{hours}:{minutes_left:02}:{seconds_left:02}"
    return f"{hours // 24:,}d {hours % 24}h" if hours < 1e6 else "ages"


def age(seconds: float) -> str:
    """How long ago something was: `4 s`, `20 min`, `5 h`, `3 d`."""
    whole = max(0.0, seconds)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if whole >= length:
            return f"{int(whole // length):,} {unit}"
    return f"{int(whole)} s"


def size(count: int) -> str:
    """A number of bytes: `71 kB`, `1.4 GB`."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def clock(seconds: float, form: str = "%H:%M:%S") -> str:
    """The time of day, local."""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (ValueError, OverflowError, OSError):  # NaN, or a year outside the calendar
        return "--:--:--"


def one_line(value: object) -> str:
    """The text on one line, without characters that a terminal interprets: escapes, line ends, direction marks."""
    text = str(value)
    if not text.isprintable():
        text = "".join(" " if unicodedata.category(letter) in _INTERPRETED else letter for letter in text)
    return " ".join(text.split())


def as_ascii(text: str) -> str:
    """The text for a stream that supports only ASCII."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


_INTERPRETED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
