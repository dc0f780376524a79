"""The line of a profiled window."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from fastcomm.comparison.cause_changes import CauseChange
from fastcomm.comparison.result import BreakdownChange
from fastcomm.metrics.tables import part_name
from fastcomm.show.console import STEP_DIGITS, plain_console, say
from fastcomm.trace.run_traces import ranges, ranks_words
from fastcomm.units import format_bandwidth, format_ns, format_signed_ns, signed_percent
from fastcomm.watch.changes import SlowerLinks, WindowReport


def show(report: WindowReport, console: Console | None = None) -> None:
    """Print the line of a window, and below it what changed against the first windows."""
    console = plain_console(console)
    say(console, line(report), hanging=2)
    for text in changes(report):
        say(console, text, indent=2, hanging=4)


def line(report: WindowReport) -> str:
    """Return the markup of a window's line: its run, its step, its ranks and its step time."""
    window, metrics = report.window, report.metrics
    step = metrics.iteration.mean_ns
    ranks = ranks_words(len(metrics.ranks), metrics.expected_ranks)
    time = "step time n/a" if step is None else f"{format_ns(step, STEP_DIGITS)} a step"
    change = ""
    if report.comparison is not None and report.comparison.step.relative is not None:
        change = f" ({signed_percent(report.comparison.step.relative)} since the first windows)"
    name = escape(f"{window.run_name}/{window.folder.name}")
    return f"[bold]{name}:[/] {ranks}, {time}{change}"


def changes(report: WindowReport) -> Iterator[str]:
    """Yield the markup of what changed; of a first window, its causes of lost time."""
    if report.other_sizes:
        before = " and ".join(map(str, report.other_sizes))
        yield (
            f"[yellow]note:[/] the job has {report.metrics.expected_ranks} ranks, in earlier "
            f"windows {before}: it is compared with windows of as many ranks only"
        )
    if report.comparison is None:
        yield from (escape(finding.text) for finding in report.first_causes[:1])
        return
    yield from map(_cause, report.causes)
    for links in report.slower_links:
        yield _slower(links, is_host_run=report.metrics.is_host_run)
    if report.parts:
        yield f"longer: {', '.join(map(_part, report.parts))}"


def _cause(cause: CauseChange) -> str:
    if cause.before_ns is None:
        return f"[yellow]new:[/] {escape(cause.text)}"
    if cause.after_ns is None:
        return f"[green]gone:[/] {escape(cause.text)}"
    return f"{format_signed_ns(cause.effect_ns)}: {escape(cause.text)}"


def _slower(links: SlowerLinks, *, is_host_run: bool) -> str:
    """Return the sentence on groups whose transfers are slower than in the first windows."""
    count, place = len(links.groups), ""
    if links.of_groups > 1:
        place = f" of {count} of {links.of_groups} groups, the slowest"
    rates = (format_bandwidth(rate) for rate in (links.after_bw, links.before_bw))
    doubt = " On the host, a busy core has the same effect." if is_host_run else ""
    return (
        f"[yellow]slower:[/] {links.tag} transfers{place} of ranks {ranges(links.groups[0])} "
        "reach {}, in the first windows {}.".format(*rates)
        + doubt
    )


def _part(part: BreakdownChange) -> str:
    return f"{part_name(part.name)} {format_signed_ns(part.effect_ns)}"
