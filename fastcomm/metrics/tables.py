"""The metrics of a run on one screen; `--full` and `--spec` print more tables below it.

From top to bottom: what was measured, skipped ranks, findings, warnings, the breakdown, one
line per parallelism, and the ranks that cause waits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from fastcomm.errors import inert_parts
from fastcomm.idle import totals
from fastcomm.metrics import outside_steps
from fastcomm.metrics.across_ranks import AcrossRanks
from fastcomm.metrics.breakdown import EXACT, RankMeans
from fastcomm.metrics.links import Link
from fastcomm.metrics.result import NO_FLOPS, Metrics
from fastcomm.metrics.skew import RankWaits, Skew
from fastcomm.metrics.traffic import Bandwidth
from fastcomm.show.charts import THIN
from fastcomm.show.console import (
    COMMAND,
    TerminalTable,
    marked,
    na,
    percent,
    plain_console,
    say,
    shown,
    table,
)
from fastcomm.show.tables import NA, Medium, ResultTable, TableCell, TableColumn
from fastcomm.trace.parallelisms import LOOKS, TAGS
from fastcomm.trace.run_traces import ranks_words
from fastcomm.units import counted, format_bandwidth, format_bytes, format_ns, plural

_NO_MEMBERS = "the trace does not record the members of the group"
_MOST_ROWS = 8
_MOST_CULPRITS = 3
_NOISE = 0.005  # of a step: ranks that differ by less are not worth a line
_LEVELS = {"node": "inside nodes", "network": "between nodes"}
_NODES_BY = {
    "hosts": "hosts as the traces name them",
    "gpus_per_node": "--gpus-per-node, which ranks fill in order",
    "cluster": "of the cluster's size, which ranks fill in order",
}
_BAR = 96
_SMALL_BAR = 24
_MOST_RANKS = 24  # at each end of their order
MOST_LISTED = 64  # ranks that are listed all
_EXACT_DIGITS = 4  # of the step time and of its bytes
_MOST_FINDINGS = 3
_MOST_WARNINGS = 4
_MOST_LINES = 3  # of a warning
_SKIPPED, _WARNING = "[red]skipped:[/]", "[yellow]warning:[/]"
_COLORS = {
    "compute": "green",
    **{f"exposed_{tag}": look.terminal for tag, look in LOOKS.items()},
    "exposed_mixed": "bright_magenta",
    "memcpy": "bright_blue",
    "idle": "bright_black",
}
_EXPOSED = "exposed_"
_WAITS = ("wait/step", "transfer/step")


def part_name(key: str) -> str:
    """Return the printed name of a part of the exact breakdown, given its key in JSON."""
    return "copies" if key == "memcpy" else key.replace("_", " ")


def windows(metrics: Metrics) -> ResultTable:
    """Return the windows between phases by pair of parallelisms, longest mean first."""
    return ResultTable(
        name="windows-table",
        caption="Windows by pair of parallelisms",
        heading="windows between phases",
        columns=(
            TableColumn("windows", lambda window: f"{window.source} to {window.target}"),
            TableColumn("count", "count", "count", "metrics.windows.count"),
            TableColumn("mean", "mean_ns", "ns", "metrics.windows.mean_ns"),
            TableColumn("median", "p50_ns", "ns", "metrics.windows.p50_ns", drop=1),
            TableColumn("p95", "p95_ns", "ns", "metrics.windows.p95_ns"),
        ),
        rows=sorted(metrics.windows or (), key=lambda window: -window.mean_ns),
    )


def groups(metrics: Metrics) -> ResultTable:
    """Return the process groups, and where their parallelism is known from."""
    return ResultTable(
        name="groups-table",
        caption="Process groups, and the evidence for their parallelism",
        heading="process groups",
        columns=(
            TableColumn("process group", _group_name),
            *_GROUP,
            TableColumn("level", "level", drop=2, only="terminal"),
            TableColumn("on ranks", "on_ranks", "count", "metrics.groups.on_ranks", drop=1),
            TableColumn("events", "events", "count", "metrics.groups.events"),
        ),
        rows=metrics.tables["group_tags"].to_pylist(),
    )


def kinds_of_groups(kinds: Sequence[Mapping[str, Any]]) -> ResultTable:
    """Return the kinds of process groups; `kinds` are rows of `info.info.kinds`."""
    return ResultTable(
        name="groups-table",
        caption="Kinds of process groups",
        heading="process groups",
        columns=(
            TableColumn("process group", _group_name),
            TableColumn("groups", "groups", "count", drop=2),
            *_GROUP,
            TableColumn("on ranks", "ranks", "count", "metrics.groups.on_ranks", drop=1),
            TableColumn("events", "events", "count", "metrics.groups.events"),
        ),
        rows=kinds,
    )


def _group_name(row: Mapping[str, Any]) -> str:
    """Return the description of a process group, or a replacement if it has none."""
    return row["description"] or ("not named" if row["size"] is None else "undefined")


def _known_by(row: Mapping[str, Any]) -> str:
    """Return the source of a group's parallelism, and the candidates that fit it."""
    fits = f" ({row['candidates']})" if row["candidates"] else ""
    return f"{row['tag_source']}{fits}"


