"""The image of the loss: a PNG that any reader accepts, with the curve in it."""

from __future__ import annotations

import math
import struct
import zlib

import pytest

from surefoot.core.sparkline import SparkCurve
from surefoot.record.sinks.loss_picture import HEIGHT, WIDTH, draw_loss

LINE, BAD = 3, 4


def curve_of(losses):
    curve = SparkCurve()
    for step, loss in enumerate(losses):
        curve.add(step, loss)
    return curve


def pixels(image):
    """The rows of an image, each pixel the number of its colour; every checksum is verified."""
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(image):
        (length,), kind = struct.unpack(">I", image[at : at + 4]), image[at + 4 : at + 8]
        data = image[at + 8 : at + 8 + length]
        assert struct.unpack(">I", image[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind], at = data, at + 12 + length
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (WIDTH, HEIGHT)
    raw = zlib.decompress(chunks[b"IDAT"])
    assert len(raw) == HEIGHT * (WIDTH + 1)
    rows = [raw[row * (WIDTH + 1) : (row + 1) * (WIDTH + 1)] for row in range(HEIGHT)]
    assert all(row[0] == 0 for row in rows)
    return [row[1:] for row in rows]


def heights(image, colour=LINE):
    """The highest row of a colour in each column that has it."""
    rows = pixels(image)
    columns = [next((y for y, row in enumerate(rows) if row[x] == colour), None) for x in range(WIDTH)]
    return [y for y in columns if y is not None]


def test_a_falling_loss_falls_in_the_image():
    drawn = heights(draw_loss(curve_of([10.0 - step / 100 for step in range(900)]), 899))
    assert drawn == sorted(drawn)
    assert drawn[-1] - drawn[0] > HEIGHT / 2
    assert len(drawn) > WIDTH / 2


def test_losses_over_many_decades_are_drawn_on_a_scale_of_decades():
    drawn = heights(draw_loss(curve_of([10.0 ** (-4 * step / 1000) for step in range(1000)]), 999))
    middle = (drawn[0] + drawn[-1]) / 2
    assert drawn[len(drawn) // 2] == pytest.approx(middle, abs=10)


def test_a_loss_that_is_not_finite_is_a_red_tick_and_the_curve_continues():
    image = draw_loss(curve_of([math.nan if step == 50 else 1.0 for step in range(100)]), 99)
    assert 0 < len(heights(image, BAD)) < 10
    assert len(heights(image)) > WIDTH / 2


@pytest.mark.parametrize("losses", [[], [math.nan] * 5])
def test_without_a_finite_loss_there_is_no_image(losses):
    assert draw_loss(curve_of(losses), 5) is None


@pytest.mark.parametrize("losses", [[1.0], [0.0, 0.0], [-3.0, 2.0], [1e300, -1e300, 1.0], [1.0] * 20 + [1e30]])
def test_odd_losses_are_drawn_inside_of_the_image(losses):
    assert heights(draw_loss(curve_of(losses), len(losses)))


def test_a_million_steps_take_a_few_kilobytes():
    curve = SparkCurve()
    for step in range(0, 1_000_000, 97):
        curve.add(step, 1.0 + math.sin(step / 5e4) + math.sin(step))
    assert len(draw_loss(curve, 999_999)) < 10_000
