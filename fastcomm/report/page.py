"""Page of a run: findings, sections, and the data files next to the page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from fastcomm import arrow_files
from fastcomm.critical_path import page as critical_path_page
from fastcomm.critical_path.candidates import Candidate
from fastcomm.critical_path.result import CriticalPath
from fastcomm.metrics import missing_data, traffic_page, waits_page
from fastcomm.metrics import page as metrics_page
from fastcomm.metrics.findings.suggestions import Suggestions
from fastcomm.metrics.result import NO_FLOPS, Metrics
from fastcomm.metrics.tables import NO_LINK, groups
from fastcomm.report import findings as findings_page
from fastcomm.report.analysis import PageResults
from fastcomm.show import files, pages
from fastcomm.show.pages import Block, Missing, Page, PageTable, Section, many, plain, table
from fastcomm.show.pages import write as write_page
from fastcomm.timeline import page as timelines
from fastcomm.timeline.timeline import Timeline
from fastcomm.trace.run_traces import skipped_lines

TITLE = "Not measurable here, and how to record it"
_KERNELS = (
    "Record the device: activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] in PyTorch, "
    "nsys profile --trace=cuda,nvtx in Nsight Systems"
)
_SIZES = "Record sizes: PyTorch 2.4 or newer, or record_shapes=True"
_MATCHED = (
    "Record the same steps of all ranks, with names and members of process groups: PyTorch 2.4 "
    "or newer"
)
# By id of a section.
_TO_RECORD = {
    "timeline": _KERNELS,
    "time": _KERNELS,
    "idle": _KERNELS,
    "overlap": _KERNELS,
    "ranks": f"{_KERNELS}; of several ranks",
    "windows": "Record several phases of communication, with their times",
    "bandwidth": _SIZES,
    "volume": _SIZES,
    "across": _MATCHED,
}
_FLOPS = "shapes of operators: record_shapes=True, and pass --flops to fastcomm"


def report_page(
    metrics: Metrics,
    paths: Sequence[str],
    *,
    options: Sequence[str] = (),
    critical: CriticalPath | str | None = None,
    answers: Sequence[Candidate | None] = (),
    timeline: Timeline | str | None = None,
    data: Sequence[tuple[str, str]] = (),
) -> Page:
    """Return the page of a run.

    Parameters
    ----------
    metrics
        The metrics of the run.
    paths, options
        Command line arguments that name and read the run; suggested commands repeat them.
    critical
        The critical path, or the reason why there is none; None: the page has neither.
    answers
        For each finding what its fix saves in the step of the path; None where unknown.
    timeline
        The timeline, or the reason why there is none; None: the page has neither.
    data
        Data files next to the page, each with a description.

    """
    why = missing_data.reason(metrics.missing)
    return Page(
        title="Communication report",
        source=" ".join(paths),
        headline=(metrics.headline,),
        health=metrics.health or "",
        facts=findings_page.facts(metrics, why),
        findings=findings_page.findings(
            Suggestions(metrics=metrics, arguments=(*paths, *options)),
            timeline if isinstance(timeline, Timeline) else None,
            answers,
        ),
        sections=_sections(metrics, why, timeline, critical),
        warnings=(
            *(f"skipped: {plain((line,))}" for line in skipped_lines(metrics.skipped)),
            *metrics.warnings,
            *([critical] if isinstance(critical, str) else []),
        ),
        data=tuple(data),
        is_host_run=metrics.is_host_run,
    )


def _sections(
    metrics: Metrics,
    why: str,
    timeline: Timeline | str | None,
    critical: CriticalPath | str | None,
) -> tuple[Section, ...]:
    """Return the sections in order; `why` is the reason why times are unknown."""
    by_rank = metrics.rank_means
    sections = [
        *([timelines.section(timeline)] if timeline is not None else []),
        metrics_page.breakdown_section(metrics, by_rank, why),
        metrics_page.idle_section(metrics, why),
        traffic_page.overlap_section(metrics, why),
        traffic_page.section(metrics),
        traffic_page.volume_section(metrics),
        *filter(None, (traffic_page.pairs_section(metrics),)),
        traffic_page.windows_section(metrics, why),
        metrics_page.ranks_section(metrics, by_rank, why),
        waits_page.section(metrics),
    ]
    measured, unknown = divided(sections, metrics)
    return (
        *measured,
        *([critical_path_page.section(critical)] if isinstance(critical, CriticalPath) else []),
        *([unknown] if unknown is not None else []),
        _groups_section(metrics),
    )


def _groups_section(metrics: Metrics) -> Section:
    """Return the section on process groups and the evidence for their tags."""
    table_ = groups(metrics)
    rules = ", ".join(metrics.found_by) or "no rule"
    return Section(
        name="evidence",
        title="Where do the parallelisms come from?",
        lead=(
            f"Iterations were found by {rules} and are cut on the {metrics.iteration_clock} "
            f"clock. Bytes are {metrics.bytes} bytes. The parallelism of each communication "
            "event is the parallelism of its process group.",
        ),
        blocks=(pages.shown(table_),) if table_.rows else (),
    )


def write(tables: Mapping[str, pa.Table], folder: Path, shown: str) -> list[tuple[str, str]]:
    """Write tables as Parquet files into a folder.

    Parameters
    ----------
    tables
        By name of the file without suffix.
    folder
        Where the files are written.
    shown
        Path of the folder as the page shows it.

    Returns
    -------
    list of tuple of two str
        `shown`/name of each file, and a description: its number of rows.

    """
    names = {f"{name}.parquet": table for name, table in tables.items()}
    files.write(
        folder, {name: partial(arrow_files.write, table) for name, table in names.items()}
    )
    return [(f"{shown}/{name}", many(table.num_rows, "row")) for name, table in names.items()]


def write_report(
    results: PageResults,
    output: str | Path = "report.html",
    *,
    paths: Sequence[str],
    options: Sequence[str] = (),
    with_data: bool = True,
    folder: Path | None = None,
) -> None:
    """Write the page of `fastcomm report` to a file.

    Parameters
    ----------
    results
        Metrics, path and timeline of the run.
    output
        The HTML file.
    paths, options
        Command line arguments that name and read the run; suggested commands repeat them.
    with_data
        Whether to write the tables as Parquet files.
    folder
        The directory of the tables; None for one next to the page, `report-data` for
        `report.html`.

    Raises
    ------
    FastcommError
        If a file cannot be written.

    """
    output = Path(output)
    beside = output.with_name(f"{output.stem}-data")
    place = (folder, str(folder)) if folder is not None else (beside, beside.name)
    page = report_page(
        results.metrics,
        paths,
        options=options,
        critical=results.path,
        answers=results.answers,
        timeline=results.timeline,
        data=write(results.metrics.to_arrow(), *place) if with_data else [],
    )
    write_page(page, output)


def divided(
    sections: Sequence[Section], metrics: Metrics
) -> tuple[tuple[Section, ...], Section | None]:
    """Return the sections that have an answer, and the section on the others, if any."""
    answered = tuple(
        replace(section, blocks=_answered(section))
        for section in sections
        if not _missing(section) or _answered(section)
    )
    rows = [
        (section.title, _missing(section)[0].why, _TO_RECORD.get(section.name, ""))
        for section in sections
        if _missing(section)
    ]
    if metrics.link_bandwidth is None and metrics.bandwidth:
        remedy = "Pass --link-bandwidth, as in 400Gbit/s"
        rows.append(("Which share of the link is used?", NO_LINK, remedy))
    reasons = [why for why in metrics.flops.unknown.values() if why]
    if reasons and not metrics.is_host_run:
        why = NO_FLOPS if NO_FLOPS in reasons else reasons[0]
        rows.append(("What is the MFU?", why.partition(":")[0], f"Record {_FLOPS}"))
    if not rows:
        return answered, None
    heads = ("question", "why not", "to do")
    questions = table("unmeasured-table", "Questions without an answer", heads, rows)
    lead = ("These questions have no answer in this run.",)
    return answered, Section(name="unmeasured", title=TITLE, lead=lead, blocks=(questions,))


def _missing(section: Section) -> list[Missing]:
    """Return the charts of a section that cannot be drawn."""
    return [block for block in section.blocks if isinstance(block, Missing)]


def _answered(section: Section) -> tuple[Block, ...]:
    """Return the blocks of a section without missing charts, and without empty tables."""
    return tuple(
        block
        for block in section.blocks
        if not isinstance(block, Missing | PageTable) or _has_numbers(block)
    )


def _has_numbers(block: Missing | PageTable) -> bool:
    """Whether a table has any known number, or only texts."""
    if isinstance(block, Missing):
        return False
    places = [at for at, column in enumerate(block.columns) if column.is_number]
    return not places or any(row[at].sort for row in block.rows for at in places)
