"""Where a report is printed."""

from rich.console import Console

_PIPE_WIDTH = 110


def plain_console(console: Console | None = None) -> Console:
    """The console itself, without colours and of a fixed width where it is no terminal."""
    console = console or Console()
    if console.is_terminal:
        return console
    return Console(file=console.file, width=_PIPE_WIDTH, no_color=True)
