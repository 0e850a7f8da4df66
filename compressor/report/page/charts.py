"""Draw charts as SVG: a title, a description, axes with units, and the same figures as a table.

Charts are 360 units wide, as a phone is, and grow a little with the page; colours are classes of the style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from compressor.report.page.elements import Content, Html, element, folded, table

WIDTH = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 20, 10, 40
_LONGEST = 52  # characters of a label above a bar
_STEPS = (1, 2, 2.5, 5, 10)
Form = Callable[[float], str]


@dataclass(frozen=True)
class Bar:
    """Describe a row of a chart of bars.

    Attributes:
        label: what is measured.
        value: length of the bar.
        text: the value, written behind it.
        kind: class of the style sheet.
        mark: where a line crosses the bar, such as at what was planned; None draws none.
    """

    label: str
    value: float
    text: str
    kind: str = "ours"
    mark: float | None = None


@dataclass(frozen=True)
class Range:
    """Describe a row of a chart of intervals: ends are None where too few repeats give none."""

    label: str
    middle: float
    ends: tuple[float, float] | None
    text: str


@dataclass(frozen=True)
class Dot:
    """Describe a point over two axes; ``kind`` is a class, ``label`` is shown when the reader points at it."""

    x: float
    y: float
    label: str
    kind: str = "ours"
    caption: str = ""


@dataclass(frozen=True)
class Line:
    """Describe a line through places of a chart; its caption stands below its beginning, or above or below its end."""

    spots: Sequence[tuple[float, float]]
    caption: str = ""
    place: Literal["begin", "above end", "below end"] = "begin"


@dataclass(frozen=True)
class Axis:
    """Map figures of one axis to places.

    Attributes:
        label: with the unit.
        least, most: figures at the ends.
        begin, end: places of the ends.
        form: writes a figure.
        log: equal ratios are equally far apart.
    """

    label: str
    least: float
    most: float
    begin: float
    end: float
    form: Form
    log: bool = False

    def place(self, value: float) -> float:
        """Return the place of a figure."""
        if self.log:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return round(self.begin + share * (self.end - self.begin), 2)

    def ticks(self) -> list[float]:
        """Return round figures along the axis."""
        if self.log:
            first, last = math.ceil(math.log10(self.least) - 1e-9), math.floor(math.log10(self.most) + 1e-9)
            step = max(1, (last - first) // 4)
            return [10.0**power for power in range(first, last + 1, step)]
        rough = (self.most - self.least) / 4
        unit = 10 ** math.floor(math.log10(rough))
        step = next(size * unit for size in _STEPS if size * unit >= rough * (1 - 1e-9))
        first = math.ceil(self.least / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.most / step + 1e-9) + 1)]


def bars(title: str, axis_label: str, rows: Sequence[Bar], form: Form, headings: Sequence[str]) -> Html:
    """Draw horizontal bars from 0, each below its label.

    Args:
        form: writes a figure of the axis.
        headings: of the table with the same figures.
    """
    most = max([row.value for row in rows] + [row.mark or 0 for row in rows]) or 1
    height = _TOP + 36 * len(rows) + _BOTTOM
    axis = Axis(axis_label, 0, most, 8, WIDTH - 64, form)
    drawn: list[Html] = _grid_across(axis, _TOP, height - _BOTTOM)
    for number, row in enumerate(rows):
        top = _TOP + 36 * number
        end = axis.place(row.value)
        drawn.append(_text(8, top + 11, _short(row.label), "label"))
        drawn.append(element("rect", x=8, y=top + 16, width=max(1, round(end - 8, 2)), height=13, class_=row.kind))
        if row.mark is not None:
            x = axis.place(row.mark)
            drawn.append(element("line", x1=x, x2=x, y1=top + 13, y2=top + 32, class_="mark"))
        drawn.append(_text(max(end, axis.place(row.mark or 0)) + 5, top + 27, row.text, "value"))
    cells = [(row.label, row.text, "" if row.mark is None else form(row.mark))[: len(headings)] for row in rows]
    return _figure(title, height, drawn, headings, cells)


def ranges(title: str, axis_label: str, rows: Sequence[Range], form: Form, headings: Sequence[str]) -> Html:
    """Draw middles with their intervals around a line at 1, on an axis of ratios."""
    values = [1.0] + [value for row in rows for value in (row.middle, *(row.ends or ()))]
    most = max(values) * 1.08
    height = _TOP + 34 * len(rows) + _BOTTOM
    axis = Axis(axis_label, 0, most, 8, WIDTH - 14, form)
    drawn = _grid_across(axis, _TOP, height - _BOTTOM)
    one = axis.place(1)
    drawn.append(element("line", x1=one, x2=one, y1=_TOP, y2=height - _BOTTOM, class_="mark"))
    for number, row in enumerate(rows):
        top = _TOP + 34 * number
        y = top + 23
        drawn.append(_text(8, top + 11, _short(f"{row.label}: {row.text}"), "label"))
        if row.ends is not None:
            first, last = axis.place(row.ends[0]), axis.place(row.ends[1])
            drawn.append(element("line", x1=first, x2=last, y1=y, y2=y, class_="whisker"))
            drawn += [element("line", x1=x, x2=x, y1=y - 4, y2=y + 4, class_="whisker") for x in (first, last)]
        drawn.append(element("circle", cx=axis.place(row.middle), cy=y, r=4.5, class_="ours"))
    return _figure(title, height, drawn, headings, [(row.label, row.text) for row in rows])


def scatter(
    title: str,
    x: tuple[str, Form],
    y: tuple[str, Form],
    dots: Sequence[Dot],
    headings: Sequence[str],
    *,
    lines: Sequence[Line] = (),
    log: bool = False,
    captions: Content = None,
) -> Html:
    """Draw points over two axes, and lines between given places.

    Args:
        x, y: label with the unit, and what writes a figure.
        lines: drawn below the points.
        log: both axes are logarithmic.
        captions: what colours mean.
    """
    height = 260
    spots = [(dot.x, dot.y) for dot in dots] + [spot for line in lines for spot in line.spots]
    (least_x, most_x), (least_y, most_y) = (_spread([spot[side] for spot in spots], log) for side in (0, 1))
    across = Axis(x[0], least_x, most_x, _LEFT, WIDTH - _RIGHT, x[1], log)
    up = Axis(y[0], least_y, most_y, height - _BOTTOM, _TOP, y[1], log)
    drawn = [*_grid_across(across, _TOP, height - _BOTTOM), *_grid_up(up, _LEFT, WIDTH - _RIGHT)]
    for line in lines:
        places = [(across.place(a), up.place(b)) for a, b in line.spots]
        drawn.append(element("path", d="M" + " L".join(f"{a} {b}" for a, b in places), class_="roof"))
        end = places[0 if line.place == "begin" else -1]
        below = -4 if line.place == "above end" else 14
        drawn.append(_text(end[0], end[1] + below, line.caption, "label" if line.place == "begin" else "end"))
    for dot in dots:
        place = {"cx": across.place(dot.x), "cy": up.place(dot.y)}
        drawn.append(element("circle", element("title", dot.label), **place, r=4.5, class_=dot.kind))
        if dot.caption:
            beyond = place["cx"] > WIDTH * 0.62
            text_x = place["cx"] + (-8 if beyond else 8)
            drawn.append(_text(text_x, place["cy"] + 4, dot.caption, "end" if beyond else "label"))
    return _figure(title, height, drawn, headings, [(d.label, x[1](d.x), y[1](d.y)) for d in dots], captions)


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Return the meaning of colours: class, and what it stands for."""
    keys = [element("span", element("span", class_=f"key {kind}"), text, class_="entry") for kind, text in entries]
    return element("p", keys, class_="legend")


