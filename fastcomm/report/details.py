"""Tables beyond the first screen of `metrics`."""

from collections.abc import Iterator, Sequence

from fastcomm.metrics.across import Across
from fastcomm.metrics.result import Metrics
from fastcomm.report.console import TerminalTable, na, percent, shown, table
from fastcomm.report.tables.metrics import groups, part_name, windows
from fastcomm.trace.parallelisms import TAGS
from fastcomm.units import counted, format_bandwidth, format_bytes, format_ns

_MOST_ROWS = 8
_MOST_CULPRITS = 3
_NOISE = 0.005  # of a step: ranks that differ by less are not worth a line


_LEVELS = {"node": "inside nodes", "network": "between nodes"}


def network(metrics: Metrics, *, by_parallelism: bool) -> TerminalTable:
    """Return the traffic inside and between nodes.

    With `by_parallelism`, each one has a row, too; else the table is empty without limits of
    the network to compare with.
    """
    rows = table(
        "network", "sent/step/GPU", "bandwidth of a GPU", "of limit", "events", drop=("events",)
    )
    if not (by_parallelism or any(metrics.network.limits.values())):
        return rows
    for use in metrics.network.levels:
        if (use.tag is None and use.events) or (use.tag and by_parallelism):
            rows.add_row(
                _LEVELS[use.level] if use.tag is None else f"  {use.tag}",
                na(use.bytes_per_step_per_gpu, format_bytes),
                na(use.bandwidth, format_bandwidth),
                percent(use.utilization),
                str(use.events),
            )
    return rows


def _node_pairs(metrics: Metrics) -> TerminalTable:
    """Return the pairs of nodes between which the most bytes are sent."""
    rows = table("between nodes", "sent/step", "bandwidth of a GPU", "events")
    for pair in metrics.network.pairs[:_MOST_ROWS]:
        rows.add_row(
            f"{pair.source} to {pair.target}",
            na(pair.bytes_per_step, format_bytes),
            na(pair.bandwidth, format_bandwidth),
            str(pair.events),
        )
    return rows


_NODES_BY = {
    "hosts": "hosts as the traces name them",
    "gpus_per_node": "--gpus-per-node, which ranks fill in order",
    "cluster": "of the cluster's size, which ranks fill in order",
}


def _network_note(metrics: Metrics) -> str:
    """Return what nodes are, and what the table of the network leaves out; or why it is n/a."""
    traffic = metrics.network
    if traffic.nodes_by is None:
        return f"Traffic inside and between nodes is n/a: {traffic.unknown}."
    undivided = (
        f" The level of {counted(traffic.undivided_events, 'event')} is unknown."
        if traffic.undivided_events
        else ""
    )
    return (
        f"Network: bus bytes that ranks send, and these over the durations of their events, "
        f"waits included. Nodes: {_NODES_BY[traffic.nodes_by]}.{undivided}"
    )


def culprits(metrics: Metrics) -> TerminalTable:
    """Return the ranks that cause the longest waits, if that is more than noise."""
    rows = table(
        *("rank", "wait caused/step", "of step", "last to arrive", "own wait/step"),
        drop=("own wait/step",),
    )
    mean = metrics.iteration.mean_ns or 0.0
    for row in metrics.across.by_wait_caused(_MOST_CULPRITS):
        if not mean or row.caused_ns < _NOISE * mean:
            continue
        rows.add_row(
            f"rank {row.rank}",
            format_ns(row.caused_ns),
            percent(row.caused_ns / mean),
            percent(row.last_share),
            format_ns(row.wait_ns),
        )
    return rows


def skew(across: Across) -> TerminalTable:
    """Return arrival skew and transfer time by class of collectives."""
    rows = table(
        *("collectives", "size from", "count", "mean skew", "p95 skew"),
        *("mean transfer", "p95 transfer", "waiting share"),
        drop=("p95 transfer", "p95 skew", "count"),
    )
    for row in across.skew[:_MOST_ROWS]:
        rows.add_row(
            f"{row.tag} {row.op}",
            na(row.size_from, format_bytes),
            str(row.count),
            *(
                format_ns(ns)
                for ns in (
                    row.skew_mean_ns,
                    row.skew_p95_ns,
                    row.transfer_mean_ns,
                    row.transfer_p95_ns,
                )
            ),
            percent(row.wait_share),
        )
    return rows


def waits(across: Across) -> TerminalTable:
    """Return the ranks that cause the longest waits, and their own waits by parallelism."""
    tags = [tag for tag in TAGS if any(row.tag == tag for row in across.waits)]
    rows = table(
        *("own waits/step", *tags, "last to arrive", "wait caused/step"), drop=tags[::-1]
    )
    wait = {(row.rank, row.tag): row.wait_ns for row in across.waits}
    for row in across.by_rank[:_MOST_ROWS]:
        rows.add_row(
            f"rank {row.rank}",
            *(na(wait.get((row.rank, tag)), format_ns) for tag in tags),
            percent(row.last_share),
            format_ns(row.caused_ns),
        )
    return rows


