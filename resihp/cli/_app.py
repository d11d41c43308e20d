"""The command tree. Subcommands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Keep hybrid-parallel training fast and alive on imperfect machines.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from resihp import __version__

        typer.echo(f"resihp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Declare the options of the command itself."""