def _figure(
    title: str,
    height: float,
    drawn: Sequence[Html],
    headings: Sequence[str],
    rows: Sequence[Sequence[Content]],
    captions: Content = None,
) -> Html:
    """Return a chart with its title, what colours mean, and its figures as a table."""
    told = "; ".join(", ".join(str(cell) for cell in row if cell) for row in rows[:12])
    more = f"; and {len(rows) - 12} more" if len(rows) > 12 else ""
    inner = [element("title", title), element("desc", f"{', '.join(filter(None, headings))}: {told}{more}"), *drawn]
    svg = element("svg", inner, viewBox=f"0 0 {WIDTH} {height}", role="img", xmlns="http://www.w3.org/2000/svg")
    shown = folded("the same as a table", table(headings, rows))
    return element("figure", element("figcaption", title), svg, captions, shown)


def _grid_across(axis: Axis, top: float, bottom: float) -> list[Html]:
    """Return ticks, their figures and the label of a horizontal axis."""
    drawn = []
    for tick in axis.ticks():
        x = axis.place(tick)
        drawn.append(element("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        drawn.append(_text(x, bottom + 13, axis.form(tick), "tick"))
    middle = (axis.begin + axis.end) / 2
    return [*drawn, _text(middle, bottom + 31, axis.label, "axis")]


def _grid_up(axis: Axis, left: float, right: float) -> list[Html]:
    """Return ticks, their figures and the label of a vertical axis."""
    drawn = []
    for tick in axis.ticks():
        y = axis.place(tick)
        drawn.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        drawn.append(_text(left - 5, y + 4, axis.form(tick), "end tick"))
    middle = (axis.begin + axis.end) / 2
    label = _text(11, middle, axis.label, "axis", transform=f"rotate(-90 11 {middle})")
    return [*drawn, label]


def _spread(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Return ends of an axis with room around the values."""
    least, most = min(values), max(values)
    if log:
        return 10 ** math.floor(math.log10(least) - 0.05), 10 ** math.ceil(math.log10(most) + 0.05)
    room = (most - least) * 0.08 or abs(most) * 0.1 or 1
    return least - room, most + room


def _text(x: float, y: float, content: str, kind: str, transform: str | None = None) -> Html:
    return element("text", content, x=round(x, 2), y=round(y, 2), class_=kind, transform=transform)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
