"""matplotlib figures as inline SVG in the colours of the page.

matplotlib draws with placeholder colours, which are then replaced by the page's CSS variables: one
drawing serves the light and the dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Placeholder -> CSS variable of report.html.
INK, MUTED, GRID, BAND = "#010101", "#020202", "#030303", "#040404"
SERIES, SECOND, ALARM, DEAD = "#050505", "#060606", "#070707", "#080808"
HEAT = tuple(f"#0a0a{level:02x}" for level in range(6))
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    BAND: "--band",
    SERIES: "--series",
    SECOND: "--second",
    ALARM: "--alarm",
    DEAD: "--dead",
} | {colour: f"--heat{level}" for level, colour in enumerate(HEAT)}

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "resihp",
    "font.size": 10.5,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
}
_WIDTH_INCHES = 9.6


def inline_svg(name: str, draw: Callable[[Figure], None], *, height: float) -> str:
    """What `draw` puts on a figure of `height` inches, as an SVG element as wide as its place.

    `name` makes the ids of this drawing unique within the page.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        draw(figure)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = target.getvalue()
    return _for_page(text[text.index("<svg") :], name)


def _for_page(svg: str, name: str) -> str:
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", svg)
    # The page sets fonts and sizes; a style sheet inside the drawing would reach the whole page.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
