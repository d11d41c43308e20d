"""The command tree. Subcommands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

T = TypeVar("T")

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


@contextmanager
def readable(command: str) -> Iterator[None]:
    """Report errors of ResiHP and of reading files, and exit with status 2."""
    from resihp.contracts import ResiHPError

    try:
        yield
    except (ResiHPError, OSError, UnicodeDecodeError) as error:
        words = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            words = f"{error.filename}: {error.strerror.lower()}"
        fail(words, f"resihp {command}")


def text_of(path: Path) -> str:
    """Return the text of a file. Raises `ContractError` that names it if it holds no UTF-8."""
    from resihp.contracts import ContractError

    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ContractError(str(path), "is not a text file in UTF-8") from None


def parsed(path: Path, parse: Callable[[str], T]) -> T:
    """Return what `parse` makes of the text of a file. Raises `ContractError` that names the file
    and the field."""
    from resihp.contracts import ContractError

    try:
        return parse(text_of(path))
    except ContractError as error:
        raise error if error.field == str(path) else ContractError(str(path), str(error)) from None


def fail(problem: str, source: str = "resihp") -> NoReturn:
    """Print one line on standard error and exit with status 2."""
    typer.echo(f"{source}: {' '.join(problem.split())}", err=True)
    raise typer.Exit(2)
