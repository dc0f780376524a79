"""Where a report is printed."""

from typing import Any

from rich.console import Console
from rich.text import Text

from fastcomm.inert import inert

_PIPE_WIDTH = 110


class _InertConsole(Console):
    """A console on which names of a trace are letters, whatever is in them."""

    def render_str(self, text: str, **style: Any) -> Text:
        """As rich's, which leaves escape sequences in; every string passes here."""
        return super().render_str(inert(text), **style)


def plain_console(console: Console | None = None) -> Console:
    """The console itself, without colours and of a fixed width where it is no terminal."""
    console = console or _InertConsole(emoji=False)
    if console.is_terminal:
        return console
    return _InertConsole(file=console.file, width=_PIPE_WIDTH, no_color=True, emoji=False)
