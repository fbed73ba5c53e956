"""Line charts without a plotting library: as SVG for a page, as characters for a terminal.

A `Chart` is data; `to_svg` and `to_text` draw it. Only lines, dashed marks and log axes are supported. The text
form draws the first series only, since characters have no colour.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Okabe and Ito's palette, which colour-blind readers can distinguish."""

_WIDTH, _HEIGHT = 860, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 210, 40, 52


@dataclass(frozen=True)
class ChartSeries:
    """One line."""

    name: str
    """The name in the legend."""

    x: Sequence[float]
    """Positions along the horizontal axis."""

    y: Sequence[float]
    """Values; one that is not finite, or not positive on a log axis, leaves a gap."""


@dataclass(frozen=True)
class Chart:
    """A line chart, not yet drawn."""

    title: str
    """One line over the chart."""

    x_label: str
    """What the horizontal axis measures."""

    y_label: str
    """What the vertical axis measures."""

    series: tuple[ChartSeries, ...]
    """The lines, in the order of the legend."""

    log_x: bool = False
    """Whether the horizontal axis counts decades."""

    log_y: bool = False
    """Whether the vertical axis counts decades."""

    marks: tuple[tuple[float, str], ...] = ()
    """Dashed vertical lines: position and label."""


@dataclass(frozen=True)
class _Axis:
    """Maps values to the interval from 0 to 1."""

    low: float
    high: float
    log: bool

    def place(self, value: float) -> float | None:
        if not math.isfinite(value) or (self.log and value <= 0.0):
            return None
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first < 2:  # too few decades to read a scale off
                between = [unit * 10.0**power for power in range(first - 1, last + 1) for unit in (1, 2, 5)]
                return [tick for tick in between if self.low <= tick <= self.high]
            stride = max(1, math.ceil((last - first + 1) / 8))
            return [10.0**power for power in range(first, last + 1, stride)]
        raw = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(raw))
        stride_value = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= raw)
        first, last = math.ceil(self.low / stride_value - 1e-9), math.floor(self.high / stride_value + 1e-9)
        return [count * stride_value for count in range(first, last + 1)]


def _axis(values: Sequence[float], log: bool) -> _Axis:
    usable = [value for value in values if math.isfinite(value) and (value > 0.0 or not log)]
    if not usable:
        raise ValueError("Nothing to draw: no value is finite (and positive, on a log axis).")
    low, high = min(usable), max(usable)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return _Axis(low, high, log)


def _axes(chart: Chart) -> tuple[_Axis, _Axis]:
    xs = [value for line in chart.series for value in line.x]
    ys = [value for line in chart.series for value in line.y]
    return _axis(xs, chart.log_x), _axis(ys, chart.log_y)


def to_svg(chart: Chart) -> str:
    """Draw the chart as a self-contained SVG document."""
    horizontal, vertical = _axes(chart)

    def across(share: float) -> float:
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def down(share: float) -> float:
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(chart.title)}</title>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f'<text x="{_LEFT}" y="22" font-size="14" font-weight="bold">{escape(chart.title)}</text>'
    ]
    parts += _svg_grid(chart, horizontal, vertical, across, down)
    for index, line in enumerate(chart.series):
        colour = COLOURS[index % len(COLOURS)]
        for run in _runs(line, horizontal, vertical):
            points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in run)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 12}" y="{_TOP + 12 + 18 * index}" fill="{colour}">{escape(line.name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _svg_grid(
    chart: Chart,
    horizontal: _Axis,
    vertical: _Axis,
    across: Callable[[float], float],
    down: Callable[[float], float],
) -> list[str]:
    parts = []
    for tick in horizontal.ticks():
        x = across(horizontal.place(tick) or 0.0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{down(1):.1f}" y2="{down(0):.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x:.1f}" y="{down(0) + 18:.1f}" text-anchor="middle">{tick:.4g}</text>')
    for tick in vertical.ticks():
        y = down(vertical.place(tick) or 0.0)
        parts.append(f'<line x1="{across(0):.1f}" x2="{across(1):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{across(0) - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for value, label in chart.marks:
        place = horizontal.place(value)
        if place is not None and 0.0 <= place <= 1.0:
            x = across(place)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{down(1):.1f}" y2="{down(0):.1f}" stroke="#555" '
                f'stroke-dasharray="4 3"/>'
                f'<text x="{x + 5:.1f}" y="{down(1) - 5:.1f}" fill="#555">{escape(label)}</text>'
            )
    middle = (down(0) + down(1)) / 2
    parts.append(f'<text x="{across(0.5):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>')
    parts.append(
        f'<text x="16" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 16 {middle:.1f})">'
        f"{escape(chart.y_label)}</text>"
    )
    return parts


def _runs(line: ChartSeries, horizontal: _Axis, vertical: _Axis) -> list[list[tuple[float, float]]]:
    """Split a line where a value cannot be drawn."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        across, up = horizontal.place(x), vertical.place(y)
        if across is None or up is None:
            runs.append([])
        else:
            runs[-1].append((across, up))
    return [run for run in runs if run]


def to_text(chart: Chart, width: int = 64, height: int = 14) -> str:
    """Draw the first series in characters, `height` lines of `width` columns and an axis."""
    horizontal, vertical = _axes(chart)
    grid = [[" "] * width for _ in range(height)]
    for value, _ in chart.marks:
        place = horizontal.place(value)
        if place is not None and 0.0 <= place <= 1.0:
            for row in grid:
                row[round(place * (width - 1))] = "┊"
    for x, y in (point for run in _runs(chart.series[0], horizontal, vertical) for point in run):
        grid[height - 1 - round(y * (height - 1))][round(x * (width - 1))] = "•"
    edge = [f"{vertical.high:.3g}", *[""] * (height - 2), f"{vertical.low:.3g}"]
    lines = [f"{label:>9} ┤{''.join(row).rstrip()}" for label, row in zip(edge, grid, strict=True)]
    low, high = f"{horizontal.low:.3g}", f"{horizontal.high:.3g}"
    axis = low + chart.x_label.center(width - len(low) - len(high)) + high
    return "\n".join([f"{'':11}{chart.title}", *lines, f"{'':10}└{'─' * width}", f"{'':11}{axis}"])
