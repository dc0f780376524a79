"""The page of a run: findings, sections, and the files beside it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastcomm import arrow_files
from fastcomm.analyses.report import RunPath
from fastcomm.metrics import gaps
from fastcomm.metrics.breakdown import RankMeans
from fastcomm.metrics.findings import Finding
from fastcomm.metrics.result import Metrics
from fastcomm.report import files, html
from fastcomm.report.commands import Suggestions
from fastcomm.report.console import group_name, known_by
from fastcomm.report.html import (
    Fact,
    Page,
    PageFinding,
    PageTable,
    Section,
    across,
    breakdown,
    columns,
    many,
    number,
    path,
    plain,
    ranks,
    speed,
    text,
    volume,
)
from fastcomm.trace.run import ranks_words, skipped_lines

MOST = 8

# Evidence worth a number on the page: its label, and how it is written.
_EVIDENCE: dict[str, tuple[str, Callable[[Any], str]]] = {
    "compute_ns": ("compute per step", html.ns),
    "peers_compute_ns": ("compute of its peers", html.ns),
    "idle_ns": ("idle per step", html.ns),
    "peers_idle_ns": ("idle time of its peers", html.ns),
    "wait_ns": ("waits for others", html.ns),
    "peers_wait_ns": ("its peers wait", html.ns),
    "bus_bw": ("bus bandwidth", html.rate),
    "peers_bus_bw": ("bus bandwidth of its peers", html.rate),
    "expert_bytes": ("expert traffic per step", html.size),
    "peers_expert_bytes": ("expert traffic of its peers", html.size),
    "exposed_wait_ns": ("waiting for the last rank", html.ns),
    "exposed_transfer_ns": ("transfer", html.ns),
    "overlap": ("of communication overlaps compute", html.percent),
    "spread_ns": ("spread between steps", html.ns),
}


def findings(suggestions: Suggestions) -> tuple[PageFinding, ...]:
    """Return the findings of a run in the order in which the terminal prints them."""
    return tuple(_finding(each, suggestions) for each in suggestions.metrics.findings[:MOST])


def _finding(found: Finding, suggestions: Suggestions) -> PageFinding:
    command = suggestions.next(found)
    return PageFinding(
        title=(found.text,),
        evidence=(
            html.fact("findings.cost_ns", found.cost_ns, html.ns, label="per step"),
            html.fact("findings.share", found.share, html.percent, label="of the step"),
            Fact(key="findings.confidence", text=found.confidence, label="confidence"),
            *_evidence(found),
        ),
        command=command.line if command else "",
        then=command.purpose if command else "",
        cost_ns=found.cost_ns,
    )


def _evidence(found: Finding) -> list[Fact]:
    return [
        html.fact("findings.evidence", getattr(found.evidence, name), form, label=label)
        for name, (label, form) in _EVIDENCE.items()
        if getattr(found.evidence, name) is not None
    ]


def run_page(
    found: Metrics,
    paths: Sequence[str],
    *,
    options: Sequence[str] = (),
    critical: RunPath | None = None,
    data: Sequence[tuple[str, str]] = (),
) -> Page:
    """Return the page of a run, with a critical path or the reason why there is none.

    Without `critical` it has neither. `paths` and `options` are the words of the user that open
    the run; suggested commands repeat them.
    """
    critical = critical or RunPath()
    by_rank = RankMeans.of(found.tables["iterations"])
    why = gaps.reason(found.lacks)
    sections = [
        breakdown.section(found, by_rank, why),
        volume.overlap_section(found, why),
        speed.section(found),
        volume.volume_section(found),
        volume.windows_section(found, why),
        ranks.section(found, by_rank, why),
        across.section(found),
    ]
    if critical.path is not None:
        sections.append(path.section(critical.path))
    sections.append(_measured_evidence(found))
    return Page(
        title="Communication report",
        source=" ".join(paths),
        headline=(found.headline,),
        health=found.health or "",
        facts=(*_about(found, why), *breakdown.facts(found, why)),
        findings=findings(Suggestions(metrics=found, arguments=(*paths, *options))),
        sections=tuple(sections),
        warnings=(
            *_left_out(found),
            *found.warnings,
            *([critical.why] if critical.why else []),
        ),
        data=tuple(data),
    )


def _about(found: Metrics, why: str) -> tuple[Fact, ...]:
    count = len(found.measured_ranks)
    return (
        html.fact("ranks", count, html.whole, label=_of_ranks(count, found.expected_ranks)),
        html.fact("iterations", found.iterations, html.whole, label="iterations", why=why),
    )


def _of_ranks(count: int, expected: int) -> str:
    """The word behind the number of ranks."""
    return ranks_words(count, expected).removeprefix(str(count)).strip()


def _left_out(found: Metrics) -> list[str]:
    """A line for each rank that could not be read and is in no number here."""
    return [f"skipped: {plain((line,))}" for line in skipped_lines(found.failed)]


def _measured_evidence(found: Metrics) -> Section:
    rows = tuple(
        (
            text(group_name(row["description"], row["size"])),
            number(row["size"], html.whole, "the trace does not say who is in the group"),
            text(row["tag"]),
            text(known_by(row)),
            number(row["on_ranks"], html.whole),
            number(row["events"], html.whole),
        )
        for row in found.tables["group_tags"].to_pylist()
    )
    table = PageTable(
        name="groups-table",
        caption="Process groups, and where their tags come from",
        columns=columns(
            *("process group", ("ranks each", "groups.size"), "tag", "by"),
            *(("on ranks", "groups.on_ranks"), ("events", "groups.events")),
        ),
        rows=rows,
    )
    how = ", ".join(found.found_by) or "no rule"
    return Section(
        name="evidence",
        title="What do these numbers rest on?",
        lead=(
            f"Iterations were found by {how}, and are cut by the {found.iteration_clock}'s "
            f"clock; bytes are {found.bytes} bytes. The tags of "
            "communication come from these process groups.",
        ),
        blocks=(table,) if rows else (),
    )


def write(tables: Mapping[str, pa.Table], page: Path) -> list[tuple[str, str]]:
    """Write the tables to `<page>-data`; the names to link to, and what each has."""
    folder = page.with_name(f"{page.stem}-data")
    names = {f"{name}.parquet": table for name, table in tables.items()}
    files.write(
        folder, {name: partial(arrow_files.write, table) for name, table in names.items()}
    )
    return [
        (f"{folder.name}/{name}", many(table.num_rows, "row")) for name, table in names.items()
    ]


def write_report(
    found: Metrics,
    output: str | Path = "report.html",
    *,
    critical: RunPath | None = None,
    paths: Sequence[str],
    options: Sequence[str] = (),
    with_data: bool = True,
) -> None:
    """Write the page that `fastcomm report` writes.

    `paths` and `options` (command line options that say how to read the run) are repeated in
    the commands that the page suggests. `with_data` writes the tables as Parquet to a folder
    beside the page.
    """
    output = Path(output)
    data = write(found.to_arrow(), output) if with_data else []
    page = run_page(found, paths, options=options, critical=critical, data=data)
    html.write(page, output)
