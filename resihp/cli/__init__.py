"""The `resihp` command. Each subcommand is a module of this package."""

from __future__ import annotations

import sys

from resihp import _own_packages

_OURS = {"resihp", "detector", "scheduler", "service"}


def main() -> None:
    """Entry point of the `resihp` script."""
    _own_packages.pin()
    try:
        from . import _analyze, _demo, _plan, _replay, _run, _serve, _simulate, _worker  # noqa: F401
        from ._app import app

        app()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _OURS:
            raise
        sys.exit(
            f"resihp: {error.name} is not installed; the command line comes with `resihp[cli]`, "
            "what each command needs with `resihp[all]`"
        )
