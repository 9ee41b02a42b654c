"""A small SVG writer for `charts`: rectangles, lines and text, coloured by class for light and dark pages.

The drawing has a background of its own. Background and text change together with the reader's colour scheme, so text is
readable on any page.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

COLOURS = {
    # class: light, dark
    "pair": ("#0b5cd5", "#2f81f7"),
    "own": ("#7db4f5", "#a5cdff"),
    "peer1": ("#d98b1f", "#e3a03c"),
    "peer2": ("#8a9099", "#8b949e"),
    "page": ("#ffffff", "#0d1117"),
}
TEXT, MUTED, GRID, RANGE = (
    ("#1f2328", "#e6edf3"),
    ("#59636e", "#9198a1"),
    ("#d1d9e0", "#3d444d"),
    ("#1f2328", "#e6edf3"),
)
SIZES = {"title": 16, "note": 12, "axis": 13, "label": 13, "value": 13, "tick": 12}


class Svg:
    """A drawing of a size in pixels; coordinates are from its upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._parts: list[str] = []
        self.rect(0, 0, width, height, "page")

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle in a colour of `COLOURS`."""
        self._parts.append(
            f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A line of kind `grid` or `range`."""
        self._parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def text(self, x: float, y: float, text: str, kind: str) -> None:
        """Text from `x` to the right on the base line `y`; kind `... end` ends there, `... middle` has its middle."""
        self._parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def render(self, title: str) -> str:
        """The file; `title` is what screen readers say."""
        width, height = self._size
        parts = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(title)}</title>\n'
            f"<style>\n{style(0)}\n@media (prefers-color-scheme: dark) {{\n{style(1)}\n}}\n</style>\n{parts}\n</svg>\n"
        )


def style(scheme: int) -> str:
    """CSS of the light (0) or dark (1) scheme."""
    rules = [f".{name} {{ fill: {pair[scheme]} }}" for name, pair in COLOURS.items()]
    rules += [f".{name} {{ fill: {TEXT[scheme]}; font-size: {size}px }}" for name, size in SIZES.items()]
    rules += [f".note, .tick {{ fill: {MUTED[scheme]} }}"]
    rules += [f".grid {{ stroke: {GRID[scheme]} }}", f".range {{ stroke: {RANGE[scheme]}; stroke-width: 1.5 }}"]
    if scheme == 0:
        rules += ["text { font-family: -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif }"]
        rules += [".title, .axis { font-weight: 600 }", ".end { text-anchor: end }", ".middle { text-anchor: middle }"]
    return "\n".join(rules)


def nice_top(value: float) -> tuple[float, float]:
    """The end of an axis from 0 that holds `value`, which is above 0, and the step of its ticks: a round number."""
    power = 10.0 ** math.floor(math.log10(value / 5))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value / 5)
    return math.ceil(value / step) * step, step