def slow_links(across: Across) -> TerminalTable:
    """Return the groups whose collectives are slower than those of similar groups.

    Only the first `_MOST_ROWS` groups are listed, the most lost time per step first.
    """
    rows = table("slow links", "ranks", "bus bandwidth", "of peers", "lost/step")
    slow = [row for row in across.links if row.is_slow]
    for row in sorted(slow, key=lambda link: -(link.excess_ns or 0))[:_MOST_ROWS]:
        rows.add_row(
            f"{row.tag} {row.op}",
            _ranks(row.ranks),
            na(row.bus_bw, format_bandwidth),
            na(row.peers_bus_bw, format_bandwidth),
            na(row.excess_ns, lambda ns: f"+{format_ns(ns)}"),
        )
    return rows


def notes_across(across: Across) -> list[str]:
    """Return explanations of the tables that compare ranks."""
    note = across.matching.note
    notes_ = [note] if note else []
    if not across.matching.matched:
        return notes_
    widest = max((row.spread_ns or 0 for row in across.offsets), default=0)
    to = f", to {format_ns(widest)}" if across.times in ("aligned", "partly aligned") else ""
    times = f"{across.times}{to}"
    share = percent(across.matching.share)
    return [
        *notes_,
        "Skew: from the first to the last arrival; transfer: from there to the end. "
        "Wait caused: how long others wait in collectives because the rank is last; one delay "
        "counts in every collective that it reaches, so this can exceed the cost of a finding. "
        f"{share} of the collectives are matched across ranks; clocks {times}.",
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Return the first 8 ranks, separated by commas."""
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    return shown + (" ..." if len(ranks) > _MOST_ROWS else "")


def tables(metrics: Metrics) -> list[TerminalTable]:
    """Return the tables that `fastcomm metrics --full` adds, such as those of waits."""
    return [
        _exposed(metrics),
        _bandwidth(metrics),
        _node_pairs(metrics),
        waits(metrics.across),
        skew(metrics.across),
        slow_links(metrics.across),
        shown(windows(metrics).top(_MOST_ROWS)),
        shown(groups(metrics).top(_MOST_ROWS)),
    ]


def _exposed(metrics: Metrics) -> TerminalTable:
    """Return every part of the exact breakdown."""
    rows = table("every part of a step", "time", "share")
    mean = metrics.iteration.mean_ns
    for name, share in metrics.breakdown.exact.items():
        if share and mean is not None:
            rows.add_row(part_name(name), format_ns(share * mean), percent(share))
    return rows


def _bandwidth(metrics: Metrics) -> TerminalTable:
    """Return the table of algorithm bandwidth, bus bandwidth and overlap by parallelism."""
    rows = table(
        "bandwidth", f"algorithm ({metrics.bytes})", "bus", "share of link", "overlapped"
    )
    for tag in (tag for tag in TAGS if tag in metrics.volume):
        speed = metrics.bandwidth[tag]
        rows.add_row(
            tag,
            na(speed.avg_bw, format_bandwidth),
            na(speed.avg_bus_bw, format_bandwidth),
            percent(speed.avg_bus_util),
            percent(metrics.overlap.by_tag.get(tag)),
        )
    if metrics.volume:
        rows.add_row("all", "", "", "", percent(metrics.overlap.average_overlap_ratio))
    return rows


def notes(metrics: Metrics) -> Iterator[str]:
    """Yield explanations of the tables of `--full`.

    These are how the time of a step is divided, what bandwidth includes, the number of events
    of unknown size if there are any, and notes on matched collectives.
    """
    link = metrics.link_bandwidth
    yield (
        "Parts of a step: all time with compute is compute; of the rest, all time with "
        "communication is exposed communication (mixed: of several parallelisms at once), then "
        "all time with copies is copies."
    )
    yield "Bandwidth includes the wait for the last rank; " + (
        f"the link has {format_bandwidth(link)}."
        if link
        else "utilization is n/a without --link-bandwidth."
    )
    if metrics.volume and len(metrics.ranks) > 1:
        yield _network_note(metrics)
    unsized = ", ".join(
        f"{speed.events_without_bytes} of {tag}"
        for tag, speed in metrics.bandwidth.items()
        if speed.events_without_bytes
    )
    if unsized:
        yield f"Events of unknown size are in no bandwidth and no volume: {unsized}."
    yield from notes_across(metrics.across)


def spec_tables(metrics: Metrics) -> list[TerminalTable]:
    """Return the tables of `--spec`."""
    formula = table("specification formula", "share of step")
    for name, share in metrics.breakdown.spec.items():
        if share or name in ("compute", "idle"):
            formula.add_row(name.replace("_", " "), percent(share))
    use = table(f"utilization by {metrics.bytes}", "of all bytes", "mean", "p95")
    for tag in (tag for tag in TAGS if tag in metrics.bandwidth):
        speed = metrics.bandwidth[tag]
        shares = (speed.global_avg_util, speed.avg_util, speed.p95_util)
        use.add_row(tag, *map(percent, shares))
    return [formula, use]


def spec_notes(metrics: Metrics) -> Iterator[str]:
    """Yield explanations of the tables of `--spec`, and of numbers that cannot be physical."""
    yield (
        "Formula: comm is the sum of the events' durations, compute the time without "
        "communication, idle the rest of the step."
    )
    idle = metrics.breakdown.spec["idle"]
    if idle is not None and idle < 0:
        yield (
            "Idle by the formula is negative: communication overlaps itself, and the sum of "
            "durations counts that time twice."
        )
    link = metrics.link_bandwidth
    yield "Utilization: bytes / time / link, " + (
        f"{format_bandwidth(link)}; only that of bus bytes has a limit of 100%."
        if link
        else "n/a without --link-bandwidth."
    )
