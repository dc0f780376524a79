"""Why a job hangs, on the terminal: the sentence, the chain of waiting, the evidence."""

from rich.console import Console
from rich.markup import escape

from fastcomm.errors import inert
from fastcomm.hang.result import Hang
from fastcomm.show.console import plain_console, say, shown
from fastcomm.show.tables import ResultTable, TableColumn
from fastcomm.trace.run_traces import ranges

_MOST_ROWS = 12


def chain(hang: Hang) -> ResultTable:
    """Return the chain of waiting: a row for each call that ranks stand in."""
    return ResultTable(name="chain", caption="", columns=_COLUMNS, rows=hang.links)


def _ranks(ranks: tuple[int, ...]) -> str:
    return ranges(ranks) or "n/a"


_COLUMNS = (
    TableColumn("ranks", lambda link: _ranks(link.ranks)),
    TableColumn("stand in", "call"),
    TableColumn("of", "group", drop=1),
    TableColumn("since", "since_ns", "ns", "hang.links.since_ns", drop=2),
    TableColumn("and wait for", lambda link: _ranks(link.waits_for), is_sentence=True),
)


def show(hang: Hang, console: Console | None = None) -> None:
    """Print the answer; plain text if the console is no terminal."""
    console = plain_console(console)
    color = "red" if hang.hang else "green"
    say(console, f"[bold {color}]{escape(inert(hang.headline))}[/]", hanging=2)
    if hang.hang:
        say(console, f"Confidence: {hang.confidence}. Kind: {hang.kind}.", hanging=2)
    table = chain(hang).top(_MOST_ROWS)
    if table.rows:
        console.print(shown(table))
    if more := hang.calls - len(table.rows):
        say(console, f"{more} more calls in which ranks stand: --html and --json have them")
    meaning = (hang.advice,) if hang.hang else ()
    for title, lines in (
        ("evidence", hang.evidence),
        ("next", hang.next),
        ("meaning", meaning),
    ):
        for line in lines:
            say(console, f"[bold]{title:<8}[/]  {escape(inert(line))}", hanging=10)
    if hang.missing or hang.unreadable:
        say(console, f"[bold]dumps   [/]  {hang.dumps} of {hang.world_size} ranks", hanging=10)
