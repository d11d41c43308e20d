"""The command tree. Subcommands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Keep hybrid-parallel training fast and alive on imperfect machines.",
)
