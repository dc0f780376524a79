"""The tools of the server: what each takes, what it answers, and how it computes.

A tool is an entry of `TOOLS`. Its arguments are a class of options, whose fields are also its
JSON schema. Another tool needs a class, a function from a session to an `Answer`, and an entry.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.agents.answer import Answer, Total, quantity, rendered, shown
from fastcomm.agents.options import (
    CompareArguments,
    KernelArguments,
    MeasureArguments,
    PageArguments,
    PathArguments,
    PlanArguments,
    QueryArguments,
    RunArguments,
    WhatIfArguments,
    WritePageArguments,
)
from fastcomm.agents.session import AgentSession, RunChoice
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import build, field_infos, field_types, literals
from fastcomm.options import EditOptions
from fastcomm.sql.options import SqlOptions
from fastcomm.sql.views import VIEWS
from fastcomm.trace.run_traces import named_ranks, ranges
from fastcomm.units import counted, format_bytes, format_ns, percent, plural

if TYPE_CHECKING:
    from fastcomm.comparison.two_runs import ComparedRun
    from fastcomm.critical_path.result import CriticalPath
    from fastcomm.metrics.findings.finding import Finding
    from fastcomm.metrics.result import Metrics
    from fastcomm.trace.run_traces import SkippedRank

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]*")  # of a model or cluster; never a file
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FILE_ENDS = (".toml", ".json", ".yaml", ".yml", ".csv")


def list_runs(session: AgentSession, _: PageArguments) -> Answer:
    """Answer which directories have files."""
    rows = session.folders.listed()
    table = pa.table(
        {
            "run": pa.array([row.name for row in rows], pa.string()),
            "files": pa.array([row.files for row in rows], pa.int64()),
            "bytes": pa.array([row.size for row in rows], pa.int64()),
            "kinds": pa.array([row.kinds for row in rows], pa.string()),
        }
    )
    return Answer(
        about=f"{len(rows)} directories have files; describe_run says what one of them is.",
        tables={"runs": table},
        table="runs",
        further=("describe_run(run=...); for dumps of a job that hangs: hang(run=...)",),
    )


def describe_run(session: AgentSession, arguments: RunArguments) -> Answer:
    """Answer what a run is: format, ranks, steps, groups, missing data."""
    from fastcomm.info.info import info

    try:
        traces = session.opened(arguments.choice)
    except FastcommError as error:
        raise FastcommError(f"{error}; dumps of a job that hangs: hang(run=...)") from error
    result = session.result(
        arguments.choice, "info", lambda _: info(traces, all_ranks=False, anew=True)
    )
    first = "first rank"
    totals = (
        Total(name="ranks", value=_count_of(result.ranks, result.expected), rows="files"),
        Total(name="files", value=f"{result.files}, {format_bytes(result.size)}", rows="files"),
        Total(
            name="format",
            value=", ".join(sorted({one.format for one in result.details})),
            rows=first,
        ),
        Total(
            name="steps",
            value=ranges(sorted(set(result.iterations["number"].to_pylist()))) or "none",
            rows=f"{first}; table iterations",
        ),
        Total(
            name="mean step (host clock)",
            value=quantity("ns", result.step_ns),
            rows=f"{first}; table iterations",
        ),
    )
    return Answer(
        about=f"{arguments.run}: {named_ranks(result.ranks)}",
        totals=totals,
        tables=result.to_arrow(),
        table="groups",
        unknown=tuple(_split(text) for text in result.missing_data),
        notes=(*result.all_warnings, *(f"skipped: {one}" for one in result.skipped)),
        further=("measure(run=...) says where the step's time goes; findings(run=...) why",),
    )


def _split(text: str) -> tuple[str, str]:
    """Return a sentence as what is unknown, and why."""
    subject, colon, why = text.partition(": ")
    return (subject, why) if colon else ("data", text)


def _count_of(ranks: tuple[int, ...], expected: int) -> str:
    return f"{len(ranks)} of {expected} ({ranges(ranks)})"


def _rows_of(metrics: "Metrics") -> str:
    """Return the rows that means of a run are from."""
    steps = "n/a" if metrics.iterations is None else str(metrics.iterations)
    return f"mean of {len(metrics.measured_ranks)} ranks x {steps} steps; table iterations"


def measure(session: AgentSession, arguments: MeasureArguments) -> Answer:
    """Answer where the time of a step goes."""
    metrics = session.metrics(arguments.choice, arguments.metrics)
    rows, step = _rows_of(metrics), metrics.iteration.mean_ns
    parts = [
        Total(name=name, value=_time_and_share(share, step), rows=rows)
        for name, share in metrics.breakdown.exact.items()
        if share or name in {"compute", "idle"}
    ]
    totals = (
        Total(name="mean step", value=quantity("ns", step), rows=rows),
        Total(
            name="p99 step",
            value=quantity("ns", metrics.iteration.p99_ns),
            rows=rows.replace("mean", "99th percentile"),
        ),
        Total(
            name="ranks",
            value=_count_of(metrics.measured_ranks, metrics.expected_ranks),
            rows="table ranks",
        ),
        *parts,
    )
    tables = {name: table for name, table in metrics.to_arrow().items() if table.num_rows}
    return Answer(
        about=metrics.headline,
        totals=totals,
        tables={"parallelisms": _parallelisms(metrics), **tables},
        table="parallelisms",
        unknown=_unknown(metrics),
        notes=_notes(metrics),
        further=(
            "findings(run=...) names causes; idle_causes(run=...) splits idle time",
            "table='waits' with ranks=: waits by rank; limit= and offset= for more rows",
        ),
    )


def _time_and_share(share: float | None, step: float | None) -> str:
    if share is None or step is None:
        return "unknown"
    return f"{format_ns(share * step)}, {percent(share)} of the step"


def _parallelisms(metrics: "Metrics") -> pa.Table:
    """Return a row for each parallelism: exposed time, waits, transfer, bytes, bandwidth."""
    rows = []
    for tag, volume in metrics.volume.items():
        exposure = metrics.exposure.get(tag)
        rows.append(
            {
                "parallelism": tag,
                "exposed_per_step_ns": None if exposure is None else exposure.exposed_ns,
                "exposed_wait_ns": None if exposure is None else exposure.wait_ns,
                "exposed_transfer_ns": None if exposure is None else exposure.transfer_ns,
                "bytes_per_step_per_gpu": volume.bytes_per_step_per_gpu,
                "bus_bandwidth": metrics.bandwidth[tag].avg_bus_bw,
                "events": volume.comm_events,
            }
        )
    numbers = (
        *("exposed_per_step_ns", "exposed_wait_ns", "exposed_transfer_ns"),
        *("bytes_per_step_per_gpu", "bus_bandwidth"),
    )
    schema = [("parallelism", pa.string()), *((name, pa.float64()) for name in numbers)]
    return pa.Table.from_pylist(rows, schema=pa.schema([*schema, ("events", pa.int64())]))


def _unknown(metrics: "Metrics") -> tuple[tuple[str, str], ...]:
    """Return what is unknown of a run, and why."""
    from fastcomm.metrics import missing_data

    rows = [
        (one["what"], f"{one['reason']} (ranks {ranges(one['ranks'])})")
        for one in missing_data.unknown(metrics.missing)
    ]
    return (*rows, *_unread(metrics.skipped, metrics.ranks, metrics.expected_ranks))


def _unread(
    skipped: "Sequence[SkippedRank]", ranks: Sequence[int], expected: int
) -> list[tuple[str, str]]:
    """Return the ranks of a run that are not in its numbers, and why."""
    rows = [(f"rank {one.rank}", f"not read: {one.error}") for one in skipped]
    if absent := expected - len({*ranks} | {one.rank for one in skipped}):
        rows.append((f"{absent} of {expected} ranks", "no trace of them is here"))
    return rows


def _notes(metrics: "Metrics") -> tuple[str, ...]:
    note = metrics.across.matching.note
    return (*metrics.warnings, *([note] if note else []))


def findings(session: AgentSession, arguments: MeasureArguments) -> Answer:
    """Answer the causes of lost time with their evidence, then the symptoms."""
    metrics = session.metrics(arguments.choice, arguments.metrics)
    causes = [one for one in metrics.findings if not one.is_symptom]
    count = f"{len(causes)} {plural(len(causes), 'cause')} of lost time"
    about, unknown = metrics.health or f"{count}.", _unknown(metrics)
    if metrics.health is None and unknown and not metrics.findings:
        about = f"Causes of lost time cannot be told. {unknown[0][0]}: {unknown[0][1]}"
    if metrics.findings and not causes:
        first = metrics.findings[0]
        about = f"{about} Of all ranks: {first.text} Confidence: {first.confidence}."
    if causes:
        about = f"{count}. {causes[0].text} Confidence: {causes[0].confidence}."
    rows = _rows_of(metrics)
    totals = (
        Total(name="mean step", value=quantity("ns", metrics.iteration.mean_ns), rows=rows),
        Total(name="causes", value=str(len(causes)), rows="items"),
        Total(name="symptoms", value=str(len(metrics.findings) - len(causes)), rows="items"),
    )
    return Answer(
        about=about,
        totals=totals,
        items=tuple(_finding(one, metrics) for one in metrics.findings),
        tables={"findings": metrics.to_arrow()["findings"]},
        table="findings",
        unknown=unknown,
        notes=_notes(metrics),
        further=(
            "a cost is the time beyond that of peers; what_if, as in test_with, predicts by "
            "how much a fix shortens the step",
        ),
    )


def _finding(finding: "Finding", metrics: "Metrics") -> dict[str, Any]:
    """Return a finding with its cost, confidence, evidence, and the what-if that tests it."""
    edit = None if finding.fix is None else finding.fix.edit
    if edit is not None and edit.heal and metrics.is_host_run:
        edit = None  # ranks whose operators differ in number have no peers
    fix = {} if edit is None else {"test_with": f"what_if({_edit(edit)})"}
    return {
        "kind": finding.kind,
        "is": "symptom" if finding.is_symptom else "cause",
        "text": finding.text,
        "ranks": ranges(finding.ranks) or "all",
        "cost_per_step": f"{format_ns(finding.cost_ns)}, {percent(finding.share)} of the step",
        "confidence": finding.confidence,
        "evidence": {
            fact.key: quantity(fact.key, fact.value)
            for fact in finding.evidence
            if fact.value is not None
        },
        **fix,
    }


def _edit(edit: EditOptions) -> str:
    """Return the arguments of what_if that an edit stands for."""
    texts = (
        f"{name}={list(values)}"
        for name in ("scale", "set", "heal", "remove", "overlap")
        if (values := getattr(edit, name))
    )
    return ", ".join(texts)


def idle_causes(session: AgentSession, arguments: MeasureArguments) -> Answer:
    """Answer why the device is idle."""
    metrics = session.metrics(arguments.choice, arguments.metrics)
    rows, step = _rows_of(metrics), metrics.iteration.mean_ns
    share = metrics.breakdown.exact.get("idle")
    causes = sorted(metrics.idle.items(), key=lambda pair: -(pair[1] or 0))
    totals = (
        Total(name="idle", value=_time_and_share(share, step), rows=rows),
        *(
            Total(name=name, value=_time_and_share(own, step), rows=rows)
            for name, own in causes
        ),
    )
    by_rank = [
        {"rank": rank, **{f"{cause}_ns": ns for cause, ns in own.items()}}
        for rank, own in metrics.idle_by_rank.items()
    ]
    names = [
        {
            "cause": one.cause,
            "name": one.name,
            "per_step_ns": one.ns_per_step,
            "ranks": one.ranks,
        }
        for one in metrics.idle_names
    ]
    return Answer(
        about=f"Idle time: {_time_and_share(share, step)}. Its causes are below, by rule.",
        totals=totals,
        tables={"names": _table(names), "by_rank": _table(by_rank)},
        table="names",
        unknown=_unknown(metrics),
        notes=_notes(metrics),
        further=("table='by_rank' with ranks=: idle time of ranks by cause",),
    )


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def kernels(session: AgentSession, arguments: KernelArguments) -> Answer:
    """Answer which kernels take how long."""
    from fastcomm.device_work.analysis import sum_kernels
    from fastcomm.device_work.options import KernelOptions

    names = ("by", "match", "rank", "step")
    values = {name: getattr(arguments, name) for name in names}
    options = build(KernelOptions, values, "kernels")
    traces = session.opened(arguments.choice)
    result = session.result(
        arguments.choice, ("kernels", options), lambda _: sum_kernels(traces, options)
    )
    rows = f"{len(result.ranks)} ranks, {result.steps} steps of ranks; table kernels"
    totals = tuple(
        Total(
            name=name,
            value=f"{_per_step(ns, result.steps)}, {quantity('share', result.share(ns))} of it",
            rows=rows,
        )
        for name, ns in result.by_category.items()
    )
    absent = (
        _unread(result.skipped, result.read.ranks, result.read.expected)
        if arguments.rank is None
        else []
    )
    columns = ["name", "category", "per_step_ns", "share", "count", "mean_ns", "p95_ns"]
    columns += ["ranks", "slowest_rank", "slowdown", "cost_ns"]
    table = result.to_arrow()
    brief = table.select([name for name in columns if name in table.column_names])
    return Answer(
        about=result.headline,
        totals=totals,
        tables={"kernels": brief, "all_columns": table, "by_rank": result.by_rank()},
        table="kernels",
        unknown=(*result.unknown.items(), *absent),
        notes=(*result.notes, *result.warnings),
        further=("by='operator' or 'module'; match='regex'; rank=; step=; limit=, offset=",),
    )


def _per_step(ns: int, steps: int) -> str:
    return f"{format_ns(ns / steps)} a step" if steps else f"{format_ns(ns)} in total"


_QUERY_LIMITS = SqlOptions(timeout="60s")
_MOST_QUERY_ROWS = 10_000  # that an agent can ask for


def sql(session: AgentSession, arguments: QueryArguments) -> Answer:
    """Answer a query on a run, or which columns it can use."""
    if not arguments.query:
        columns = [(view.name, column) for view in VIEWS for column in view.columns]
        about = pa.table(
            {
                "view": [name for name, _ in columns],
                "column": [column.name for _, column in columns],
                "unit": [column.unit for _, column in columns],
                "meaning": [column.text for _, column in columns],
            }
        )
        tables = {view.name: about.filter(pc.field("view") == view.name) for view in VIEWS}
        return Answer(
            totals=(Total(name="views", value=str(len(VIEWS)), rows="one table each"),),
            about="Views: " + "; ".join(f"{view.name}: {view.text}" for view in VIEWS),
            tables=tables,
            table=VIEWS[0].name,
        )
    from fastcomm.sql.database import answered
    from fastcomm.sql.run_tables import RunTables

    traces = session.opened(arguments.choice)
    tables_of_run = session.result(arguments.choice, "sql", lambda _: RunTables(traces))
    result = answered(tables_of_run, arguments.query, _QUERY_LIMITS, most=_MOST_QUERY_ROWS)
    read = "; ".join(map(str, result.reads)) or "nothing"
    rows = counted(result.row_count, "row")
    return Answer(
        about=f"{arguments.run}: {rows}; times of the views are in ns, null is unknown",
        totals=(Total(name="rows", value=str(result.row_count), rows=f"read: {read}"),),
        tables={"rows": result.table},
        table="rows",
        is_exact=True,
        notes=(*result.warnings, *(f"skipped: {one.path}" for one in result.skipped)),
    )


def compare(session: AgentSession, arguments: CompareArguments) -> Answer:
    """Answer what changed between two runs."""
    from fastcomm.comparison import tables
    from fastcomm.comparison.two_runs import compare_runs

    both = [
        _compared(session, name, text)
        for name, text in (("before", arguments.before), ("after", arguments.after))
    ]
    pairs = None if arguments.with_kernels else ()
    comparison, _ = compare_runs(*both, kernels=pairs)
    step = comparison.step
    rows = "mean step of the ranks that both runs have"
    totals = [
        Total(name="step before", value=quantity("ns", step.before), rows=rows),
        Total(name="step after", value=quantity("ns", step.after), rows=rows),
        Total(name="change", value=quantity("relative", step.relative), rows=rows),
        *(
            Total(name=f"part {part.name}", value=format_ns(part.effect_ns), rows="table parts")
            for part in comparison.parts[:4]
        ),
    ]
    return Answer(
        cautions=comparison.differences,
        about=tables.headline(comparison),
        totals=tuple(totals),
        items=tuple(
            {
                "cause": one.text,
                "state": _state(one.before_ns, one.after_ns),
                "effect_per_step": format_ns(one.effect_ns),
                "confidence": one.confidence,
            }
            for one in comparison.causes
        ),
        tables=comparison.to_arrow(),
        table="parts",
        unknown=tuple(("ranks", text) for text in comparison.incomplete),
        notes=comparison.other_notes,
        further=("table='values': every metric; with_kernels=true: kernels, too",),
    )


def _state(before: float | None, after: float | None) -> str:
    if before is None:
        return "new"
    return "gone" if after is None else "changed"


def _compared(session: AgentSession, name: str, text: str) -> "ComparedRun":
    """Return a run of a comparison; `name` is that of the argument, for errors."""
    from fastcomm.comparison.metrics_documents import saved_metrics
    from fastcomm.comparison.two_runs import ComparedRun

    if not text:
        raise ConfigError(f"{name} is missing; list_runs names the runs")
    choice = RunChoice(run=text)
    saved = saved_metrics(session.path(choice))
    if saved is not None:
        return ComparedRun(document=saved)
    traces = session.opened(choice)
    return ComparedRun.of_traces(traces, lambda run: _measured(session, choice, run, traces))


def _measured(session: AgentSession, choice: RunChoice, run: Any, whole: Any) -> "Metrics":
    """Measure a run of a comparison: all of its ranks from memory, or some of them anew."""
    from fastcomm.metrics.computation import compute_metrics

    if run is whole:
        return session.metrics(choice, MetricsOptions())
    return compute_metrics(run, MetricsOptions(with_tables=False))


def critical_path(session: AgentSession, arguments: PathArguments) -> Answer:
    """Answer which chain of work determines the step."""
    path = session.critical_path(arguments.choice, step=arguments.step, rank=arguments.rank)
    total, rows = path.length_ns, f"step {path.step}, {named_ranks(path.ranks)}"
    classes = sorted(path.summary_ns().items(), key=lambda pair: -pair[1])
    totals = (
        Total(name="path", value=format_ns(total), rows=f"{rows}; table critical_path"),
        *(
            Total(
                name=name,
                value=f"{format_ns(ns)}, {percent(ns / total) if total else 'n/a'} of the path",
                rows=f"{rows}; table critical_path",
            )
            for name, ns in classes
            if ns
        ),
    )
    tables = {"operators": path.top("name"), **path.to_arrow()}
    return Answer(
        about=f"The critical path of step {path.step} takes {format_ns(total)}; "
        f"most of it is {classes[0][0] if classes else 'n/a'}.",
        totals=totals,
        tables=tables,
        table="operators",
        unknown=_of_path(path),
        notes=(*path.notes, *path.warnings),
        further=(
            "table='ranks': time on the path and waits caused by rank",
            "what_if(run=...) with the same step tests a change",
        ),
    )


def _of_path(path: "CriticalPath") -> tuple[tuple[str, str], ...]:
    """Return the ranks that a path through all ranks does not go through, and why."""
    if not path.is_joined:
        return ()
    return tuple(_unread(path.skipped, path.ranks, path.across.expected_ranks))


def what_if(session: AgentSession, arguments: WhatIfArguments) -> Answer:
    """Answer how long the step takes after changes."""
    path: CriticalPath = session.critical_path(
        arguments.choice, step=arguments.step, rank=arguments.rank
    )
    names = ("scale", "set", "heal", "remove", "overlap")
    edits = {name: value for name in names if (value := getattr(arguments, name))}
    answer = path.what_if(**edits)
    rows = f"replay of step {path.step}, {named_ranks(path.ranks)}"
    interval, bounds = answer.interval, answer.interval.bounds_ns
    unknown = _of_path(path)
    totals = [Total(name="step before", value=format_ns(answer.before_ns), rows=rows)]
    if edits:
        saved = answer.before_ns - answer.after_ns
        totals += [
            Total(name="step after", value=format_ns(answer.after_ns), rows=rows),
            Total(
                name="step after, interval",
                value="unknown" if bounds is None else " to ".join(map(format_ns, bounds)),
                rows=f"error {quantity('share', interval.edit_error)}: {interval.reason}",
            ),
            Total(
                name="saved",
                value=f"{format_ns(saved)}, {percent(saved / answer.before_ns)} of the step",
                rows=rows,
            ),
        ]
        if bounds is None:
            unknown = (*unknown, ("interval of the step after", interval.reason))
    tried = answer.candidates or ()
    about = f"{len(tried)} changes shorten the step when tried alone; the best is first."
    if edits:
        about = (
            f"What if {', '.join(map(str, answer.edits))}: {format_ns(answer.after_ns)} a step "
            f"instead of {format_ns(answer.before_ns)}."
        )
    return Answer(
        about=about,
        totals=tuple(totals),
        tables=answer.to_arrow(),
        table="ranks" if edits else "candidates",
        unknown=unknown,
        notes=(*answer.before.notes, *answer.warnings),
        further=("edits: scale=, set=, heal=, remove=, overlap=; without any, all are tried",),
    )


def hang(session: AgentSession, arguments: RunArguments) -> Answer:
    """Answer why a job hangs, from the dumps of its flight recorder."""
    from fastcomm.hang.analysis import diagnose_hang

    result = session.result(
        arguments.choice, "hang", lambda path: diagnose_hang(path, keep_going=True)
    )
    rows = f"dumps of {result.dumps} of {result.world_size} ranks"
    totals = [
        Total(name="hangs", value="yes" if result.hang else "no", rows=rows),
        Total(name="kind", value=result.kind, rows=rows),
        Total(name="ranks of the job", value=str(result.world_size), rows=rows),
        Total(name="ranks without a dump", value=ranges(result.missing) or "none", rows=rows),
        Total(name="culprits", value=ranges(result.culprits) or "none", rows=rows),
        Total(name="waiting", value=ranges(result.waiting) or "none", rows=rows),
        Total(name="confidence", value=result.confidence, rows=rows),
    ]
    if result.group is not None:
        group = f"{result.group.name}, {result.group.desc}, {result.group.parallelism}"
        totals.append(Total(name="group", value=shown(group), rows=rows))
    if result.collective is not None:
        call = f"{result.collective.op}, sequence {result.collective.sequence}"
        totals.append(Total(name="call", value=shown(call), rows=rows))
    missing = [("dumps", f"none of ranks {ranges(result.missing)}")] if result.missing else []
    return Answer(
        about=result.headline,
        totals=tuple(totals),
        tables={"chain": result.to_arrow()},
        table="chain",
        unknown=tuple(missing),
        notes=(*result.evidence, result.advice, *result.warnings, *result.failed),
        further=result.next,
    )


def plan(_: AgentSession, arguments: PlanArguments) -> Answer:
    """Answer which strategies of a trainer are fastest."""
    from fastcomm.planning.options import PlanOptions
    from fastcomm.planning.search import search_plans

    for name in ("model", "cluster"):
        text = getattr(arguments, name)
        if not _NAME.fullmatch(text) or text.lower().endswith(_FILE_ENDS):
            raise ConfigError(f"{name} {text!r}: expected the name of a preset, no file")
    values = {
        "model": arguments.model,
        "world_size": str(arguments.gpus),
        "global_batch": str(arguments.global_batch),
        "cluster": arguments.cluster,
        "trainer": arguments.trainer,
    }
    if arguments.seq_len is not None:
        values["seq_len"] = str(arguments.seq_len)
    result = search_plans(build(PlanOptions, values, "plan"))
    rows = "estimates, nothing is run; table strategies"
    totals = [
        Total(name="strategies tried", value=str(result.candidates), rows=rows),
        Total(name="strategies that fit", value=str(len(result.plans)), rows=rows),
    ]
    if result.plans:
        fastest = format_ns(result.plans[0].step_s * 1e9)
        totals.append(Total(name="fastest step", value=fastest, rows=rows))
        equal = f"{result.equal} layouts, within the error to expect"
        totals.append(Total(name="as fast as the fastest", value=equal, rows=rows))
    about = f"{len(result.plans)} strategies of {arguments.trainer} fit; the fastest is first."
    return Answer(
        about=about if result.plans else result.nearest(),
        totals=tuple(totals),
        tables={"strategies": result.to_arrow()},
        table="strategies",
        notes=(result.note,) if result.note else (),
        further=("limit= and offset= show slower strategies",),
    )


def write_page(session: AgentSession, arguments: WritePageArguments) -> Answer:
    """Write the page of a run below the directory for pages."""
    from fastcomm.report.analysis import results_for_page
    from fastcomm.report.options import ReportOptions
    from fastcomm.report.page import write_report

    if session.out is None:
        raise ConfigError("this server writes no pages; start it with --out=DIR")
    name = arguments.name if arguments.name.endswith(".html") else f"{arguments.name}.html"
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(f"name {arguments.name!r}: expected a file name, as in report.html")
    target = session.out / name
    results = results_for_page(session.opened(arguments.choice), ReportOptions(no_data=True))
    write_report(results, target, paths=[arguments.run], options=[], with_data=False)
    return Answer(
        about=f"Wrote the page of {arguments.run}: a file for a browser.",
        totals=(
            Total(name="page", value=str(target), rows=_rows_of(results.metrics)),
            Total(name="size", value=format_bytes(target.stat().st_size), rows="file"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTool:
    """A tool: what it is for, its arguments, its function, and whether it writes a file."""

    name: str
    text: str
    arguments: type[Any]
    answer: Callable[[AgentSession, Any], Answer]
    writes: bool = False

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        kind: Any = self.arguments
        infos = field_infos(kind)
        return {
            "type": "object",
            "properties": {
                name: {**_schema(self.arguments, name), "description": info.text}
                for name, info in infos.items()
            },
            "required": list(getattr(self.arguments, "required", ())),
            "additionalProperties": False,
        }

    def call(self, session: AgentSession, values: Mapping[str, Any]) -> str:
        """Return the text of the answer. Raises `FastcommError` for wrong arguments."""
        arguments = build(self.arguments, dict(values), self.name)
        page, answer = arguments.page(), self.answer(session, arguments)
        if page.table is not None and page.table not in answer.tables:
            tables = ", ".join(answer.tables) or "none"
            raise ConfigError(f"{self.name}: no table {page.table!r}; tables: {tables}")
        if page.ranks is not None and isinstance(arguments, RunArguments):
            self._check_ranks(session, arguments, page.ranks)
        return rendered(answer, page)

    def _check_ranks(
        self, session: AgentSession, arguments: RunArguments, ranks: Sequence[int]
    ) -> None:
        """Raise `ConfigError` for ranks that the run does not have."""
        try:
            present = session.opened(arguments.choice).ranks
        except FastcommError:  # no traces: the dumps of a job that hangs
            return
        if absent := sorted({*ranks} - {*present}):
            raise ConfigError(
                f"{self.name}: ranks: the run has no {named_ranks(absent)}; it has "
                f"{named_ranks(present)}"
            )


def _schema(kind: type[Any], name: str) -> dict[str, Any]:
    """Return the JSON schema of one argument, without its text."""
    default = next(own.default for own in fields(kind) if own.name == name)
    more = {} if default in (None, "", ()) else {"default": default}
    if texts := literals(kind, name):
        return {"type": "string", "enum": list(texts), **more}
    of = next(one for one in field_types(kind, name) if one is not NoneType)
    if get_origin(of) is tuple:
        item = {str: "string", int: "integer"}[get_args(of)[0]]
        return {"type": "array", "items": {"type": item}, **more}
    return {"type": {str: "string", int: "integer", bool: "boolean"}[of], **more}


# The order is that in which an agent asks.
_ALL = (
    AgentTool(
        name="list_runs",
        text="List the directories that this server may read. Ask this first.",
        arguments=PageArguments,
        answer=list_runs,
    ),
    AgentTool(
        name="describe_run",
        text="Describe a run: format, ranks, steps, process groups, missing data. Fast.",
        arguments=RunArguments,
        answer=describe_run,
    ),
    AgentTool(
        name="measure",
        text="Measure where the time of a step goes: compute, exposed communication by "
        "parallelism, copies, idle; tables by rank.",
        arguments=MeasureArguments,
        answer=measure,
    ),
    AgentTool(
        name="findings",
        text="Name the causes of lost time (stragglers, slow links, late hosts, imbalanced "
        "stages, hot experts) with cost, confidence and evidence; then symptoms.",
        arguments=MeasureArguments,
        answer=findings,
    ),
    AgentTool(
        name="idle_causes",
        text="Split the device's idle time into causes: launch-bound, data loading, "
        "synchronization, garbage collection, pipeline bubble; names, ranks.",
        arguments=MeasureArguments,
        answer=idle_causes,
    ),
    AgentTool(
        name="kernels",
        text="List device work by name, category, operator or module: time per step, calls, "
        "the rank that is slowest at it.",
        arguments=KernelArguments,
        answer=kernels,
    ),
    AgentTool(
        name="sql",
        text="Answer an SQL query on ranks, steps, events, collectives, waits, findings, "
        "metrics or kernels of a run: what no other tool counts.",
        arguments=QueryArguments,
        answer=sql,
    ),
    AgentTool(
        name="compare",
        text="Compare two runs: change of the step, split into parts; causes that are new or "
        "gone.",
        arguments=CompareArguments,
        answer=compare,
    ),
    AgentTool(
        name="critical_path",
        text="Find the chain of work through all ranks that determines one step.",
        arguments=PathArguments,
        answer=critical_path,
    ),
    AgentTool(
        name="what_if",
        text="Predict the step after changes, by replaying it; without changes, list what "
        "would shorten it most. Tests a claim.",
        arguments=WhatIfArguments,
        answer=what_if,
    ),
    AgentTool(
        name="hang",
        text="Find why a job hangs, from the flight-recorder dumps of its ranks.",
        arguments=RunArguments,
        answer=hang,
    ),
    AgentTool(
        name="plan",
        text="Search the fastest parallel strategy of a model on a cluster. Reads no run.",
        arguments=PlanArguments,
        answer=plan,
    ),
    AgentTool(
        name="page",
        text="Write the HTML page of a run for people; needs a server with --out.",
        arguments=WritePageArguments,
        answer=write_page,
        writes=True,
    ),
)
TOOLS: Mapping[str, AgentTool] = {tool.name: tool for tool in _ALL}