_GROUP = (
    TableColumn("ranks each", "size", "count", "metrics.groups.size", why=_NO_MEMBERS),
    TableColumn("parallelism", "tag"),
    TableColumn("known by", _known_by),
)


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


def _rank_pairs(metrics: Metrics) -> TerminalTable:
    """Return the pairs of ranks between which all-to-alls send the most bytes."""
    rows = table("all-to-all of ranks", "sent/step", "parallelism")
    for pair in metrics.rank_pairs.pairs[:_MOST_ROWS]:
        rows.add_row(
            f"{pair.source} to {pair.target}", na(pair.bytes_per_step, format_bytes), pair.tag
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


_CAUSED = TableColumn("wait caused/step", "caused_ns", "ns", "metrics.waits.wait_caused_ns")
_OWN_WAIT = TableColumn("own wait/step", "wait_ns", "ns", "metrics.waits.wait_ns", drop=1)
_LAST = TableColumn("last to arrive", "last_share", "share", "metrics.waits.last_share")


def _rank_cell(row: RankWaits) -> TableCell:
    """Return the cell that names a rank."""
    return TableCell(value=row.rank, text=f"rank {row.rank}")


def culprits(metrics: Metrics) -> ResultTable:
    """Return the ranks that cause the longest waits, if that is more than noise."""
    mean = metrics.iteration.mean_ns or 0.0
    rows = metrics.across.by_wait_caused(_MOST_CULPRITS)
    of_step = TableColumn("of step", lambda row: row.caused_ns / mean, "share")
    return ResultTable(
        name="culprits-table",
        caption="Ranks that cause waits",
        columns=(TableColumn("rank", _rank_cell), _CAUSED, of_step, _LAST, _OWN_WAIT),
        rows=[row for row in rows if mean and row.caused_ns >= _NOISE * mean],
    )


def waits(ranks: Sequence[RankWaits]) -> ResultTable:
    """Return the waits and transfers of each rank, per step."""
    return ResultTable(
        name="waits-table",
        caption="Ranks, per step",
        columns=(
            TableColumn("rank", _rank_cell),
            _OWN_WAIT,
            _CAUSED,
            TableColumn("later", "later_ns", "ns", "metrics.waits.later_ns"),
            TableColumn("transfers", "transfer_ns", "ns", "metrics.waits.transfer_ns"),
            _LAST,
        ),
        rows=ranks,
    )


def waits_by_parallelism(across: AcrossRanks) -> ResultTable:
    """Return the ranks that cause the longest waits, and their own waits by parallelism."""
    tags = [tag for tag in TAGS if any(row.tag == tag for row in across.waits)]
    wait = {(row.rank, row.tag): row.wait_ns for row in across.waits}

    def own_waits(tag: str, drop: int) -> TableColumn:
        return TableColumn(tag, lambda row: wait.get((row.rank, tag)), "ns", drop=drop)

    return ResultTable(
        name="tags-table",
        caption="Waits of ranks by parallelism, per step",
        heading="own waits/step",
        columns=(
            TableColumn("rank", _rank_cell),
            *(own_waits(tag, len(tags) - place) for place, tag in enumerate(tags)),
            _LAST,
            _CAUSED,
        ),
        rows=across.by_rank[:_MOST_ROWS],
    )


def class_name(row: Skew | Link) -> str:
    """Return the label of a class of collectives: "TP all_reduce, 4.19 MB"."""
    size = row.size_from
    return f"{_kind(row)}, {'any size' if size is None else format_bytes(size)}"


def _kind(row: Skew | Link) -> str:
    """Return the label of collectives of any size: "TP all_reduce"."""
    return f"{row.tag} {row.op}"


def skew(across: AcrossRanks) -> ResultTable:
    """Return arrival skew and transfer time by class of collectives, by wait time."""
    return ResultTable(
        name="skew-table",
        caption="Collectives",
        columns=(
            TableColumn("collectives", class_name, only="page"),
            TableColumn("collectives", _kind, only="terminal"),
            TableColumn("size from", "size_from", "bytes", only="terminal"),
            TableColumn("count", "count", "count", "metrics.skew.count", drop=3),
            TableColumn("mean skew", "skew_mean_ns", "ns", "metrics.skew.skew_mean_ns"),
            TableColumn("p95 skew", "skew_p95_ns", "ns", "metrics.skew.skew_p95_ns", drop=2),
            TableColumn(
                "mean transfer", "transfer_mean_ns", "ns", "metrics.skew.transfer_mean_ns"
            ),
            TableColumn("p95 transfer", "transfer_p95_ns", "ns", drop=1, only="terminal"),
            TableColumn("wait/step", "wait_ns", "ns", "metrics.skew.wait_ns", only="page"),
            TableColumn("waiting share", "wait_share", "share", "metrics.skew.wait_share"),
        ),
        rows=across.skew,
    )


def volume(metrics: Metrics) -> ResultTable:
    """Return the events and bytes of each parallelism."""
    unit = "rank" if metrics.is_host_run else "GPU"
    return ResultTable(
        name="volume-table",
        caption=f"Volume by parallelism, in {metrics.bytes} bytes",
        columns=(
            TableColumn("by parallelism", "tag"),
            TableColumn("events", "comm_events", "count", "metrics.volume.comm_events"),
            TableColumn(
                "unknown size", "unsized", "count", "metrics.bandwidth.events_without_bytes"
            ),
            _sized("bytes", "comm_bytes"),
            _sized("per iteration", "bytes_per_iteration"),
            _sized(f"per step and {unit}", "bytes_per_step_per_gpu"),
        ),
        rows=[
            {"tag": tag, "unsized": metrics.bandwidth[tag].events_without_bytes, **asdict(own)}
            for tag, own in metrics.volume.items()
        ],
    )


def _sized(label: str, name: str) -> TableColumn:
    """Return a column of bytes, which are unknown if events have unknown sizes."""

    def cell(row: Mapping[str, Any]) -> TableCell:
        events = row["unsized"]
        why = f"{_thousands(events)} {plural(events, 'event')} of unknown size"
        return TableCell(value=row[name], why=why)

    return TableColumn(label, cell, "bytes", f"metrics.volume.{name}")


def _thousands(count: int) -> str:
    """Return a count with thousands apart, as pages show them."""
    return f"{count:,}".replace(",", THIN)


_RANK_TIMES = {
    "iteration": ("time", "metrics.iteration.by_rank.mean_ns"),
    "compute": ("compute", "metrics.breakdown.exact.compute"),
    "exposed": ("exposed", "pages.exposed"),
    "copies": ("memcpy", "metrics.breakdown.exact.memcpy"),
    "idle": ("idle", "metrics.breakdown.exact.idle"),
}


def ranks(means: RankMeans, why: str) -> ResultTable:
    """Return the mean times of each rank, or of many ranks those at both ends of the order.

    `why` explains unknown times.
    """
    count, middle = len(means.ranks), means.median_compute
    order, caption = np.arange(count), "Ranks, means over their iterations"
    if count > MOST_LISTED:
        chosen = means.by_compute[::-1] if means.is_known else np.argsort(-means.ns["time"])
        order = np.concatenate([chosen[:_MOST_RANKS], chosen[-_MOST_RANKS:]])
        most, least = ("most", "least") if means.is_known else ("longest", "shortest")
        measure = "compute" if means.is_known else "steps"
        least_ranks = f"the {_MOST_RANKS} with the {least}"
        ends = f"The {_MOST_RANKS} ranks with the {most} {measure} and {least_ranks}"
        caption = f"{ends}, of {_thousands(count)}"

    def mean(name: str) -> Callable[[int], float | None]:
        return lambda at: None if np.isnan(means.ns[name][at]) else float(means.ns[name][at])

    def above(at: int) -> float | None:
        return float(means.ns["compute"][at]) / middle - 1 if middle else None

    def rank(at: int) -> TableCell:
        number = int(means.ranks[at])
        return TableCell(value=number, text=f"rank {number}")

    return ResultTable(
        name="ranks-table",
        caption=caption,
        columns=(
            TableColumn("rank", rank),
            *(
                TableColumn(label, mean(name), "ns", key, why=why)
                for label, (name, key) in _RANK_TIMES.items()
            ),
            TableColumn("compute vs. median", above, "change", "pages.above_median", why=why),
        ),
        rows=order.tolist(),
    )


_NO_PEERS = "there is no other group of this class"


def links(rows: Sequence[Link]) -> ResultTable:
    """Return links, the most lost time against their peers first."""
    return ResultTable(
        name="links-table",
        caption="Links, by time lost against their peers",
        columns=(
            TableColumn("group", _members, only="page"),
            TableColumn("collectives", class_name, only="page"),
            TableColumn("slow links", _kind, only="terminal"),
            TableColumn("ranks", _ranks, only="terminal"),
            TableColumn(
                *("bus bandwidth", "bus_bw", "bytes_per_s", "metrics.links.bus_bw"),
                why="no transfer took time",
            ),
            TableColumn(
                *("of peers", "peers_bus_bw", "bytes_per_s", "metrics.links.peers_bus_bw"),
                why=_NO_PEERS,
            ),
            TableColumn(
                *("ratio", "ratio", "share", "metrics.links.ratio"),
                why=_NO_PEERS,
                only="page",
            ),
            TableColumn(
                *("lost/step", "excess_ns", "change_ns", "metrics.links.excess_ns"),
                why=_NO_PEERS,
            ),
        ),
        rows=sorted(rows, key=lambda link: -(link.excess_ns or 0.0)),
    )


def slow_links(across: AcrossRanks) -> TerminalTable:
    """Return the first groups whose collectives are slower than those of similar groups."""
    return shown(links([row for row in across.links if row.is_slow]).top(_MOST_ROWS))


def _ranks(link: Link) -> str:
    """Return the first 8 ranks of a group, separated by commas."""
    ranks = link.ranks or ()
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    return shown + (" ..." if len(ranks) > _MOST_ROWS else "")


def _members(link: Link) -> str:
    """Return the name of a group and its first 8 ranks: "tp_0: ranks 0, 1"."""
    ranks = link.ranks or ()
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    more = f" and {len(ranks) - _MOST_ROWS} more" if len(ranks) > _MOST_ROWS else ""
    text = f"ranks {shown}{more}" if ranks else "ranks unknown"
    return f"{link.group or 'undefined'}: {text}"


def notes_across(across: AcrossRanks) -> list[str]:
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


def detail_tables(metrics: Metrics) -> list[TerminalTable]:
    """Return the tables that `fastcomm metrics --full` adds, such as those of waits."""
    return [
        shown(parts(metrics)),
        _bandwidth(metrics),
        _node_pairs(metrics),
        _rank_pairs(metrics),
        shown(waits_by_parallelism(metrics.across)),
        shown(skew(metrics.across).top(_MOST_ROWS)),
        slow_links(metrics.across),
        shown(windows(metrics).top(_MOST_ROWS)),
        shown(groups(metrics).top(_MOST_ROWS)),
    ]


def parts(metrics: Metrics, why: str = "") -> ResultTable:
    """Return the parts of a step, by the exact partition and by the specification's formula.

    Parts that take no time are left out, but for idle. Collectives of the host that nothing
    hides have a row of their own: they are part of idle. `why` explains unknown values.
    """
    exact, formula = metrics.breakdown.exact, metrics.breakdown.spec
    mean, no_formula = metrics.iteration.mean_ns, TableCell(value=None, text="")
    rows: list[dict[str, Any]] = []
    for name in EXACT:
        spec = formula.get(name, formula.get(f"comm_{name.removeprefix(_EXPOSED)}"))
        if exact[name] or spec or name == "idle":
            has_formula = name not in ("memcpy", f"{_EXPOSED}mixed")
            cell = TableCell(value=spec, why=why) if has_formula else no_formula
            rows.append({"name": part_name(name), "share": exact[name], "formula": cell})
    if host := metrics.host_communication:
        alone = host.alone_ns_per_step
        share = None if alone is None or not mean else alone / mean
        name = "host's collectives, part of idle"
        rows.append({"name": name, "share": share, "formula": no_formula})

    def time(row: Mapping[str, Any]) -> float | None:
        return None if row["share"] is None or mean is None else row["share"] * mean

    return ResultTable(
        name="breakdown-table",
        caption="Shares of the step",
        heading="every part of a step",
        columns=(
            TableColumn("time of a step", "name"),
            TableColumn("time", time, "ns", "pages.exact_ns", why=why),
            TableColumn(
                "share",
                lambda row: TableCell(value=row["share"], why=why, bar=row["share"]),
                "share",
                "metrics.breakdown.exact",
            ),
            TableColumn("formula", "formula", "share", "metrics.breakdown.spec", only="page"),
        ),
        rows=rows,
    )


NO_LINK = "the link's bandwidth is unknown: pass --link-bandwidth"
NO_BYTES = "no event has a known size"
NO_GROUP = "bus bytes depend on the number of ranks, which no event has"


def bandwidth(metrics: Metrics) -> ResultTable:
    """Return bandwidth, utilization and overlap by parallelism."""
    overlap = metrics.overlap.by_tag
    return ResultTable(
        name="bandwidth-table",
        caption=f"Bandwidth by parallelism, in {metrics.bytes} bytes",
        heading="bandwidth",
        columns=(
            TableColumn("by parallelism", 0),
            TableColumn(
                *(f"algorithm ({metrics.bytes})", _speed("avg_bw"), "bytes_per_s"),
                "metrics.bandwidth.avg_bw",
            ),
            TableColumn(
                *("bus", _speed("avg_bus_bw"), "bytes_per_s", "metrics.bandwidth.avg_bus_bw")
            ),
            _use("utilization", "global_avg_util", "page"),
            _use("share of link", "avg_bus_util"),
            _use("p95", "p95_util", "page"),
            TableColumn(
                "overlapped", lambda row: overlap.get(row[0]), "share", only="terminal"
            ),
        ),
        rows=list(metrics.bandwidth.items()),
    )


def _utilization(metrics: Metrics) -> ResultTable:
    """Return the utilization of the specification by parallelism."""
    return ResultTable(
        name="utilization-table",
        caption="Utilization by parallelism",
        columns=(
            TableColumn(f"utilization by {metrics.bytes}", 0),
            _use("of all bytes", "global_avg_util"),
            _use("mean", "avg_util"),
            _use("p95", "p95_util"),
        ),
        rows=list(metrics.bandwidth.items()),
    )


def _use(label: str, name: str, only: Medium | None = None) -> TableColumn:
    """Return the column of a utilization of the link."""
    return TableColumn(label, _speed(name), "share", f"metrics.bandwidth.{name}", only=only)


def _speed(name: str) -> Callable[[tuple[str, Bandwidth]], TableCell]:
    """Return the function of the cell of a bandwidth or utilization, with why it is unknown."""
    is_bus, is_share = "_bus_" in name, name.endswith("_util")

    def cell(row: tuple[str, Bandwidth]) -> TableCell:
        speed = row[1]
        why = NO_LINK if is_share else NO_GROUP
        if speed.avg_bw is None:
            why = NO_BYTES
        elif is_bus and speed.avg_bus_bw is None:
            why = NO_GROUP
        value = getattr(speed, name)
        return TableCell(value=value, why=why, bar=value if is_bus and is_share else None)

    return cell


def _bandwidth(metrics: Metrics) -> TerminalTable:
    """Return the table of bandwidth and overlap, with the overlap of all."""
    rows = shown(bandwidth(metrics))
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
    return [formula, shown(_utilization(metrics))]


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


def show(
    metrics: Metrics, console: Console | None = None, *, full: bool = False, spec: bool = False
) -> None:
    """Print the metrics; plain text if the console is no terminal.

    Parameters
    ----------
    metrics
        The metrics of a run.
    console
        Where to print; stdout by default.
    full
        Print every table and every warning.
    spec
        Print the formulas of the specification and utilization by payload bytes.

    """
    console = plain_console(console)
    say(console, _title(metrics), hanging=2)
    for line in _skipped(metrics, console.width, full=full):
        say(console, line, hanging=2)
    for line in _sentences(metrics, full=full):
        say(console, line, indent=2, hanging=4)
    for line in _first(metrics.warnings, _WARNING, "warning", console.width, full=full):
        say(console, line, hanging=2)
    if metrics.breakdown.exact["idle"] is not None and console.is_terminal:
        console.print(_stack(metrics, min(_BAR, console.width - 4)))
    tables = [
        _breakdown(metrics),
        _parallelisms(metrics),
        network(metrics, by_parallelism=full),
        shown(culprits(metrics)),
    ]
    if full:
        tables += detail_tables(metrics)
    if spec:
        tables += spec_tables(metrics)
    for rows in tables:
        if rows.row_count:
            console.print()
            console.print(rows)
    console.print()
    for note in _notes(metrics, full=full, spec=spec):
        say(console, escape(note), hanging=2, style="dim")


def _sentences(metrics: Metrics, *, full: bool) -> list[str]:
    """Return the headline, then the findings in order, or a sentence if there are none."""
    printed = metrics.findings if full else metrics.findings[:_MOST_FINDINGS]
    lines = [f"[bold]{escape(metrics.headline)}[/]"]
    for finding in printed:
        color = "yellow" if finding.is_symptom else "bold red"
        lines.append(f"[{color}]{escape(finding.text)}[/] Confidence: {finding.confidence}.")
    if more := len(metrics.findings) - len(printed):
        lines.append(f"{counted(more, 'more finding')} with --full.")
    lines += [f"[green]{escape(metrics.health)}[/]"] if metrics.health else []
    lines += [metrics.throughput.sentence] if metrics.throughput.sentence else []
    return lines + [escape(line) for line in metrics.flops.sentences if _has_flops(metrics)]


def _has_flops(metrics: Metrics) -> bool:
    """Return whether FLOPs were counted."""
    return NO_FLOPS not in metrics.flops.unknown.values()


def _title(metrics: Metrics) -> str:
    """Return the line on ranks, steps, how these were found, and the step time."""
    times = metrics.iteration
    if times.mean_ns is not None and times.p99_ns is not None:
        measured = f"{format_ns(times.mean_ns, _EXACT_DIGITS)} a step"
        if sum(rank.iterations for rank in metrics.by_rank) > 1:
            measured += f", {format_ns(times.p99_ns, _EXACT_DIGITS)} p99"
    else:
        measured = "no step" if metrics.iterations is not None else NA
    steps = f"{NA} steps" if metrics.iterations is None else counted(metrics.iterations, "step")
    clock = f"; {metrics.iteration_clock} clock" if times.mean_ns is not None else ""
    ranks = ranks_words(len(metrics.measured_ranks), metrics.expected_ranks)
    return (
        f"[bold]{ranks}, {steps}[/] ({escape(', '.join(metrics.found_by))}{clock}): {measured}"
    )


def _stack(metrics: Metrics, width: int) -> Text:
    """Return the breakdown as one stacked bar of at most `width` cells."""
    bar, edge = Text("  "), 0.0
    for name, share in metrics.breakdown.exact.items():
        cells = round((edge + (share or 0)) * width) - round(edge * width)
        edge += share or 0
        bar.append("█" * cells if name != "idle" else "░" * cells, style=_COLORS[name])
    return bar


def _breakdown(metrics: Metrics) -> TerminalTable:
    """Return the parts of a step, which add up to all of it."""
    rows = table("part of a step", "time", "share", "")
    parts = metrics.breakdown.parts or {}
    for part, name, color in (
        ("compute", "compute", _COLORS["compute"]),
        ("exposed", "exposed communication", "red"),
        ("memcpy", "copies", _COLORS["memcpy"]),
        ("idle", "idle", _COLORS["idle"]),
    ):
        share = parts.get(part)
        bar = Text("█" * round((share or 0) * _SMALL_BAR), style=color)
        rows.add_row(name, _of_step(metrics, share), percent(share), bar)
    return rows


def _of_step(metrics: Metrics, share: float | None) -> str:
    """Format a share (0 to 1) of the mean step as a time; "n/a" if it is unknown."""
    mean = metrics.iteration.mean_ns
    return NA if share is None or mean is None else format_ns(share * mean)


def _parallelisms(metrics: Metrics) -> TerminalTable:
    """Return a row per parallelism; times and bytes per step, as means over ranks."""
    split = metrics.across.mean_waits()
    rows = table(
        "parallelism",
        "exposed/step",
        "of step",
        *(_WAITS if split else ()),
        f"{metrics.bytes}/step/{'rank' if metrics.is_host_run else 'GPU'}",
        "bus bandwidth",
        "events",
        drop=("events", *reversed(_WAITS)),
    )
    exact, guessed = metrics.breakdown.exact, guessed_tags(metrics)
    for tag in TAGS:
        share = exact[_EXPOSED + tag]
        if tag not in metrics.volume:
            continue
        waits = split.get(tag, (None, None)) if split else ()
        rows.add_row(
            Text(f"{tag} *" if tag in guessed else tag, style=_COLORS[_EXPOSED + tag]),
            _of_step(metrics, share),
            percent(share),
            *(na(ns, format_ns) for ns in waits),
            na(metrics.volume[tag].bytes_per_step_per_gpu, _exact_bytes),
            na(metrics.bandwidth[tag].avg_bus_bw, format_bandwidth),
            str(metrics.volume[tag].comm_events),
        )
    if share := exact[_EXPOSED + "mixed"]:
        rows.add_row("mixed", _of_step(metrics, share), percent(share))
    if host := metrics.host_communication:
        alone, step = host.alone_ns_per_step, metrics.iteration.mean_ns
        share = None if alone is None or not step else alone / step
        unknown = [NA] * (len(rows.headings) - 4)
        rows.add_row("host +", na(alone, format_ns), percent(share), *unknown, str(host.events))
    return rows


def _exact_bytes(count: float) -> str:
    """Format a number of bytes with four digits."""
    return format_bytes(count, _EXACT_DIGITS)


def guessed_tags(metrics: Metrics) -> set[str]:
    """Return the parallelisms that at least one group has only by a heuristic."""
    groups = metrics.tables["group_tags"].to_pylist()
    return {row["tag"] for row in groups if row["tag_source"] == "heuristic"}


def _notes(metrics: Metrics, *, full: bool, spec: bool) -> Iterator[str]:
    """Yield explanations of terms and tables."""
    causes = totals.sentence(metrics.idle, metrics.idle_names, metrics.iteration.mean_ns)
    yield from filter(None, [causes])
    if metrics.volume:
        yield _exposed_note(metrics)
    if any(not finding.is_symptom for finding in metrics.findings):
        yield "+ms per step: at most about what a fix saves; ranks late together share it."
    if culprits(metrics).rows:
        yield "Wait caused: waits of others in collectives that the rank joins last."
    if host := metrics.host_communication:
        yield (
            "host +: collectives of the host (gloo, MPI) run for "
            f"{na(host.ns_per_step, format_ns)} per step; exposed: the device does nothing, "
            "which also counts as idle."
        )
    if guessed_tags(metrics):
        yield (
            "* parallelism guessed from the traffic; set it with --tp, --pp, --dp, --ep, --cp "
            "or [[tags]] in --config."
        )
    on_host = metrics.is_host_run
    outside = outside_steps.outside_sentence(metrics.outside, is_host_run=on_host)
    if outside and not outside_steps.outside_warning(
        metrics.outside, metrics.iteration_clock, is_host_run=on_host
    ):
        yield f"{outside}."
    yield from [note] if (note := metrics.across.matching.note) and not full else []
    if full:
        yield from notes(metrics)
    if spec:
        yield from spec_notes(metrics)
    options = [
        *([] if full else ["--full (all tables)"]),
        *([] if spec else ["--spec (the specification's formulas)"]),
    ]
    if options:
        yield f"More: {', '.join(options)}, --json."


def _exposed_note(metrics: Metrics) -> str:
    """Return the explanation of exposed time, waits, and unknown parallelism."""
    is_mixed = bool(metrics.breakdown.exact[_EXPOSED + "mixed"])
    mixed = " (mixed: of several at once)" if is_mixed else ""
    waits = " Waits may be overlapped." if metrics.across.waits else ""
    other = " OTHER: the parallelism is unknown." if "OTHER" in metrics.volume else ""
    return f"Exposed: no compute runs{mixed}.{waits}{other}"


def _skipped(metrics: Metrics, width: int, *, full: bool) -> Iterator[str]:
    """Yield a line per rank that could not be read."""
    lines = [str(rank) for rank in metrics.skipped]
    yield from _first(lines, _SKIPPED, "skipped rank", width, full=full)


def _first(
    texts: Sequence[str], mark: str, noun: str, width: int, *, full: bool
) -> Iterator[str]:
    """Yield the first texts after a mark, each shortened to a few lines.

    `noun` is what the line on further texts calls one; `width` is that of the console in cells;
    `full` yields every text unshortened.
    """
    shown = texts if full else texts[:_MOST_WARNINGS]
    room = width * _MOST_LINES - len(Text.from_markup(mark)) - 1
    for text in shown:
        yield from marked(mark, text if full else _brief(text, room))
    if more := len(texts) - len(shown):
        yield f"{mark} {counted(more, f'more {noun}')} with --full"


def _brief(text: str, room: int) -> str:
    """Shorten a text to `room` cells at the end of a sentence or word.

    A text with a command for the reader to run stays whole.
    """
    if len(text) <= room or any(line.startswith(COMMAND) for line in inert_parts(text)):
        return text
    mark = " ... (--full)"
    start = text[: room - len(mark)]
    place = max(start.rfind(". "), start.rfind("; "), start.rfind(": "))
    if place < room // 2:
        place = start.rfind(" ")
    return start[: place + 1].rstrip() + mark
