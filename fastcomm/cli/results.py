"""The options that say where a result goes: to stdout as JSON, into files, onto a page."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from fastcomm.cli.options import OutputFile, OutputFolder

F = TypeVar("F", bound=Callable[..., Any])


def _beside_files(ctx: click.Context, _option: click.Parameter, said: bool) -> bool:
    """A workbook lies where the other files do."""
    if said and not ctx.params.get("output"):
        raise click.UsageError("--xlsx lies among the files of --output; wanted both", ctx)
    return said


def result_options(files: str, *, xlsx: bool = True, html: bool = True) -> Callable[[F], F]:
    """Add `--json`, `--output`, and where there are such, `--xlsx` and `--html`.

    `files` is what `--output` writes. The command gets `as_json`, `output`, `xlsx` and `html`.
    """
    options = [
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        # Eager: known when --xlsx is looked at.
        click.option(
            "--output", "-o", type=OutputFolder(), metavar="DIR", help=files, is_eager=True
        ),
    ]
    if xlsx:
        options.append(
            click.option(
                "--xlsx",
                is_flag=True,
                callback=_beside_files,
                help="With --output: the tables as one Excel workbook, too.",
            )
        )
    if html:
        options.append(
            click.option(
                "--html",
                type=OutputFile(),
                metavar="FILE",
                help="Write a page for the browser, in one file that needs no network.",
            )
        )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add
