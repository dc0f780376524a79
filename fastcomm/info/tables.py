"""What a run consists of, on one screen."""

from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fastcomm.errors import shell_joined, shell_quoted
from fastcomm.info.info import Info, RankInfo, kinds
from fastcomm.metrics.tables import kinds_of_groups
from fastcomm.show.console import marked, plain_console, say, shown
from fastcomm.trace.run_traces import ranges, ranks_words, skipped_lines
from fastcomm.units import counted, format_bytes, format_ns, plural

_MOST_ROWS = 12
_NS = 10**9


def show(info: Info, paths: tuple[str, ...], console: Console | None = None) -> None:
    """Print a summary of a run; plain text if the console is no terminal.

    Parameters
    ----------
    info
        The run.
    paths
        Arguments of the command, for the commands to go on with.
    console
        By default stdout.

    """
    console = plain_console(console)
    for line in skipped_lines(info.skipped):
        console.print(f"[red]skipped:[/] {escape(line)}", highlight=False, soft_wrap=True)
    for name, text in _facts(info):
        say(console, f"[bold]{name:<10}[/]  {escape(text)}", hanging=12)
    groups = kinds_of_groups(kinds(info.groups)).top(_MOST_ROWS)
    if groups.rows:
        console.print(shown(groups))
    for line in _lines(info):
        say(console, line, hanging=2)
    for line in _next(info, paths):
        console.print(line, highlight=False, soft_wrap=True)


def _facts(info: Info) -> list[tuple[str, str]]:
    """Return name and text of each fact: format, ranks, read ranks, time, steps, clocks."""
    formats = ", ".join(sorted({rank.format for rank in info.details}))
    kind = f"stored {formats}" if info.stored else formats
    files = f"{counted(info.files, 'file')}, {format_bytes(info.size)}"
    return [
        ("format", f"{kind}: {files}"),
        ("ranks", _ranks(info)),
        ("read", _read(info)),
        ("time", _time(info.details)),
        ("steps", _iterations(info)),
        ("clocks", _clocks(info)),
    ]


def _ranks(info: Info) -> str:
    """Return the ranks of the run, how many are expected, and which are missing."""
    world = "" if info.world_size is None else f" of {info.world_size}"
    missing = f"; missing: {ranges(info.missing)}" if info.missing else ""
    if len(info.ranks) < info.expected:
        count = ranks_words(len(info.ranks), info.expected)
        return f"{count}: {ranges(info.ranks)}{missing}"
    return f"{ranges(info.ranks)} ({len(info.ranks)}{world}){missing}"


def _read(info: Info) -> str:
    """Return the ranks that were read, and the number of their events."""
    ranks = ranges([rank.rank for rank in info.details])
    unread = len(info.ranks) - len(info.details) - len(info.skipped)
    more = "; --all reads all" if unread > 0 else ""
    return f"{plural(len(info.details), 'rank')} {ranks}, {counted(info.events, 'event')}{more}"


def _time(details: tuple[RankInfo, ...]) -> str:
    """Return the start (UTC) and duration of the run as text.

    If any rank has no clock, it is only the duration of the longest rank; "unknown" if no rank
    has times.
    """
    spans = [
        (rank.start, rank.stop)
        for rank in details
        if rank.start is not None and rank.stop is not None and "times" not in rank.missing_data
    ]
    if not spans:
        return "unknown"
    if any(rank.clock is None for rank in details):
        longest = max(stop - start for start, stop in spans)
        return f"{format_ns(longest)}, absolute time unknown"
    first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
    moment = datetime.fromtimestamp(first // _NS, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC, {format_ns(last - first)}"


def _iterations(info: Info) -> str:
    """Return the numbers of the iterations, the rules that found them, and the mean time."""
    if info.step_ns is None:
        return "none"
    numbers = sorted(set(info.iterations["number"].to_pylist()))
    rules = ", ".join(sorted({rank.found_by for rank in info.details}))
    return f"{ranges(numbers)} by {rules}, {format_ns(info.step_ns)} mean (host clock)"


def _clocks(info: Info) -> str:
    """Return how far the clocks of the ranks differ, and how well that is known."""
    notes = [
        (rank.rank, rank.clock_note) for rank in info.details if rank.clock_note is not None
    ]
    if not notes and info.stored:
        return "unknown: no collective joins two of the ranks"
    if not notes:
        return "not compared; `fastcomm ingest` compares them by the ends of common collectives"
    rank, note = max(notes, key=lambda pair: abs(pair[1].offset_ns))
    evidence = f"{counted(note.matches, 'collective')}, spread {format_ns(note.spread_ns)}"
    if not any(offset.applies for _, offset in notes):
        return f"agree within {format_ns(abs(note.offset_ns))} ({evidence})"
    applied = sum(offset.applies for _, offset in notes)
    return (
        f"{counted(applied, 'rank')} {plural(applied, 'needs')} correction "
        f"(ranks.parquet); the most, rank {rank} by "
        f"{format_ns(-note.offset_ns)} to agree with rank {note.reference} ({evidence})"
    )


def _lines(info: Info) -> list[str]:
    """Return the warnings and the missing data, a line each."""
    return [
        *(
            line
            for warning in info.all_warnings
            for line in marked("[yellow]warning:[/]", warning)
        ),
        *(f"[cyan]missing:[/] {escape(text)}" for text in info.missing_data),
    ]


def _next(info: Info, paths: tuple[str, ...]) -> list[str]:
    """Return the commands to run next, a line each."""
    arguments = escape(shell_joined(paths))
    commands = [f"fastcomm metrics {arguments}"]
    if not info.stored:
        name = Path(paths[0]).name.partition(".")[0]
        store = shell_quoted(f"{name}-store" if name else "store")
        commands.append(f"fastcomm ingest {arguments} -o {escape(store)}")
    return ["[bold]next:[/]", *(f"    {command}" for command in commands)]
