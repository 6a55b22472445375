"""Charts as inline SVG: lines, a heatmap, bars. Colours are CSS classes, so a page can be light or dark.

Pure: numbers in, text out. Every mark carries a <title>, which browsers show on hover.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

import msgspec

WIDTH: Final = 640
HEIGHT: Final = 260
LEFT: Final = 56
RIGHT: Final = 12
TOP: Final = 12
BOTTOM: Final = 40
NUM_COLOURS: Final = 6
TICK_TARGET: Final = 6

Point = tuple[float, float | None]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One curve; a point without a value is a gap in it."""

    name: str
    points: Sequence[Point]
    has_dots: bool = False


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """A scale from values to pixels."""

    label: str
    low: float
    high: float
    is_log: bool = False

    def position(self, value: float) -> float:
        """Return where a value lies, 0 at the low end and 1 at the high end."""
        if self.is_log:
            low, high, value = (math.log10(max(v, 1e-9)) for v in (self.low, self.high, value))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self) -> list[float]:
        """Return round values within the axis."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            return [value for value in values if self.low <= value <= self.high]
        rough = (self.high - self.low) / TICK_TARGET
        if rough <= 0:
            return [self.low]
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough)
        first_tick = math.ceil(self.low / step)
        return [i * step for i in range(first_tick, math.floor(self.high / step) + 1)]


def tick_label(value: float) -> str:
    """Return a value without needless digits."""
    return f"{value:.0f}" if abs(value) >= 10 or value == 0 else f"{value:.3g}"


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, *, log_x: bool = False) -> str:
    """Draw curves over a common x axis; y begins at 0."""
    lines = [line for line in lines if any(y is not None for _, y in line.points)]
    if not lines:
        return '<p class="none">No data.</p>'
    xs = [x for line in lines for x, y in line.points if y is not None]
    top = max(y for line in lines for _, y in line.points if y is not None)
    low = min(xs)
    if log_x:
        low = max(low, max(xs) / 1e5, 1e-3)
    x = Axis(label=x_label, low=low, high=max(max(xs), low * 1.001), is_log=log_x)
    y = Axis(label=y_label, low=0.0, high=top * 1.05 or 1.0)
    marks = [_curve(line, i, x, y) for i, line in enumerate(lines)]
    return _legend([line.name for line in lines]) + _frame(x, y, "".join(marks))


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.position(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.position(value) * (HEIGHT - TOP - BOTTOM)


def _curve(line: Line, index: int, x: Axis, y: Axis) -> str:
    pieces: list[list[str]] = [[]]
    dots = []
    for at, value in line.points:
        if value is None:
            pieces.append([])
            continue
        px, py = _x(x, at), _y(y, value)
        pieces[-1].append(f"{px:.1f},{py:.1f}")
        label = escape(f"{line.name}: {value:.4g} at {at:.4g}")
        dots.append((px, py, label))
    colour = index % NUM_COLOURS
    drawn = "".join(
        f'<polyline class="line c{colour}" points="{" ".join(piece)}"/>' for piece in pieces if len(piece) > 1
    )
    # Single points between gaps would be invisible as lines; hover targets are needed anyway.
    kind = "dot" if line.has_dots or not drawn else "hover"
    drawn += "".join(
        f'<circle class="{kind} c{colour}" cx="{px:.1f}" cy="{py:.1f}" r="4"><title>{label}</title></circle>'
        for px, py, label in dots
    )
    return drawn


def _legend(names: Sequence[str]) -> str:
    items = (f'<span><i class="c{i % NUM_COLOURS}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{"".join(items)}</div>'


def _frame(x: Axis, y: Axis, marks: str, y_ticks: Sequence[tuple[float, str]] | None = None) -> str:
    """Put axes around marks. `y_ticks`: pixel and label, where the y axis is not a scale."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y.label)}">']
    if y_ticks is None:
        y_ticks = [(_y(y, tick), tick_label(tick)) for tick in y.ticks()]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for py, label in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(_text(LEFT - 6, py + 4, label, "end"))
    parts += [_text(_x(x, tick), bottom + 16, tick_label(tick), "middle") for tick in x.ticks()]
    parts.append(marks)
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    up = (TOP + bottom) / 2
    parts.append(_text((LEFT + right) / 2, HEIGHT - 6, x.label, "middle"))
    parts.append(f'<g transform="rotate(-90 14 {up})">{_text(14, up, y.label, "middle")}</g></svg>')
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def heatmap(counts: Sequence[Sequence[int]], bin_s: float, edges: Sequence[float], y_label: str) -> str:
    """Draw counts[time bin][bucket]; bucket i begins at edges[i]. Darker is more, by the logarithm."""
    most = max((count for row in counts for count in row), default=0)
    if most == 0:
        return '<p class="none">No data.</p>'
    used = [i for i in range(len(edges)) if any(row[i] for row in counts)]
    first, last = used[0], used[-1]
    num_rows = last - first + 1
    x = Axis(label="seconds", low=0.0, high=len(counts) * bin_s)
    y = Axis(label=y_label, low=0.0, high=float(num_rows))
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    height = (HEIGHT - TOP - BOTTOM) / num_rows
    marks = []
    for i, row in enumerate(counts):
        for bucket in range(first, last + 1):
            if row[bucket]:
                shade = 0.12 + 0.88 * math.log1p(row[bucket]) / math.log1p(most)
                py = HEIGHT - BOTTOM - (bucket - first + 1) * height
                label = f"{row[bucket]} of {edges[bucket]:g} ms or more, {i * bin_s:g} s"
                marks.append(
                    f'<rect class="cell" x="{LEFT + i * width:.1f}" y="{py:.1f}" width="{width + 0.2:.2f}" '
                    f'height="{height + 0.2:.2f}" opacity="{shade:.2f}"><title>{label}</title></rect>'
                )
    every = max(1, round(num_rows / 8))
    ticks = [
        (HEIGHT - BOTTOM - (bucket - first) * height, f"{edges[bucket]:g}")
        for bucket in range(first, last + 1, every)
    ]
    return _frame(x, y, "".join(marks), ticks)


def bars(rows: Sequence[tuple[str, float]], label: str, *, text: Callable[[float], str] = tick_label) -> str:
    """Draw one horizontal bar per row, from 0, its value beside it."""
    if not rows:
        return '<p class="none">No data.</p>'
    most = max(value for _, value in rows) or 1.0
    row_height, name_width = 24, 150
    height = row_height * len(rows) + 28
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">']
    for i, (name, value) in enumerate(rows):
        y = i * row_height + 4
        width = value / most * (WIDTH - name_width - 90)
        parts.append(_text(name_width - 8, y + 13, name, "end"))
        parts.append(
            f'<rect class="bar" x="{name_width}" y="{y}" width="{width:.1f}" height="{row_height - 8}"/>'
        )
        parts.append(_text(name_width + width + 6, y + 13, text(value)))
    parts.append(_text(name_width, height - 6, label) + "</svg>")
    return "".join(parts)
