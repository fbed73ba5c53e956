"""Draws the loss of a run as a small PNG image with `zlib` alone, without a browser or a drawing package.

PNG and not SVG: mail programs and chats (Slack, Discord, Teams, Mattermost) show PNG files inline and refuse SVG files,
which can contain scripts. The image has 256 colours at most and takes a few kilobytes.

It shows the mean loss of up to 128 stretches of the run, a red tick at the bottom where a loss was not finite, and the
range of both axes as numbers. The vertical axis counts decades if the losses are positive and span more than a factor
of 30. A few values that are far away from all others are drawn at the edge.

Not covered: anything that needs a real font. The message with the image contains the text.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

from surefoot.core.sparkline import SLOTS, Slot, SparkCurve, scale_of

WIDTH, HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 12, 12, 28
_PALETTE = ((255, 255, 255), (229, 229, 229), (68, 68, 68), (0, 114, 178), (213, 0, 0))
_PAPER, _GRID, _INK, _LINE, _BAD = range(5)
_LOG_SPAN = 30.0
_GLYPHS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71222",
    "8": "75757", "9": "75717", ".": "00002", "-": "00700", "+": "02720", ",": "00024", "e": "74647", "l": "44447",
    "o": "75557", "p": "75744", "s": "74717", "t": "72222", "n": "75555", "i": "72227", "f": "74744", "a": "75755",
}  # fmt: skip
"""Characters in three columns and five rows; each digit is a row, its bits are the columns."""
_GLYPH_SCALE = 2
_GLYPH_STEP = 4 * _GLYPH_SCALE


def draw_loss(curve: SparkCurve, last_step: int) -> bytes | None:
    """The image of a loss curve that ends at `last_step`; `None` if there is no finite loss."""
    slots = curve.slots(SLOTS)
    means = [slot.mean for slot in slots if slot.count]
    if not means:
        return None
    low, high = scale_of(means)
    canvas = _Canvas()
    canvas.frame()
    canvas.text(0, _TOP, f"{high:.3g}", right=_LEFT - 6)
    canvas.text(0, HEIGHT - _BOTTOM - 10, f"{low:.3g}", right=_LEFT - 6)
    canvas.text(_LEFT, HEIGHT - _BOTTOM + 8, f"step {curve.first_step:,}")
    canvas.text(0, HEIGHT - _BOTTOM + 8, f"{last_step:,}", right=WIDTH - _RIGHT)
    _draw_slots(canvas, slots, low, high)
    return canvas.png()


def _draw_slots(canvas: _Canvas, slots: Sequence[Slot], low: float, high: float) -> None:
    across = (WIDTH - _LEFT - _RIGHT - 1) / max(1, len(slots) - 1)
    before: tuple[int, int] | None = None
    for number, slot in enumerate(slots):
        x = round(_LEFT + number * across)
        if slot.broken:
            canvas.fill(x - 1, HEIGHT - _BOTTOM - 8, 3, 8, _BAD)
        if not slot.count:
            before = None
            continue
        point = x, _row(slot.mean, low, high)
        canvas.line(before or point, point)
        before = point


def _row(value: float, low: float, high: float) -> int:
    """The row of a value; that of the edge for a value outside the scale."""
    value = min(max(value, low), high)
    if high <= low:
        share = 0.5
    elif low > 0 and high / low > _LOG_SPAN:
        share = math.log(value / low) / math.log(high / low)
    else:
        share = (value - low) / (high - low)
    return round(HEIGHT - _BOTTOM - 2 - share * (HEIGHT - _TOP - _BOTTOM - 4))


class _Canvas:
    """Pixels, each the number of a colour."""

    def __init__(self) -> None:
        self._rows = [bytearray(WIDTH) for _ in range(HEIGHT)]

    def fill(self, x: int, y: int, width: int, height: int, colour: int) -> None:
        """A rectangle, clipped to the image."""
        x, end = max(0, x), max(0, min(WIDTH, x + width))
        for row in self._rows[max(0, y) : max(0, y + height)]:
            row[x:end] = bytes([colour]) * (end - x)

    def frame(self) -> None:
        """The axes, and lines at each quarter."""
        width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        for quarter in range(4):
            self.fill(_LEFT, _TOP + quarter * height // 4, width, 1, _GRID)
        self.fill(_LEFT - 1, _TOP, 1, height, _INK)
        self.fill(_LEFT - 1, HEIGHT - _BOTTOM, width, 1, _INK)

    def line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """A line, two pixels wide."""
        (x, y), (to_x, to_y) = start, end
        count = max(abs(to_x - x), abs(to_y - y), 1)
        for step in range(count + 1):
            self.fill(x + round((to_x - x) * step / count), y + round((to_y - y) * step / count), 2, 2, _LINE)

    def text(self, x: int, y: int, words: str, right: int | None = None) -> None:
        """Text that starts at `x`, or ends at `right`."""
        x = x if right is None else right - _GLYPH_STEP * len(words)
        for character in words:
            for down, row in enumerate(_GLYPHS.get(character, "00000")):
                for across in range(3):
                    if int(row) & (4 >> across):
                        place = x + across * _GLYPH_SCALE, y + down * _GLYPH_SCALE
                        self.fill(*place, _GLYPH_SCALE, _GLYPH_SCALE, _INK)
            x += _GLYPH_STEP

    def png(self) -> bytes:
        """The image as a file: header, palette, and the rows, each after a byte that marks it as not filtered."""
        header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 3, 0, 0, 0)
        palette = b"".join(bytes(colour) for colour in _PALETTE)
        pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in self._rows), 9)
        parts = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", pixels), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
