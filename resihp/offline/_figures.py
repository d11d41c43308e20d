"""The plotting kit of all reports: figures in one style, their colours, and their SVG for a page.

matplotlib draws in the colours of the light theme. In the SVG for a page they become the page's CSS
variables, so that one drawing serves the light and the dark theme.
"""

from __future__ import annotations

import io
import re
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray


class Themed(NamedTuple):
    """A colour in the light and in the dark theme."""

    light: str
    dark: str


PALETTE = {
    "ink": Themed("#1b2430", "#e4e9ee"),
    "muted": Themed("#566474", "#98a5b3"),
    "surface": Themed("#ffffff", "#1a2027"),
    "grid": Themed("#d5dae1", "#36404b"),
    "band": Themed("#eef1f5", "#212931"),
    "series": Themed("#24709c", "#62aed8"),
    "second": Themed("#9a6fae", "#b893cb"),
    "alarm": Themed("#bf4a2b", "#ee8660"),
    "dead": Themed("#a78790", "#76565f"),
    "forward": Themed("#4c8dd6", "#5b9be0"),
    "backward": Themed("#1f5fa8", "#2f74c0"),
    "communication": Themed("#e0a33a", "#d09636"),
    "other": Themed("#9aa5b1", "#77828e"),
}
INK, MUTED, SURFACE, GRID, BAND, SERIES, SECOND, ALARM, DEAD = (
    PALETTE[name].light
    for name in ("ink", "muted", "surface", "grid", "band", "series", "second", "alarm", "dead")
)
FORWARD, BACKWARD, COMMUNICATION, OTHER = (
    PALETTE[name].light for name in ("forward", "backward", "communication", "other")
)
ON_SLOW = "#fdf6f4"
"""Text on the dark end of the scale of slowdowns, in both themes."""
# Nearly transparent for healthy devices, so that it suits both themes; nothing for NaN.
_SLOW = LinearSegmentedColormap.from_list("slow", ["#7d9ab51f", "#f0b088", "#cf4f35", "#8f1d14"])
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "resihp",
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
}
_WIDTH_INCHES = 9.6
_MOST_LINES = 64  # columns of a heat map that are separated by lines


def new_figure(
    height: float, *, rows: int = 1, grid: bool = False, **options: Any
) -> tuple[Figure, Any]:
    """A figure of `height` inches and its axes, one below the other."""
    with mpl.rc_context({**_STYLE, "axes.grid": grid}):
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    return figure, axes[0] if rows == 1 else axes


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page; `name` makes its ids unique within the page.

    The same figure gives the same text.
    """
    target = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    for variable, colour in PALETTE.items():
        text = text.replace(colour.light, f"var(--{variable})")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text)
    # The page sets fonts and sizes; a style sheet inside the drawing would reach the whole page.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    return re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)


def png(figure: Figure, dpi: int = 80) -> bytes:
    """The figure as a PNG file on white, for notebooks."""
    target = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(target, format="png", dpi=dpi)
    return target.getvalue()


def slowdown_map(
    figure: Figure,
    axes: Axes,
    slowdown: NDArray[np.floating],
    *,
    least_top: float = 1.2,
    **options: Any,
) -> float:
    """Draw slowdowns [rows, columns] as a heat map with its scale; returns the top of the scale.

    NaN is left empty.
    """
    finite = slowdown[np.isfinite(slowdown)]
    top = max(least_top, float(finite.max())) if finite.size else least_top
    image = axes.imshow(
        slowdown, cmap=_SLOW, vmin=1.0, vmax=top, aspect="auto", interpolation="nearest", **options
    )
    bar: Any = figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, aspect=14)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    return top


def cell_lines(axes: Axes, rows: int, columns: int) -> None:
    """Separate the cells of a heat map by lines."""
    if columns <= _MOST_LINES:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", axis="both", color=SURFACE, linewidth=1)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)


def sparse_ticks(count: int, most: int = 16) -> list[int]:
    """At most `most` evenly spaced indices of `count`."""
    return list(range(0, count, -(-count // most)))
