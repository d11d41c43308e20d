"""The `resihp` command. Each subcommand is a module of this package."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `resihp` script."""
    from . import _analyze, _demo, _plan, _replay, _serve, _simulate, _worker  # noqa: F401
    from ._app import app

    app()
