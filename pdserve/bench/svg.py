"""A small SVG writer: rectangles, lines, curves and text, coloured by class for light and dark pages.

A drawing has a background of its own. Background and text change together with the reader's colour scheme, so text is
readable on any page. Used by `charts` and `bars`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

COLOURS = {
    # class: light, dark
    "series1": ("#0b5cd5", "#2f81f7"),
    "series2": ("#d98b1f", "#e3a03c"),
    "series3": ("#8a9099", "#8b949e"),
    "series4": ("#7db4f5", "#a5cdff"),
    "series5": ("#2f8f4e", "#56b870"),
    "series6": ("#8e5bd0", "#b48bf0"),
    "page": ("#ffffff", "#0d1117"),
}
SERIES = tuple(name for name in COLOURS if name != "page")
"""Colours of the services, in the order of the legend."""
TEXT, MUTED, GRID, RANGE = (
    ("#1f2328", "#e6edf3"),
    ("#59636e", "#9198a1"),
    ("#d1d9e0", "#3d444d"),
    ("#1f2328", "#e6edf3"),
)
SIZES = {"title": 16, "note": 12, "axis": 13, "label": 13, "value": 13, "tick": 12}
FONTS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
Point = tuple[float, float]


class Svg:
    """A drawing of a size in pixels; coordinates are from its upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self._parts: list[str] = []
        self.rect(0, 0, width, height, "page")

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Add a filled rectangle in a colour of `COLOURS`."""
        self._parts.append(
            f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Add a line of kind `grid` or `range`."""
        self._parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def curve(self, points: Sequence[Point], colour: str, *, dashed: bool = False, marks: bool = False) -> None:
        """Add straight lines from point to point; `marks`: with a dot at each."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<polyline class="curve {colour}-line" points="{path}"{dashes}/>')
        if marks:
            self._parts += [f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]

    def text(self, x: float, y: float, text: str, kind: str) -> None:
        """Add text from `x` to the right on the base line `y`; kind `... end` ends there, `... middle` is centred."""
        self._parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def inner(self) -> str:
        """Return the elements of the drawing."""
        return "\n".join(self._parts)

    def inline(self, title: str) -> str:
        """Return an element for an HTML page that has `sheet()`; `title` is what screen readers say."""
        width, height = self.size
        return (
            f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">\n'
            f"{self.inner()}\n</svg>"
        )

    def render(self, title: str, *, scheme: int | None = None) -> str:
        """Return the file. `scheme`: light (0) or dark (1) only; None: the reader's."""
        width, height = self.size
        css = sheet() if scheme is None else style(scheme, base=True)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(title)}</title>\n'
            f"<style>\n{css}\n</style>\n{self.inner()}\n</svg>\n"
        )


def grid(drawings: Sequence[Svg], columns: int) -> Svg:
    """Return one drawing with all of them, which have one size, in rows of `columns`."""
    width, height = drawings[0].size
    rows = math.ceil(len(drawings) / columns)
    whole = Svg(width * min(columns, len(drawings)), height * rows)
    for index, one in enumerate(drawings):
        at = f"{index % columns * width} {index // columns * height}"
        whole._parts.append(f'<g transform="translate({at})">\n{one.inner()}\n</g>')
    return whole


def sheet() -> str:
    """Return the CSS of drawings that follow the reader's colour scheme."""
    return f"{style(0)}\n@media (prefers-color-scheme: dark) {{\n{style(1)}\n}}"


def style(scheme: int, *, base: bool | None = None) -> str:
    """Return the CSS of the light (0) or dark (1) scheme; `base`: with fonts and anchors (default: light has them)."""
    rules = [f".{name} {{ fill: {pair[scheme]} }}" for name, pair in COLOURS.items()]
    rules += [f".{name}-line {{ stroke: {pair[scheme]} }}" for name, pair in COLOURS.items() if name != "page"]
    rules += [f".{name} {{ fill: {TEXT[scheme]}; font-size: {size}px }}" for name, size in SIZES.items()]
    rules += [f".note, .tick {{ fill: {MUTED[scheme]} }}"]
    rules += [f".grid {{ stroke: {GRID[scheme]} }}", f".range {{ stroke: {RANGE[scheme]}; stroke-width: 1.5 }}"]
    if scheme == 0 if base is None else base:
        rules += [f"text {{ font-family: {FONTS} }}", ".curve { fill: none; stroke-width: 2 }"]
        rules += [".title, .axis { font-weight: 600 }", ".end { text-anchor: end }", ".middle { text-anchor: middle }"]
    return "\n".join(rules)


def nice_top(value: float) -> tuple[float, float]:
    """Return the end of an axis from 0 that holds `value`, which is above 0, and the step of its ticks: a round
    number.
    """
    power = 10.0 ** math.floor(math.log10(value / 5))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value / 5)
    return math.ceil(value / step) * step, step
