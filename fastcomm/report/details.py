"""Tables beyond the first screen of `metrics`: ranks beside each other, and two runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.markup import escape

from fastcomm import result, units
from fastcomm.analyses.compare import BreakdownChange, Comparison
from fastcomm.metrics.across import Across
from fastcomm.metrics.result import Metrics
from fastcomm.report import files
from fastcomm.report.console import (
    TerminalTable,
    group_name,
    known_by,
    na,
    percent,
    plain_console,
    say,
    table,
)
from fastcomm.trace.schema import TAGS
from fastcomm.units import (
    format_bandwidth,
    format_bytes,
    format_ns,
    format_signed_ns,
    signed_percent,
)

_MOST_ROWS = 8
_MOST_CULPRITS = 3
_NOISE = 0.005  # of a step: ranks that differ by less are not worth a line

_MOST_VALUES = 12
_STEP_DIGITS = 4
# Of values that changed less than this share, none is worth a line.
_WORTH = 0.01
# Of several statistics of one thing, the one that says most.
_SHOWN = (
    ".mean_ns",
    ".avg_bus_bw",
    ".global_avg_util",
    ".bytes_per_step_per_gpu",
    ".comm_events",
)
_REASONS = {
    "bytes_per_step_per_gpu": "bytes",
    "avg_bus_bw": "bus bandwidth",
    "events": "events",
}


def culprits(found: Metrics) -> TerminalTable:
    """Return the ranks that make others wait the longest, where that is more than noise."""
    rows = table(
        *("rank", "wait caused a step", "of step", "last to arrive", "own wait a step"),
        drop=("own wait a step",),
    )
    mean = found.iteration.mean_ns or 0.0
    for each in found.across.by_wait_caused(_MOST_CULPRITS):
        if not mean or each.caused_ns < _NOISE * mean:
            continue
        rows.add_row(
            f"rank {each.rank}",
            format_ns(each.caused_ns),
            percent(each.caused_ns / mean),
            percent(each.last_share),
            format_ns(each.wait_ns),
        )
    return rows


def skew(found: Across) -> TerminalTable:
    """Classes of collectives: arrival skew and transfer time."""
    rows = table(
        *("collectives", "size from", "count", "mean skew", "p95 skew"),
        *("mean transfer", "p95 transfer", "waiting share"),
        drop=("p95 transfer", "p95 skew", "count"),
    )
    for each in found.skew[:_MOST_ROWS]:
        rows.add_row(
            f"{each.tag} {each.op}",
            na(each.size_from, format_bytes),
            str(each.count),
            *(
                format_ns(ns)
                for ns in (
                    each.skew_mean_ns,
                    each.skew_p95_ns,
                    each.transfer_mean_ns,
                    each.transfer_p95_ns,
                )
            ),
            percent(each.wait_share),
        )
    return rows


def waits(found: Across) -> TerminalTable:
    """The ranks that make others wait the longest, and their own waits by parallelism."""
    tags = [tag for tag in TAGS if any(each.tag == tag for each in found.waits)]
    rows = table(
        *("own waits a step", *tags, "last to arrive", "wait caused a step"), drop=tags[::-1]
    )
    wait = {(each.rank, each.tag): each.wait_ns for each in found.waits}
    for each in found.by_rank[:_MOST_ROWS]:
        rows.add_row(
            f"rank {each.rank}",
            *(na(wait.get((each.rank, tag)), format_ns) for tag in tags),
            percent(each.last_share),
            format_ns(each.caused_ns),
        )
    return rows


def slow_links(found: Across) -> TerminalTable:
    """Groups whose collectives are slower than those of their peers."""
    rows = table("slow links", "ranks", "bus bandwidth", "of peers", "longer a step")
    slow = [each for each in found.links if each.is_slow]
    for each in sorted(slow, key=lambda link: -(link.excess_ns or 0))[:_MOST_ROWS]:
        rows.add_row(
            f"{each.tag} {each.op}",
            _ranks(each.ranks),
            na(each.bus_bw, format_bandwidth),
            na(each.peers_bus_bw, format_bandwidth),
            na(each.excess_ns, lambda ns: f"+{format_ns(ns)}"),
        )
    return rows


def notes_across(found: Across) -> list[str]:
    """Explain the tables of many ranks."""
    note = found.matching.note
    said = [note] if note else []
    if not found.matching.matched:
        return said
    widest = max((each.spread_ns or 0 for each in found.offsets), default=0)
    times = f"aligned, to {format_ns(widest)}" if found.clocks == "aligned" else "raw"
    share = percent(found.matching.share)
    return [
        *said,
        "Skew: from the first to the last arrival; transfer: from there to the end. "
        "Wait caused: how long others wait in collectives because the rank is last; one delay "
        "counts in every collective that it reaches, so this can exceed the cost of a finding. "
        f"{share} of the collectives are matched across ranks; clocks {times}.",
    ]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    return shown + (" ..." if len(ranks) > _MOST_ROWS else "")


def tables(found: Metrics) -> list[TerminalTable]:
    """Return the tables of `--full`."""
    return [
        _exposed(found),
        _bandwidth(found),
        waits(found.across),
        skew(found.across),
        slow_links(found.across),
        _windows(found),
        _groups(found),
    ]


def _exposed(found: Metrics) -> TerminalTable:
    """Every part of the exact breakdown."""
    rows = table("every part of a step", "time", "share")
    mean = found.iteration.mean_ns
    for name, share in found.breakdown.exact.items():
        if share and mean is not None:
            rows.add_row(name.replace("_", " "), format_ns(share * mean), percent(share))
    return rows


def _bandwidth(found: Metrics) -> TerminalTable:
    rows = table(
        "bandwidth",
        f"algorithm ({found.bytes})",
        "bus",
        "share of link",
        "overlapped",
    )
    for tag in (tag for tag in TAGS if tag in found.volume):
        speed = found.bandwidth[tag]
        rows.add_row(
            tag,
            na(speed.avg_bw, format_bandwidth),
            na(speed.avg_bus_bw, format_bandwidth),
            percent(speed.avg_bus_util),
            percent(found.overlap.by_tag.get(tag)),
        )
    if found.volume:
        rows.add_row("all", "", "", "", percent(found.overlap.average_overlap_ratio))
    return rows


def _windows(found: Metrics) -> TerminalTable:
    rows = table("windows between phases", "count", "mean", "p50", "p95", drop=("p50",))
    for window in sorted(found.windows or (), key=lambda window: -window.mean_ns)[:_MOST_ROWS]:
        rows.add_row(
            f"{window.source} to {window.target}",
            str(window.count),
            *(format_ns(ns) for ns in (window.mean_ns, window.p50_ns, window.p95_ns)),
        )
    return rows


def _groups(found: Metrics) -> TerminalTable:
    rows = table(
        *("process groups", "ranks each", "parallelism", "known by", "on ranks", "events"),
        drop=("on ranks",),
    )
    for row in found.tables["group_tags"].to_pylist()[:_MOST_ROWS]:
        rows.add_row(
            escape(group_name(row["description"], row["size"])),
            na(row["size"], str),
            row["tag"],
            escape(known_by(row)),
            str(row["on_ranks"]),
            str(row["events"]),
        )
    return rows


def notes(found: Metrics) -> Iterator[str]:
    """Explain the tables of `--full`."""
    link = found.link_bandwidth
    yield "Parts of a step: compute hides communication, and both hide copies."
    yield "Bandwidth counts the wait for the last rank; " + (
        f"the link has {format_bandwidth(link)}."
        if link
        else "utilization is n/a without --link-bandwidth."
    )
    silent = ", ".join(
        f"{speed.events_without_bytes} of {tag}"
        for tag, speed in found.bandwidth.items()
        if speed.events_without_bytes
    )
    if silent:
        yield f"Events of unknown size are in no bandwidth and no volume: {silent}."
    yield from notes_across(found.across)


def spec_tables(found: Metrics) -> list[TerminalTable]:
    """Return the tables of `--spec`."""
    formula = table("specification formula", "share of step")
    for name, share in found.breakdown.spec.items():
        if share or name in ("compute", "idle"):
            formula.add_row(name.replace("_", " "), percent(share))
    use = table(f"utilization by {found.bytes}", "of all bytes", "mean", "p95")
    for tag in (tag for tag in TAGS if tag in found.bandwidth):
        speed = found.bandwidth[tag]
        shares = (speed.global_avg_util, speed.avg_util, speed.p95_util)
        use.add_row(tag, *map(percent, shares))
    return [formula, use]


def spec_notes(found: Metrics) -> Iterator[str]:
    """Explain the tables of `--spec`, and numbers in them that cannot be physical."""
    yield (
        "Formula: comm is the sum of the events' durations, compute the time without "
        "communication, idle the rest of the step."
    )
    idle = found.breakdown.spec["idle"]
    if idle is not None and idle < 0:
        yield (
            "Idle by the formula is negative: communication overlaps itself, and the sum of "
            "durations counts that time twice."
        )
    link = found.link_bandwidth
    yield "Utilization: bytes / time / link, " + (
        f"{format_bandwidth(link)}; only that of bus bytes has a limit of 100%."
        if link
        else "n/a without --link-bandwidth."
    )


def write(found: Comparison, folder: str | Path, *, xlsx: bool = False) -> list[Path]:
    """Write compare.json, and parts and values as CSV and Parquet; give their paths."""
    texts = {"compare.json": result.dumps(found.to_dict())}
    return files.write_tables(folder, texts, found.to_arrow(), "compare" if xlsx else None)


def show(found: Comparison, conditions: Sequence[str]) -> None:
    """Print the step, what its change consists of, and what else changed most."""
    console = plain_console()
    headline = _headline(found)
    if found.incomplete:
        headline = f"{headline.removesuffix('.')} [red]({escape(found.incomplete[0])})[/]"
    say(console, headline)
    for line in found.incomplete[1:]:
        say(console, f"[red]{escape(line)}[/]", hanging=2)
    if found.parts and not found.is_same:
        console.print(_parts(found))
        say(console, "parts of the mean step; their effects add up to its change", style="dim")
    changed = _changed(found)
    if changed.row_count:
        console.print(changed)
    for note in found.notes:
        say(console, f"[yellow]note:[/] {escape(note)}", hanging=2)
    for text in conditions:
        mark = "[red]FAIL[/]" if text in found.conditions_that_hold else "[green]ok[/]  "
        say(console, f"{mark} {escape(text)}", hanging=5)


def _headline(found: Comparison) -> str:
    step = found.step
    if step.before is None or step.after is None or step.difference is None:
        return "The change of the step is n/a: a run has no iteration times."
    if found.is_same:
        return "No difference."
    relative = "" if step.relative is None else f" ({signed_percent(step.relative, 2)})"
    change = f"{format_signed_ns(step.difference)}{relative}"
    return (
        f"[bold]An iteration takes {format_ns(step.after, _STEP_DIGITS)} instead of "
        f"{format_ns(step.before, _STEP_DIGITS)}: {change}[/]"
    )


def _parts(found: Comparison) -> TerminalTable:
    rows = table(
        *("part of the step", "before", "after", "effect", "with it changed"),
        texts=("with it changed",),
    )
    for part in found.parts:
        if part.before_ns or part.after_ns:
            rows.add_row(
                part.name.replace("_", " "),
                format_ns(part.before_ns),
                format_ns(part.after_ns),
                format_signed_ns(part.effect_ns),
                _reasons(part),
            )
    return rows


def _reasons(part: BreakdownChange) -> str:
    words = []
    for each in part.reasons:
        name = _REASONS.get(each.name.rpartition(".")[2], "overlap")
        words.append(f"{name} {signed_percent(each.relative or 0.0)}")
    return ", ".join(words)


def _changed(found: Comparison) -> TerminalTable:
    """Other values, the largest relative change first; --json has all."""
    rows = table("other metrics", "before", "after", "change", drop=("before", "after"))
    known = [
        each
        for each in found.values
        if abs(each.relative or 0) >= _WORTH
        and each.name.startswith(("windows.", "bandwidth.", "volume.", "overlap."))
        and (each.name.startswith("overlap.") or each.name.endswith(_SHOWN))
    ]
    known.sort(key=lambda each: -abs(each.relative or 0))
    for each in known[:_MOST_VALUES]:
        words = (_in_unit(each.name, value) for value in (each.before, each.after))
        rows.add_row(escape(each.name), *words, signed_percent(each.relative or 0.0))
    return rows


def _in_unit(name: str, value: float | None) -> str:
    """A value as a person reads it, by the ending of its name."""
    if value is None:
        return "n/a"
    last = name.rpartition(".")[2]
    if last.endswith("_ns"):
        return format_ns(value)
    if last.endswith("_bw"):
        return format_bandwidth(value)
    if "bytes" in last and not last.startswith("events"):
        return format_bytes(value)
    if "util" in last or name.startswith("overlap."):
        return units.percent(value)
    return f"{value:g}"
