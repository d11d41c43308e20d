"""Pages of all reports: one HTML file each that needs nothing else, light and dark."""

from __future__ import annotations

from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from resihp import formatting

from ._figures import PALETTE, svg


class KeyFigure(NamedTuple):
    """One of the large figures on top of a report. `tone` is good, bad or plain."""

    name: str
    figure: str
    detail: str = ""
    tone: str = "plain"


def render(package: str, template: str, **context: Any) -> str:
    """Render a template of a package; it extends `base.html` of this one.

    Values of type `Figure` become inline SVG named by their key.
    """
    loaders = [jinja2.PackageLoader(name, ".") for name in (package, "resihp.offline")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = {
        name: Markup(svg(value, name)) if isinstance(value, Figure) else value
        for name, value in context.items()
    }
    return environment.get_template(template).render(
        palette=PALETTE, formatting=formatting, **shown
    )
