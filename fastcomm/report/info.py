"""What a run is, on one screen."""

from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fastcomm.analyses.info import Info, RankInfo, kinds
from fastcomm.errors import shell_joined, shell_quoted
from fastcomm.report.console import (
    TerminalTable,
    group_name,
    known_by,
    na,
    plain_console,
    say,
    table,
)
from fastcomm.trace.run import ranges, ranks_words, skipped_lines
from fastcomm.units import counted, format_bytes, format_ns, plural

_MOST_ROWS = 12
_NS = 10**9


def show(found: Info, paths: tuple[str, ...], console: Console | None = None) -> None:
    """Print it to stdout; plain text where that is no terminal."""
    console = plain_console(console)
    for line in skipped_lines(found.failed):
        console.print(f"[red]skipped:[/] {escape(line)}", highlight=False, soft_wrap=True)
    for name, words in _facts(found):
        say(console, f"[bold]{name:<10}[/]  {escape(words)}", hanging=12)
    groups = _groups(found)
    if groups.row_count:
        console.print(groups)
    for line in _lines(found):
        say(console, line, hanging=2)
    for line in _next(found, paths):
        console.print(line, highlight=False, soft_wrap=True)


def _facts(found: Info) -> list[tuple[str, str]]:
    formats = ", ".join(sorted({each.format for each in found.details}))
    kind = f"stored {formats}" if found.stored else formats
    files = f"{counted(found.files, 'file')}, {format_bytes(found.size)}"
    return [
        ("format", f"{kind}: {files}"),
        ("ranks", _ranks(found)),
        ("read", _read(found)),
        ("time", _time(found.details)),
        ("iterations", _iterations(found)),
        ("clocks", _clocks(found)),
    ]


def _ranks(found: Info) -> str:
    world = "" if found.world_size is None else f" of {found.world_size}"
    missing = f"; missing: {ranges(found.missing)}" if found.missing else ""
    if len(found.ranks) < found.expected:
        count = ranks_words(len(found.ranks), found.expected)
        return f"{count}: {ranges(found.ranks)}{missing}"
    return f"{ranges(found.ranks)} ({len(found.ranks)}{world}){missing}"


def _read(found: Info) -> str:
    ranks = ranges([each.rank for each in found.details])
    unread = len(found.ranks) - len(found.details) - len(found.failed)
    more = "; --all reads all" if unread > 0 else ""
    return (
        f"{plural(len(found.details), 'rank')} {ranks}, {counted(found.events, 'event')}{more}"
    )


def _time(details: tuple[RankInfo, ...]) -> str:
    spans = [
        (each.start, each.stop)
        for each in details
        if each.start is not None and each.stop is not None and "times" not in each.lacks
    ]
    if not spans:
        return "unknown"
    if any(each.clock is None for each in details):
        longest = max(stop - start for start, stop in spans)
        return f"{format_ns(longest)}, absolute time unknown"
    first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
    moment = datetime.fromtimestamp(first // _NS, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC, {format_ns(last - first)}"


def _iterations(found: Info) -> str:
    if found.step_ns is None:
        return "none"
    numbers = sorted(set(found.iterations["number"].to_pylist()))
    rules = ", ".join(sorted({each.found_by for each in found.details}))
    return f"{ranges(numbers)} by {rules}, {format_ns(found.step_ns)} mean (host clock)"


def _clocks(found: Info) -> str:
    known = [
        (each.rank, each.clock_note) for each in found.details if each.clock_note is not None
    ]
    if not known and found.stored:
        return "unknown: no collective joins two of the ranks"
    if not known:
        return "not compared; `fastcomm ingest` does, by the ends of common collectives"
    rank, note = max(known, key=lambda pair: abs(pair[1].offset_ns))
    evidence = f"{counted(note.matches, 'collective')}, spread {format_ns(note.spread_ns)}"
    if not any(each.applies for _, each in known):
        return f"agree within {format_ns(abs(note.offset_ns))} ({evidence})"
    applied = sum(each.applies for _, each in known)
    return (
        f"{counted(applied, 'rank')} {plural(applied, 'needs')} correction "
        f"(ranks.parquet); the most, rank {rank} by "
        f"{format_ns(-note.offset_ns)} to agree with rank {note.reference} ({evidence})"
    )


def _groups(found: Info) -> TerminalTable:
    rows = table(
        *("process groups", "groups", "ranks each", "parallelism", "known by", "on ranks"),
        "events",
        drop=("on ranks", "groups"),
    )
    for row in kinds(found.groups)[:_MOST_ROWS]:
        rows.add_row(
            escape(group_name(row["description"], row["size"])),
            str(row["groups"]),
            na(row["size"], str),
            row["tag"],
            escape(known_by(row)),
            str(row["ranks"]),
            str(row["events"]),
        )
    return rows


def _lines(found: Info) -> list[str]:
    return [
        *(f"[yellow]warning:[/] {escape(warning)}" for warning in found.all_warnings),
        *(f"[cyan]lacks:[/] {escape(each)}" for each in found.lacks),
    ]


def _next(found: Info, paths: tuple[str, ...]) -> list[str]:
    """The commands to run next, one a line."""
    words = escape(shell_joined(paths))
    commands = [f"fastcomm metrics {words}"]
    if not found.stored:
        name = Path(paths[0]).name.partition(".")[0]
        store = shell_quoted(f"{name}-store" if name else "store")
        commands.append(f"fastcomm ingest {words} -o {escape(store)}")
    return ["[bold]next:[/]", *(f"    {command}" for command in commands)]
