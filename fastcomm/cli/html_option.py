"""The option `--html`, which writes a result as a page."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def html_option(command: F) -> F:
    """Add `--html FILE`; the command gets it as `html`."""
    option = click.option(
        "--html",
        "html",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write a page for the browser, in one file that needs no network.",
    )
    return option(command)
